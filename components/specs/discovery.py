"""Unions of specs, derived from the modules of a package: a new member is a new module, and no list names it."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterable
from typing import Annotated, Any, TypeVar, Union

from pydantic import Field

from components.specs.base import Spec

S = TypeVar("S", bound=Spec)


def discover(package: str, base: type[S]) -> dict[str, type[S]]:
    """Return the concrete specs below `base` in the modules of a package, by `name`, in alphabetical order."""
    specs: dict[str, type[S]] = {}
    for entry in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        for member in vars(importlib.import_module(entry.name)).values():
            if not (inspect.isclass(member) and issubclass(member, base)) or inspect.isabstract(member):
                continue
            if member.__module__ == entry.name:
                name = member.model_fields["name"].default
                assert name not in specs, f"{entry.name}: {name!r} is the name of {specs[name].__module__}"
                specs[name] = member
    return dict(sorted(specs.items()))


def union_of(members: Iterable[type[Spec]]) -> Any:
    """Return the annotation of a field that takes any of these specs, selected by `name`."""
    return Annotated[Union[tuple(members)], Field(discriminator="name")]  # noqa: UP007  not known before the run
