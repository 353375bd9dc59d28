"""Figures of conversations from the columns of their messages, without their texts."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from components.trajectories.columns import Array
from components.trajectories.decode import texts

_MESSAGES = "histories.list.element.messages.list.element"
ROLE_COLUMNS = (f"{_MESSAGES}.role",)
"""Columns that hold the number of messages of each episode."""
ENDING_COLUMNS = (f"{_MESSAGES}.role", f"{_MESSAGES}.finish_reason")
"""Columns that hold how each message ended."""


def message_counts_N(batch: pa.RecordBatch) -> Array:
    """(N,) number of messages of each episode, over all its histories. batch: with ROLE_COLUMNS."""
    return np.diff(_message_offsets(batch))


def finish_reasons(batch: pa.RecordBatch) -> list[str | None]:
    """(N,) finish reason of the last message of the assistant; None without one. batch: with ENDING_COLUMNS."""
    offsets = _message_offsets(batch)
    messages = batch.column("histories").values.field("messages").values
    spoken = pc.indices_nonzero(pc.equal(messages.field("role"), "assistant")).to_numpy()
    last_N = (
        np.searchsorted(spoken, offsets[1:], side="left") - 1
    )  # position in `spoken` of the last one before the end
    has_N = (last_N >= 0) & (np.append(spoken, -1)[last_N] >= offsets[:-1])
    reasons = messages.field("finish_reason").take(pa.array(spoken[last_N[has_N]])).fill_null("")
    known = iter(texts(reasons))
    return [(next(known) or None) if has else None for has in has_N.tolist()]


def _message_offsets(batch: pa.RecordBatch) -> Array:
    """(N + 1,) positions of the first message of each episode in the column of all messages, and of the end."""
    histories = batch.column("histories")
    return histories.values.field("messages").offsets.to_numpy()[histories.offsets.to_numpy()]
