"""Content of a rollout for stage keys: the source of its function, and the data that it is called with.

A function of an importable module counts by that module and what it imports from the same package, as `agent.function`
does (`components.specs.source`). A function of a script or a notebook counts by its own source, and by the functions,
classes, modules and constants that it names: the rest of the program, such as the number of steps of the loop, may
change without another key. Other objects that it names, such as a client, and installed packages are not part of the
content.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import dis
import hashlib
import inspect
import math
import sys
import sysconfig
import textwrap
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from pydantic import BaseModel

from components.artifacts.keys import json_digest
from components.errors import SpecError
from components.specs.source import source_digest

_INSTALLED = tuple(str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib", "platlib"))
"""Folders of Python and of installed packages."""


class NoContent(TypeError):
    """An object whose content cannot be a part of a key."""


def content(value: Any) -> Any:
    """Return the content of a value as JSON data. Raises NoContent."""
    if value is None or isinstance(value, bool | int | str):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {name: content(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [content(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((content(item) for item in value), key=json_digest)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Enum):
        return content(value.value)
    if isinstance(value, BaseModel):
        return content(value.model_dump(mode="json"))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: content(getattr(value, field.name)) for field in dataclasses.fields(value)}
    raise NoContent(type(value).__name__)


def argument(function: str, name: str, value: Any) -> Any:
    """Return the content of an argument of a rollout. Raises SpecError."""
    try:
        return content(value)
    except NoContent as error:
        kind = type(value).__name__
        within = "" if str(error) == kind else f" with a {error} in it"
        raise SpecError.at(
            f"{function}({name})",
            f"{kind}{within}: its content cannot be part of the key by which the episodes are cached; expected text, "
            "numbers, lists, dictionaries, dataclasses or pydantic models. Make other objects within the rollout, or "
            "keep them in a global variable",
        ) from None


def source_of(code: CodeType, names: Mapping[str, Any], free: Mapping[str, Any]) -> str:
    """Return the digest (hex) of the source of a function. names: global variables of its module. free: values of its
    free variables."""
    reader = _Reader()
    reader.add_function(code, names, free)
    return json_digest(reader.parts)


def function_source(function: Any) -> str:
    """Return the digest (hex) of the source of a function with its free variables."""
    return source_of(function.__code__, function.__globals__, _free(function))


class _Reader:
    """Reader of the source of a function and of what it names."""

    def __init__(self) -> None:
        self.parts: dict[str, str] = {}
        """Digests of sources and of constants by name."""

    def add_function(self, code: CodeType, names: Mapping[str, Any], free: Mapping[str, Any]) -> None:
        module = str(names.get("__name__"))
        if _is_own_module(module):
            self._add_module(module)
            return
        name = f"{module}.{code.co_qualname}"
        if name in self.parts:
            return
        self.parts[name] = _digest(_text(code))
        for other in sorted(set(global_names(code)) & set(names)):
            self._add(f"{module}.{other}", names[other])
        for other, value in sorted(free.items()):
            self._add(f"{name}.{other}", value)

    def _add(self, name: str, value: Any) -> None:
        value = inspect.unwrap(value) if callable(value) and not inspect.isclass(value) else value
        if isinstance(value, ModuleType):
            self._add_module(value.__name__)
        elif inspect.isfunction(value):
            self.add_function(value.__code__, value.__globals__, _free(value))
        elif inspect.isclass(value):
            self._add_class(value)
        else:
            with contextlib.suppress(NoContent):
                self.parts[name] = json_digest(content(value))

    def _add_class(self, cls: type) -> None:
        if _is_own_module(cls.__module__) or cls.__module__ != "__main__":
            self._add_module(cls.__module__)
            return
        name = f"{cls.__module__}.{cls.__qualname__}"
        if name in self.parts:
            return
        self.parts[name] = _digest(_text(cls))
        for base in cls.__bases__:
            self._add_class(base)
        for value in vars(cls).values():
            function = getattr(value, "__func__", getattr(value, "fget", value))
            if inspect.isfunction(function):
                self.add_function(function.__code__, function.__globals__, _free(function))

    def _add_module(self, module: str) -> None:
        if _is_own_module(module):
            self.parts.setdefault(module, source_digest(module))


def _is_own_module(module: str) -> bool:
    """Return True for an importable module that is neither installed nor a part of this project's library."""
    if module == "__main__" or module.partition(".")[0] in ("components", "flows"):
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and file.endswith(".py") and not str(Path(file).resolve()).startswith(_INSTALLED)


def _free(function: Any) -> dict[str, Any]:
    """Return the values of the free variables of a function that have one."""
    values = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            values[name] = cell.cell_contents
    return values


def global_names(code: CodeType) -> Iterator[str]:
    """Yield the global names that a function reads, those of functions within it included."""
    yield from (step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from global_names(constant)


def _text(part: CodeType | type) -> str:
    """Return the source of a function or a class without comments and layout; without a source file its code."""
    try:
        text = textwrap.dedent(inspect.getsource(part))
    except (OSError, TypeError):
        return _instructions(part) if isinstance(part, CodeType) else repr(part)
    try:
        return ast.unparse(ast.parse(text))
    except SyntaxError:  # a lambda within a larger expression
        return text


def _instructions(code: CodeType) -> str:
    """Return the instructions of a function without a source file, those of functions within it included."""
    steps: list[Any] = []
    for step in dis.get_instructions(code):
        if isinstance(step.argval, CodeType):  # its repr has an address
            steps.append(_instructions(step.argval))
        elif isinstance(step.argval, frozenset):  # its order differs from process to process
            steps.append([step.opname, sorted(map(repr, step.argval))])
        else:
            steps.append([step.opname, step.argrepr])
    return repr(steps)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
