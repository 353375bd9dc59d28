"""A user's function in a reward's configuration: its dotted path, or that with arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator

from components.errors import Problem, SpecError
from components.specs import Target


def _written_short(value: Any) -> Any:
    return {"_target_": value} if isinstance(value, str) else value


Function = Annotated[Target, BeforeValidator(_written_short)]
"""`package.module.name`, or `{_target_: package.module.name, argument: value}`. Called with one positional argument."""


class ColumnsTarget(Target):
    """A function that is called with columns by name; configuration may fill some of its parameters."""

    called_by_name = True


ColumnsFunction = Annotated[ColumnsTarget, BeforeValidator(_written_short)]


def build_function(function: Target | Callable[..., Any], place: str = "reward.function") -> Callable[..., Any]:
    """The function itself. Raises SpecError where it cannot be called."""
    found = function.build() if isinstance(function, Target) else function
    if not callable(found):
        raise SpecError([Problem(place, f"{type(found).__name__} cannot be called; expected a function")])
    return found


def is_async(function: Callable[..., Any]) -> bool:
    """Whether what it returns is to be awaited."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
