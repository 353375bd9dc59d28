"""Parameters of the components that a target names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, get_type_hints


def parameters_of(component: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters by name, with evaluated annotations (Any where evaluation fails)."""
    function = inspect.unwrap(component.__init__ if inspect.isclass(component) else component)
    names = getattr(function, "__globals__", {})
    parameters = {}
    for name, parameter in inspect.signature(component).parameters.items():
        annotation = parameter.annotation
        if isinstance(annotation, str):
            holder = SimpleNamespace(__annotations__={name: annotation})
            try:
                annotation = get_type_hints(holder, globalns=names, include_extras=True)[name]
            except (NameError, AttributeError, TypeError, SyntaxError):  # a TYPE_CHECKING import, or not a type
                annotation = Any
        annotation = Any if annotation is inspect.Parameter.empty else annotation
        parameters[name] = parameter.replace(annotation=annotation)
    return parameters


def settable(component: Callable[..., Any], called_with: tuple[str, ...] | None = None) -> dict[str, inspect.Parameter]:
    """Return the parameters that a config may bind: all of a class; of a function all except `called_with` (None: the
    first positional one)."""
    fixed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    parameters = parameters_of(component)
    if called_with is not None and not inspect.isclass(component):
        parameters = {name: parameter for name, parameter in parameters.items() if name not in called_with}
    elif not inspect.isclass(component):
        positional = [n for n, p in parameters.items() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        parameters.pop(positional[0], None) if positional else None
    return {name: p for name, p in parameters.items() if p.kind not in fixed}


def takes_positional(component: Callable[..., Any]) -> bool:
    """Return True if a function accepts one positional argument."""
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    return any(p.kind not in by_name for p in inspect.signature(component).parameters.values())
