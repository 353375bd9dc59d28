"""Unions of specs, derived from the modules of a package: a new member is a new module, and no list names it."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Annotated, Any, TypeVar, Union

from pydantic import Field

from components.specs.base import Spec

S = TypeVar("S", bound=Spec)


def discover(package: str, base: type[S], module: str | None = None) -> dict[str, type[S]]:
    """Return the concrete specs below `base` that have a name, by `name`, in alphabetical order.

    They are defined in the modules of the package or, with `module`, in the modules of that name of its packages."""
    path = importlib.import_module(package).__path__
    entries = [entry for entry in pkgutil.iter_modules(path, f"{package}.") if entry.ispkg or module is None]
    names = [entry.name if module is None else f"{entry.name}.{module}" for entry in entries]
    specs: dict[str, type[S]] = {}
    for module_name in names:
        if find_spec(module_name) is None:
            continue
        for member in vars(importlib.import_module(module_name)).values():
            if not (inspect.isclass(member) and issubclass(member, base)) or inspect.isabstract(member):
                continue
            if member.__module__ != module_name or member.model_fields["name"].is_required():
                continue
            name = member.model_fields["name"].default
            assert name not in specs, f"{module_name}: {name!r} is the name of {specs[name].__module__}"
            specs[name] = member
    return dict(sorted(specs.items()))


def union_of(members: Iterable[type[Spec]]) -> Any:
    """Return the annotation of a field that takes any of these specs, selected by `name`."""
    return Annotated[Union[tuple(members)], Field(discriminator="name")]  # noqa: UP007  not known before the run
