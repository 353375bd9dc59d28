"""Base class of all specs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, model_validator

from components.errors import Problem


def reject_bool_for_number(cls: type[BaseModel], data: Any) -> Any:
    """Turn true and false in numeric fields into text, which the fields then reject. Python would accept a bool as a
    number. A model validator."""
    if not isinstance(data, Mapping):
        return data
    keys = {field.alias or name: field.annotation for name, field in cls.model_fields.items()}
    bools = {key for key, value in data.items() if isinstance(value, bool) and _is_number(keys.get(key))}
    return {key: str(value).lower() if key in bools else value for key, value in data.items()} if bools else data


def _is_number(annotation: Any) -> bool:
    kinds = set(_kinds(annotation))
    return bool(kinds & {int, float}) and not kinds & {bool, str, Any}


def _kinds(annotation: Any) -> Iterable[Any]:
    """Yield the types of an annotation, without those inside lists and mappings."""
    if get_origin(annotation) is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif get_origin(annotation) is Literal:
        yield from map(type, get_args(annotation))
    elif get_origin(annotation) is None:
        yield annotation
    elif get_origin(annotation) not in (list, dict, tuple, set):
        for part in get_args(annotation):
            yield from _kinds(part)


class FieldError(ValueError):
    """Problem of one field that a validator of the whole spec detects.

    field: name of the field. message: its value, what was expected, and what to do."""

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = field


class Spec(BaseModel):
    """Base of all specs: immutable, no unknown keys, no infinite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    _numbers = model_validator(mode="before")(classmethod(reject_bool_for_number))  # type: ignore[arg-type]

    @classmethod
    def cross_problems(cls, parts: Mapping[str, Any]) -> Iterable[Problem]:
        """Yield the problems between fields that are valid on their own. `parts` holds the valid fields by name, so
        these problems are reported together with those of single fields."""
        return ()


LONGEST_NAME = 100
"""Characters of the longest name for which a similar one is searched; the search takes quadratic time."""


def nearest(name: Any, valid: Iterable[Any]) -> str | None:
    """Return the valid name most similar to `name`; None if none is similar."""
    names = [str(v) for v in valid]
    if len(str(name)) > LONGEST_NAME:
        return None
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    if close:
        return close[0]
    last_parts = {n.rsplit(".", 1)[-1]: n for n in names}
    close = difflib.get_close_matches(str(name).rsplit(".", 1)[-1], last_parts, n=1, cutoff=0.6)
    return last_parts[close[0]] if close else None
