"""Dotted paths of classes and functions in a configuration.

Only a definition of an allowed package is accepted: a name that a module merely imports (`os.system` through an
`import os`) is rejected.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from components.errors import SpecError
from components.exceptions import described
from components.specs.base import nearest
from components.specs.registered import registered_name
from components.specs.source import source_file
from components.specs.wording import shortened

OWN_PACKAGE = "components"
"""Package from which a `_target_` is always accepted."""


def allowed_component(path: Any, allow: Iterable[str]) -> Callable[..., Any]:
    """Return the class or function at a valid path. Raises ValidationError for an invalid one, and for user code
    without a source file."""
    problem, component = locate(path, allow)
    if problem is not None:
        raise validation_error([(("_target_",), path, problem)])
    assert component is not None
    if not is_below(path, OWN_PACKAGE):
        try:
            source_file(component.__module__)
        except SpecError as error:
            raise target_error(path, str(error.problems[0])) from error
    return component


def target_error(path: str, message: str) -> ValidationError:
    """Return the error for a path that cannot be used."""
    return validation_error([(("_target_",), path, PydanticCustomError("target", "{message}", {"message": message}))])


def is_below(path: str, package: str) -> bool:
    """Return True if a dotted path is a package or below it."""
    return path == package or path.startswith(package + ".")


def key_name(path: str) -> str:
    """Return the name in stage keys of a target's path: the registered name of a built-in component, else the path."""
    if not is_below(path, OWN_PACKAGE):
        return path
    try:
        return registered_name(import_component(path)) or path
    except (ImportError, AttributeError):  # path of an earlier version
        return path


def import_component(path: str) -> Callable[..., Any]:
    """Return the class or function at a valid path."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def locate(path: Any, allow: Iterable[str]) -> tuple[PydanticCustomError | None, Callable[..., Any] | None]:
    """Return (None, class or function) for a valid path, else (problem, None)."""

    def problem(message: str, near: str | None = None) -> tuple[PydanticCustomError, None]:
        return PydanticCustomError("target", "{message}", {"message": message, "nearest": near}), None

    if not isinstance(path, str) or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", path):
        return problem(f"{shortened(path)} is not a dotted path such as package.module.Name")
    packages = [
        OWN_PACKAGE,
        *(p for p in allow if p.partition(".")[0] not in sys.stdlib_module_names),
    ]
    if path.partition(".")[0] in sys.stdlib_module_names:
        return problem(
            f"{path!r} belongs to Python's standard library; expected a class or function of your own that wraps it"
        )
    if any(part.startswith("__") for part in path.split(".")):
        return problem(f"{path!r} contains a double-underscore name; expected a public class or function of a module")
    if not any(is_below(path, package) for package in packages):
        return problem(
            f"{path!r} is outside the allowed packages ({', '.join(packages)}); "
            f"to trust it, set allow=[{path.partition('.')[0]}]"
        )
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and is_below(module_name, error.name):
            near = _nearest_module(error.name)
            near = None if near is None else f"{near}{path.removeprefix(error.name)}"
            return problem(f"no module named {error.name!r}", near if near and not locate(near, allow)[0] else None)
        return problem(f"cannot import {module_name!r}: {described(error)}")
    except (Exception, SystemExit) as error:  # noqa: BLE001  user code: any exception is reported as the problem
        return problem(f"cannot import {module_name!r}: {described(error)}")
    component = getattr(module, name, None)
    if not (inspect.isclass(component) or inspect.isfunction(component)):
        own = {n: v for n, v in vars(module).items() if getattr(v, "__module__", None) == module_name}
        names = [n for n, v in own.items() if callable(v) and not n.startswith("_")]
        near = nearest(name, names)
        reason = "is neither a class nor a function" if component is not None else "does not exist"
        return problem(
            f"{name!r} {reason} in {module_name}; expected one of {', '.join(sorted(names)) or 'none'}",
            near and f"{module_name}.{near}",
        )
    if not any(is_below(component.__module__, package) for package in packages):
        return problem(f"{path!r} is defined in {component.__module__!r}, outside the allowed packages")
    return None, component


def _nearest_module(name: str) -> str | None:
    parent, _, _ = name.rpartition(".")
    paths = getattr(sys.modules.get(parent), "__path__", None)
    if not paths:
        return None
    return nearest(name, [f"{parent}.{m.name}" for m in pkgutil.iter_modules(paths)])


def validation_error(errors: Sequence[tuple[tuple[str | int, ...], Any, PydanticCustomError]]) -> ValidationError:
    """Return the error with these problems: location, value, and error each."""
    details = [InitErrorDetails(type=error, loc=loc, input=value) for loc, value, error in errors]
    return ValidationError.from_exception_data("Target", details)
