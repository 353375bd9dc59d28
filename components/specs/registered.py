"""Registered names of built-in components.

A stage key hashes the registered name of a component (`environment.shop`) in place of its import path, so moving a
module changes no key. Code of users has no registered name: its path and the digest of its source are hashed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

Component = TypeVar("Component", bound=Callable[..., Any])

_NAME = re.compile(r"(environment|reward|filter)\.[a-z][a-z0-9_]*")
_ATTRIBUTE = "__registered_name__"


def registered(name: str) -> Callable[[Component], Component]:
    """Register a class or function under a name: `@registered("environment.shop")`.

    The name is part of stage keys and must never change. Raises ValueError for a name of another form.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"registered name {name!r}: expected environment.NAME, reward.NAME or filter.NAME")

    def register(component: Component) -> Component:
        setattr(component, _ATTRIBUTE, name)
        return component

    return register


def registered_name(component: Callable[..., Any]) -> str | None:
    """Return the registered name of a class or function; None without one. Subclasses do not inherit it."""
    name = vars(component).get(_ATTRIBUTE)
    return name if isinstance(name, str) else None
