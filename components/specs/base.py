"""Base class of all specs."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, model_validator

from components.errors import Problem


class NoNumber:
    """A boolean or a text in the place of a number. No numeric field accepts it; messages show its value."""

    def __init__(self, value: bool | str):
        self._shown = repr(value) if isinstance(value, str) else str(value).lower()

    def __repr__(self) -> str:
        return self._shown


def reject_texts_for_numbers(cls: type[BaseModel], data: Any) -> Any:
    """Replace booleans and texts in the place of numbers, also inside lists and mappings, so that the fields reject
    them. pydantic would convert `true` and `"1"` to 1. A model validator."""
    if not isinstance(data, Mapping):
        return data
    types = {field.alias or name: field.annotation for name, field in cls.model_fields.items()}
    return {key: _checked([types[key]], value) if key in types else value for key, value in data.items()}


def _checked(types: Iterable[Any], value: Any) -> Any:
    """Return a value of one of these types, with `NoNumber` in the places of numbers that are none."""
    members = [member for annotation in types for member in _members(annotation)]
    if isinstance(value, bool | str):
        kinds = {kind for member in members for kind in _kinds(member)}
        number = kinds & {int, float} and not kinds & {bool, str, Any}
        return NoNumber(value) if number and (isinstance(value, bool) or _converts(value)) else value
    if isinstance(value, list | tuple):
        entries = [part for member in members if _is(member, Iterable) for part in get_args(member) if part is not ...]
        return [_checked(entries, entry) for entry in value] if entries else value
    if isinstance(value, Mapping):
        entries = [get_args(member)[1] for member in members if _is(member, Mapping)]
        return {key: _checked(entries, entry) for key, entry in value.items()} if entries else value
    return value


def _is(annotation: Any, kind: type) -> bool:
    """Return True for a type with parameters of this kind, such as `list[int]`; a mapping is no Iterable here."""
    origin = get_origin(annotation)
    return inspect.isclass(origin) and issubclass(origin, kind) and (kind is Mapping or not issubclass(origin, Mapping))


def _members(annotation: Any) -> Iterable[Any]:
    """Yield the members of a union; the type itself if it is none."""
    if get_origin(annotation) is Annotated:
        yield from _members(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for part in get_args(annotation):
            yield from _members(part)
    else:
        yield annotation


def _kinds(annotation: Any) -> Iterable[Any]:
    """Yield the types of single values."""
    if get_origin(annotation) is Literal:
        yield from map(type, get_args(annotation))
    elif get_origin(annotation) is None:
        yield annotation


def _converts(text: str) -> bool:
    """Return True for a text that pydantic would convert to a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


class FieldError(ValueError):
    """Problem of one field that a validator of the whole spec detects.

    field: name of the field. message: its value, what was expected, and what to do."""

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = field


class Spec(BaseModel):
    """Base of all specs: immutable, no unknown keys, no infinite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    _numbers = model_validator(mode="before")(classmethod(reject_texts_for_numbers))  # type: ignore[arg-type]

    @classmethod
    def cross_problems(cls, parts: Mapping[str, Any]) -> Iterable[Problem]:
        """Yield the problems between fields that are valid on their own. `parts` holds the valid fields by name, so
        these problems are reported together with those of single fields."""
        return ()


LONGEST_NAME = 100
"""Characters of the longest name for which a similar one is searched; the search takes quadratic time."""


def nearest(name: Any, valid: Iterable[Any], *, cutoff: float = 0.6) -> str | None:
    """Return the valid name most similar to `name`; None if none is similar. cutoff: lowest similarity (see
    `difflib.get_close_matches`)."""
    names = [str(v) for v in valid]
    if len(str(name)) > LONGEST_NAME:
        return None
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=cutoff)
    if close:
        return close[0]
    last_parts = {n.rsplit(".", 1)[-1]: n for n in names}
    close = difflib.get_close_matches(str(name).rsplit(".", 1)[-1], last_parts, n=1, cutoff=cutoff)
    return last_parts[close[0]] if close else None
