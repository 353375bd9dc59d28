"""The base of all specs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from components.errors import Problem


class Spec(BaseModel):
    """Base of all specs: immutable, no unknown keys, no infinite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @classmethod
    def cross_problems(cls, parts: Mapping[str, Any]) -> Iterable[Problem]:
        """What is wrong between fields that are right on their own. `parts` holds the valid fields by name, so that
        these mistakes are reported together with those of single fields."""
        return ()


def nearest(name: Any, valid: Iterable[Any]) -> str | None:
    """The valid name most like `name`, or None where none is like it."""
    names = [str(v) for v in valid]
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    if close:
        return close[0]
    last = {n.rsplit(".", 1)[-1]: n for n in names}
    close = difflib.get_close_matches(str(name).rsplit(".", 1)[-1], last, n=1, cutoff=0.6)
    return last[close[0]] if close else None
