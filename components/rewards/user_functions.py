"""User functions in a reward's configuration: a dotted path, alone or with arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator

from components.errors import Problem, SpecError
from components.specs import Target
from components.specs.marks import CODE


def _expand_short_form(value: Any) -> Any:
    return {"_target_": value} if isinstance(value, str) else value


Function = Annotated[Target, BeforeValidator(_expand_short_form), CODE]
"""Dotted path `package.module.name`, or `{_target_: package.module.name, argument: value}`. The function is called with
one positional argument."""


class ColumnsTarget(Target):
    """Function that is called with columns by name; the configuration may fill some of its parameters."""

    called_by_name = True


ColumnsFunction = Annotated[ColumnsTarget, BeforeValidator(_expand_short_form), CODE]


def build_function(function: Target | Callable[..., Any], place: str = "reward.function") -> Callable[..., Any]:
    """Return the function. Raises SpecError if the target is not callable."""
    built = function.build() if isinstance(function, Target) else function
    if not callable(built):
        raise SpecError([Problem(place, f"{type(built).__name__} cannot be called; expected a function")])
    return built


def is_async(function: Callable[..., Any]) -> bool:
    """Return True if the result of the function is awaitable."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
