"""Code that a stage executes: information about its result, not a part of its key.

The modules are those that the stage's module imports, directly or indirectly, and those of the classes that its spec
names: algorithm, engine, environment, reward, filter. Code of the user is part of the key already
(`components.specs.source`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from components.specs import Target
from components.specs.code import modules_of
from flows.stages.base import Stage, StageSpec


def stage_code(stage: Stage, spec: StageSpec) -> dict[str, str]:
    """Return the digests of the project's modules that a stage executes, by module."""
    roots = {inspect.getmodule(stage.function), *(inspect.getmodule(part) for part in _classes(spec))}
    return modules_of(module.__name__ for module in roots if module is not None)


def _classes(value: Any) -> Iterator[Any]:
    """Yield the classes of the specs within a value, and the classes and functions that its targets name."""
    if isinstance(value, BaseModel):
        yield from type(value).__mro__
        if isinstance(value, Target):
            yield value.factory()
            yield from _classes(value.arguments)
        yield from _classes({name: getattr(value, name) for name in type(value).model_fields})
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _classes(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _classes(part)
