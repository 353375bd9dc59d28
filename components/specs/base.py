"""The base of all specs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, model_validator

from components.errors import Problem


def no_switch_for_a_number(cls: type[BaseModel], data: Any) -> Any:
    """A validator of a model: true and false are no numbers, though Python counts with them. They become words, which
    the fields then refuse."""
    if not isinstance(data, Mapping):
        return data
    keys = {field.alias or name: field.annotation for name, field in cls.model_fields.items()}
    wrong = {key for key, value in data.items() if isinstance(value, bool) and _is_number(keys.get(key))}
    return {key: str(value).lower() if key in wrong else value for key, value in data.items()} if wrong else data


def _is_number(annotation: Any) -> bool:
    kinds = set(_kinds(annotation))
    return bool(kinds & {int, float}) and not kinds & {bool, str, Any}


def _kinds(annotation: Any) -> Iterable[Any]:
    """The types of an annotation, those inside of lists and mappings left out."""
    if get_origin(annotation) is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif get_origin(annotation) is Literal:
        yield from map(type, get_args(annotation))
    elif get_origin(annotation) is None:
        yield annotation
    elif get_origin(annotation) not in (list, dict, tuple, set):
        for part in get_args(annotation):
            yield from _kinds(part)


class Spec(BaseModel):
    """Base of all specs: immutable, no unknown keys, no infinite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    _numbers = model_validator(mode="before")(classmethod(no_switch_for_a_number))  # type: ignore[arg-type]

    @classmethod
    def cross_problems(cls, parts: Mapping[str, Any]) -> Iterable[Problem]:
        """What is wrong between fields that are right on their own. `parts` holds the valid fields by name, so that
        these mistakes are reported together with those of single fields."""
        return ()


LONGEST_NAME = 100
"""Characters of a name for which a similar one is searched, which takes time in proportion to their square."""


def nearest(name: Any, valid: Iterable[Any]) -> str | None:
    """The valid name most like `name`, or None where none is like it."""
    names = [str(v) for v in valid]
    if len(str(name)) > LONGEST_NAME:
        return None
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    if close:
        return close[0]
    last = {n.rsplit(".", 1)[-1]: n for n in names}
    close = difflib.get_close_matches(str(name).rsplit(".", 1)[-1], last, n=1, cutoff=0.6)
    return last[close[0]] if close else None
