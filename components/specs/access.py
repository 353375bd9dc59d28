"""Access of configured values to the world outside of a run: programs, code, servers, files, variables.

Fields declare it (`components.specs.marks`). A component without a registered name is code of its own, whatever its
arguments are.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from components.redaction import reference
from components.specs.base import Spec
from components.specs.component_path import is_below
from components.specs.declared import DeclaredSpec
from components.specs.marks import CODE, ENV_VARIABLE, MODEL, Access, declared_access
from components.specs.parameters import settable
from components.specs.registered import registered_name
from components.specs.target import Target


@dataclass(frozen=True)
class Reach:
    """Configured value that reaches out of the run."""

    path: str
    """Key path."""
    access: Access
    value: Any

    def __str__(self) -> str:
        text = str(self.value)
        return f"{self.path} = {text if len(text) <= 200 else f'{text[:199]}…'} {self.access.text}"


def accesses(value: Any, path: str = "") -> Iterator[Reach]:
    """Yield the values below a spec or target that reach out of the run, with their key paths. None, empty values and
    defaults do not."""
    if isinstance(value, Target) and not _is_built_in(value):
        yield Reach(_below(path, "_target_"), CODE, value.target)
    if isinstance(value, DeclaredSpec) and value.is_own():
        yield Reach(_below(path, "_target_"), CODE, f"{type(value).__module__}.{type(value).__qualname__}")
    for name, (access, item, default) in _fields(value).items():
        place = _below(path, name)
        if access is MODEL and getattr(value, "source", "hub") != "hub":
            access = None  # a packaged, random or already trained model
        if access is not None and item and item != default:
            yield Reach(place, access, item)
        elif (variable := reference(item)) is not None:
            yield Reach(place, ENV_VARIABLE, variable)
        else:
            yield from accesses(item, place)


def access_at(spec: Any, key: str) -> Access | None:
    """Return the access of a key of a spec, which is also that of the keys below it; None if it has none."""
    value = spec
    for name in key.split("."):
        if name == "_target_":
            return CODE
        access, value, _ = _fields(value).get(name, (None, None, None))
        if access is not None:
            return access
    return None


def _is_built_in(target: Target) -> bool:
    """Return True for a component of the project that a configuration may name whoever wrote it."""
    packages = type(target).built_in
    return registered_name(target.factory()) is not None or any(is_below(target.target, name) for name in packages)


def _fields(value: Any) -> dict[str, tuple[Access | None, Any, Any]]:
    """Return the access, the value and the default of each field of a spec, argument of a target, or entry of plain
    data."""
    if isinstance(value, Target):
        parameters = settable(value.factory(), type(value).called_with)
        defaults = {name: None if p.default is inspect.Parameter.empty else p.default for name, p in parameters.items()}
        access = {name: declared_access(p.annotation) for name, p in parameters.items()}
        items = {**defaults, **value.arguments}.items()
        return {name: (access.get(name), item, defaults.get(name)) for name, item in items}
    if isinstance(value, Spec):
        fields = type(value).model_fields.items()
        return {field.alias or name: (_declared(field), getattr(value, name), field.default) for name, field in fields}
    if isinstance(value, Mapping):
        return {str(name): (None, item, None) for name, item in value.items()}
    return {str(n): (None, item, None) for n, item in enumerate(value)} if isinstance(value, list | tuple) else {}


def _declared(field: FieldInfo) -> Access | None:
    marks = [mark for mark in field.metadata if isinstance(mark, Access)]
    return marks[0] if marks else declared_access(field.annotation)


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
