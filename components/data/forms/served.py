"""Form `served`: conversations of a served policy with feedback, as `components.data.served.rows` joins them."""

from __future__ import annotations

from components.data.columns import RowColumns
from components.data.examples import DataExample
from components.data.forms.base import Form


def _read_served(columns: RowColumns) -> DataExample:
    name, prompt = columns.need("conversation"), columns.get("prompt")
    return DataExample(columns.items("candidates"), name=name, group=prompt or "")


SERVED = Form(
    "served",
    "conversations of a served policy with scores, choices and corrections of its users",
    {"conversation": ("conversation",), "candidates": ("candidates",)},
    _read_served,
    more={"prompt": ("prompt",)},
)
