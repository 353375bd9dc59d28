"""Declared specs: each is defined in the `spec.py` of a package below that of its family, and chosen in a configuration
by its `name`.

A field of the type `choice_of(...)` accepts every declared spec, and a subclass of the same base from a user's package
by `_target_`. So a new kind is added by its package alone: unions are derived from the modules of a package
(`discover`), and no list names them.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any, TypeVar, Union

from pydantic import Field, GetCoreSchemaHandler, SerializerFunctionWrapHandler, ValidationInfo, model_serializer
from pydantic_core import CoreSchema, core_schema

from components.specs.base import Spec
from components.specs.component_path import OWN_PACKAGE, allowed_component, is_below, target_error
from components.specs.source import source_digest

S = TypeVar("S", bound="DeclaredSpec")
AnySpec = TypeVar("AnySpec", bound=Spec)


class DeclaredSpec(Spec):
    """Base of the specs of a family, which a configuration chooses by name."""

    name: str
    """Name of the kind."""

    @classmethod
    def is_own(cls) -> bool:
        """Return True for a class of a user's package."""
        return not is_below(cls.__module__, OWN_PACKAGE)

    def key_part(self) -> dict[str, Any]:
        """Return plain data for a stage key. For a user's class it includes the digest of the module's source, so an
        edited class is not served from the cache."""
        source = {"source_sha256": source_digest(type(self).__module__)} if self.is_own() else {}
        return self.model_dump(mode="json") | source

    @model_serializer(mode="wrap")
    def _with_target(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        target = {"_target_": f"{type(self).__module__}.{type(self).__qualname__}"} if self.is_own() else {}
        return target | serialize(self)


def choice_of(base: type[S], kinds: Iterable[type[S]]) -> Any:
    """Return the type of a field that holds one of these kinds of `base`, or a subclass of it from a user's package."""
    return Annotated[Union[tuple(kinds)], _OwnOrDeclared(base)]  # noqa: UP007  the members are not known here


@dataclass(frozen=True)
class _OwnOrDeclared:
    """Annotation of a union of declared specs that also accepts a user's subclass of their base."""

    base: type[DeclaredSpec]

    def __get_pydantic_core_schema__(self, union: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_wrap_validator_function(
            self._validate,
            handler.generate_schema(Annotated[union, Field(discriminator="name")]),
            serialization=core_schema.wrap_serializer_function_ser_schema(
                lambda spec, serialize: serialize(spec), schema=core_schema.any_schema()
            ),
        )

    def _validate(self, data: Any, validate: core_schema.ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        if isinstance(data, self.base) and data.is_own():
            return data
        if not isinstance(data, Mapping) or "_target_" not in data:
            return validate(data)
        path, fields = data["_target_"], {name: value for name, value in data.items() if name != "_target_"}
        kind = allowed_component(path, (info.context or {}).get("allow", ()))
        base = f"{self.base.__module__}.{self.base.__name__}"
        if not inspect.isclass(kind) or not issubclass(kind, self.base):
            raise target_error(path, f"{path} is not a subclass of {base}")
        if missing := sorted(getattr(kind, "__abstractmethods__", ())):
            raise target_error(path, f"{path} does not define {' and '.join(missing)}, which {base} requires")
        return kind.model_validate(fields, context=info.context)


def discover(package: str, base: type[AnySpec], module: str | None = None) -> dict[str, type[AnySpec]]:
    """Return the concrete specs below `base` that have a name, by `name`, in alphabetical order.

    They are defined in the modules of the package or, with `module`, in the modules of that name of its packages."""
    path = importlib.import_module(package).__path__
    entries = [entry for entry in pkgutil.iter_modules(path, f"{package}.") if entry.ispkg or module is None]
    names = [entry.name if module is None else f"{entry.name}.{module}" for entry in entries]
    specs: dict[str, type[AnySpec]] = {}
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
