"""Targets: a class or function by dotted path, with its arguments.

Only what an allowed package itself defines is taken: a name that a module merely imports (`os.system` by way of
somebody's `import os`) is refused. Arguments are checked by a pydantic model made from the signature, so annotations
such as `Annotated[float, Field(ge=0)]` and `Literal["a", "b"]` count.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    create_model,
    model_serializer,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError, core_schema, to_jsonable_python

from components.errors import SpecError
from components.redaction import dereference
from components.specs.base import Spec, nearest, no_switch_for_a_number
from components.specs.registered import registered_name
from components.specs.source import source_digest

_NUMBERS: dict[str, Any] = {
    "numbers": model_validator(mode="before")(classmethod(no_switch_for_a_number))  # type: ignore[arg-type]
}
OWN_PACKAGE = "components"
"""The package from which a `_target_` may always come."""


class Target(Spec):
    """A class or function by dotted path, with its arguments.

    Written flat: `{"_target_": "package.module.Name", "argument": value}`. A class must accept the arguments as
    keywords. A function is called later with one positional argument (a reward: the trajectory); the arguments here
    fill its other parameters. A nested `{"_target_": ...}` is built too, except where the parameter asks for a Target.
    """

    target: str = Field(alias="_target_")
    """Dotted path: module, then the name of a class or function defined in an allowed package."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Checked against the signature and converted to its types."""

    called_with: ClassVar[tuple[str, ...] | None] = None
    """Parameters that a function is given when it is called, and no config may fill; None: its first positional one."""

    called_by_name: ClassVar[bool] = False
    """Whether a function is given all its parameters by name when it is called, but for those that a config fills."""

    model_config = ConfigDict(validate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, Mapping) or "_target_" not in data:
            example = '{"_target_": "package.module.Name", ...}'
            raise PydanticCustomError(
                "target", "expected a class or function with its arguments, as {e}", {"e": example}
            )
        path, arguments = data["_target_"], {k: v for k, v in data.items() if k != "_target_"}
        allow = (info.context or {}).get("allow", ())
        problem, found = locate(path, allow)
        if problem is not None:
            raise _invalid([(("_target_",), path, problem)])
        assert found is not None
        if not _below(path, OWN_PACKAGE):
            try:
                source_digest(found.__module__)
            except SpecError as error:
                reason = PydanticCustomError("target", "{message}", {"message": str(error.problems[0])})
                raise _invalid([(("_target_",), path, reason)]) from error
        return {"target": path, "arguments": _check_arguments(path, found, arguments, info.context, cls)}

    def below(self, place: str = "") -> Iterator[tuple[str, Target]]:
        """The targets nested in the arguments, with their key paths, those furthest down first."""
        for path, target in _targets_in(self.arguments, place):
            yield from target.below(path)
            yield path, target

    def has(self, method: str) -> bool:
        """Whether its class, or that of a target nested in it, has a method."""
        return any(hasattr(one.factory(), method) for one in [self, *(target for _, target in self.below())])

    @model_serializer
    def _flat(self) -> dict[str, Any]:
        return {"_target_": self.target, **to_jsonable_python(self.arguments)}

    def factory(self) -> Callable[..., Any]:
        """The class or function itself."""
        return _import(self.target)

    def build(self, **runtime: Any) -> Any:
        """A class becomes an instance, a function a `functools.partial`; an argument `env:NAME` is the value of that
        environment variable, and its absence a ResourceError. `runtime` adds keyword arguments that are
        no configuration; it may not repeat one that is."""
        assert not runtime.keys() & self.arguments.keys(), f"{self.target}: {runtime.keys() & self.arguments.keys()}"
        thing = _import(self.target)
        parameters = _parameters(thing)
        arguments = {
            name: value if _takes_target(parameters, name) else _built(value, f"{self.target}.{name}")
            for name, value in copy.deepcopy(self.arguments).items()
        }
        if inspect.isclass(thing):
            return thing(**arguments, **runtime)
        return functools.partial(thing, **arguments, **runtime)

    def resolved(self) -> dict[str, Any]:
        """Plain data for a stage key: the registered name or the path, every argument with its default, and, for code
        that is not ours, the digest of the module's source, so that an edited environment is not taken from the cache.
        A class that reads files says with a static method `key_arguments` what stands for them in the key: their
        content, not their place."""
        thing = _import(self.target)
        parameters = _parameters(thing)
        defaults = {n: p.default for n, p in parameters.items() if p.default is not inspect.Parameter.empty}
        given = {**{name: value for name, value in defaults.items() if _is_data(value)}, **self.arguments}
        if hasattr(thing, "key_arguments"):
            given = thing.key_arguments(given)
        data: dict[str, Any] = {
            "_target_": registered_name(thing) or self.target,
            **{name: _resolved(value) for name, value in given.items()},
        }
        if not _below(self.target, OWN_PACKAGE):
            data["source_sha256"] = source_digest(_import(self.target).__module__)
        return data


def _below(path: str, package: str) -> bool:
    return path == package or path.startswith(package + ".")


def key_name(path: str) -> str:
    """Return what a stage key holds for a target's path: the registered name of a built-in component, else the path."""
    if not _below(path, OWN_PACKAGE):
        return path
    try:
        return registered_name(_import(path)) or path
    except (ImportError, AttributeError):  # a path of an earlier version
        return path


def _import(path: str) -> Callable[..., Any]:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def locate(path: Any, allow: Iterable[str]) -> tuple[PydanticCustomError | None, Callable[..., Any] | None]:
    """The class or function at `path`, or why there is none."""

    def problem(message: str, near: str | None = None) -> tuple[PydanticCustomError, None]:
        return PydanticCustomError("target", "{message}", {"message": message, "nearest": near}), None

    if not isinstance(path, str) or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", path):
        return problem(f"{path!r} is not a dotted path such as package.module.Name")
    packages = [OWN_PACKAGE, *(one for one in allow if one.partition(".")[0] not in sys.stdlib_module_names)]
    if path.partition(".")[0] in sys.stdlib_module_names:
        return problem(
            f"{path!r} is of Python's standard library, from which no target comes; wrap it in a function of your own"
        )
    if any(part.startswith("__") for part in path.split(".")):
        return problem(f"{path!r} holds a name of Python itself; expected a class or function of a module")
    if not any(_below(path, package) for package in packages):
        return problem(
            f"{path!r} is outside the packages from which classes may come ({', '.join(packages)}); "
            f"to trust another: allow=[{path.partition('.')[0]}]"
        )
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and _below(module_name, error.name):
            return problem(f"there is no module {error.name!r}", _nearest_module(error.name))
        return problem(f"cannot import {module_name!r}: {_reason(error)}")
    except (Exception, SystemExit) as error:  # noqa: BLE001  code of the user: whatever it raises is the answer
        return problem(f"cannot import {module_name!r}: {_reason(error)}")
    thing = getattr(module, name, None)
    if not (inspect.isclass(thing) or inspect.isfunction(thing)):
        ours = [n for n, v in vars(module).items() if getattr(v, "__module__", None) == module_name and callable(v)]
        what = "is neither a class nor a function" if thing is not None else "is not there"
        return problem(
            f"{name!r} {what} in {module_name}; it has {', '.join(sorted(ours)) or 'none'}", nearest(name, ours)
        )
    if not any(_below(thing.__module__, package) for package in packages):
        return problem(f"{path!r} is defined in {thing.__module__!r}, outside the allowed packages")
    return None, thing


def _reason(error: BaseException) -> str:
    where = ""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    if len(frames) > 1:
        where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"
    return f"{type(error).__name__}: {error}{where}"


def _nearest_module(name: str) -> str | None:
    parent, _, _ = name.rpartition(".")
    paths = getattr(sys.modules.get(parent), "__path__", None)
    if not paths:
        return None
    return nearest(name, [f"{parent}.{m.name}" for m in pkgutil.iter_modules(paths)])


def _parameters(thing: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Parameters by name, with annotations evaluated where that is possible (Any where it is not)."""
    function = inspect.unwrap(thing.__init__ if inspect.isclass(thing) else thing)
    names = getattr(function, "__globals__", {})
    parameters = {}
    for name, parameter in inspect.signature(thing).parameters.items():
        annotation = parameter.annotation
        if isinstance(annotation, str):
            one = SimpleNamespace(__annotations__={name: annotation})
            try:
                annotation = get_type_hints(one, globalns=names, include_extras=True)[name]
            except (NameError, AttributeError, TypeError, SyntaxError):  # imported for type checkers only, or no type
                annotation = Any
        annotation = Any if annotation is inspect.Parameter.empty else annotation
        parameters[name] = parameter.replace(annotation=annotation)
    return parameters


def settable(thing: Callable[..., Any], called_with: tuple[str, ...] | None = None) -> dict[str, inspect.Parameter]:
    """Parameters that a config may fill: all of a class, all of a function but those that it is called with (None: the
    first positional one)."""
    fixed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    parameters = _parameters(thing)
    if called_with is not None and not inspect.isclass(thing):
        parameters = {name: one for name, one in parameters.items() if name not in called_with}
    elif not inspect.isclass(thing):
        positional = [n for n, p in parameters.items() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        parameters.pop(positional[0], None) if positional else None
    return {name: p for name, p in parameters.items() if p.kind not in fixed}


def _takes_one(thing: Callable[..., Any]) -> bool:
    """Whether a function can be called with one thing, without its name."""
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    return any(p.kind not in by_name for p in inspect.signature(thing).parameters.values())


def _check_arguments(
    path: str,
    thing: Callable[..., Any],
    arguments: dict[str, Any],
    context: Any,
    kind: type[Target],
) -> dict[str, Any]:
    by_name = kind.called_by_name and not inspect.isclass(thing)
    called_with = () if by_name else kind.called_with
    parameters = settable(thing, called_with)
    if called_with is None and (columns := {"completions", "prompts"} & set(list(_parameters(thing))[:1])):
        name = columns.pop()
        message = (
            f"{path} is a function of columns, its first parameter being {name!r}, and is called with one thing here; "
            f"expected reward=columns reward.function={path}"
        )
        raise _invalid([(("_target_",), path, PydanticCustomError("target", "{message}", {"message": message}))])
    if called_with is None and not inspect.isclass(thing) and not _takes_one(thing):
        message = f"{path} takes nothing, and is called with one thing here; expected a parameter for it"
        raise _invalid([(("_target_",), path, PydanticCustomError("target", "{message}", {"message": message}))])
    lacking = [n for n, p in parameters.items() if p.default is inspect.Parameter.empty and n not in arguments]
    if called_with is not None and lacking and not by_name:
        known = f"expected some of {', '.join(called_with)}, and values for others in the configuration"
        message = f"{path} asks for {', '.join(lacking)}; {known}"
        raise PydanticCustomError("target", "{message}", {"message": message})
    free = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in _parameters(thing).values())
    fields: dict[str, Any] = {}
    for i, (name, parameter) in enumerate(parameters.items()):
        annotation = parameter.annotation
        if has_target(arguments.get(name)) and not _takes_target(parameters, name):
            kept = _mentions(annotation, Spec)  # what else it says about the nested targets is checked, too
            annotation = Annotated[annotation, BeforeValidator(_nested)] if kept else _NestedTargets
        needed = parameter.default is inspect.Parameter.empty and not by_name
        default = ... if needed else None if by_name else parameter.default
        fields[f"p{i}"] = (annotation, Field(default, alias=name))
    config = ConfigDict(extra="allow" if free else "forbid", arbitrary_types_allowed=True, allow_inf_nan=False)
    try:
        model = create_model("Arguments", __config__=config, __validators__=_NUMBERS, **fields)
    except PydanticUserError as error:
        reason = f"the annotations of {path} cannot be checked: {error.message}"
        raise PydanticCustomError("target", "{message}", {"message": reason}) from error
    checked = model.model_validate(arguments, context=context)
    names = {f"p{i}": name for i, name in enumerate(parameters)}
    return {names[f]: getattr(checked, f) for f in names if f in checked.model_fields_set} | (checked.model_extra or {})


def has_target(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "_target_" in value or any(map(has_target, value.values()))
    return isinstance(value, list) and any(map(has_target, value))


def _mentions(annotation: Any, what: type) -> bool:
    if inspect.isclass(annotation) and get_origin(annotation) is None:
        return issubclass(annotation, what)
    return any(_mentions(a, what) for a in get_args(annotation))


def _takes_target(parameters: Mapping[str, inspect.Parameter], name: str) -> bool:
    return name in parameters and _mentions(parameters[name].annotation, Target)


def _nested(value: Any, info: ValidationInfo) -> Any:
    """Nested targets become Target; the objects that they build are checked by whoever takes them."""
    if isinstance(value, Mapping) and "_target_" in value:
        return Target.model_validate(value, context=info.context)
    if isinstance(value, Mapping):
        return TypeAdapter(dict[str, _NestedTargets]).validate_python(value, context=info.context)
    if isinstance(value, list):
        return TypeAdapter(list[_NestedTargets]).validate_python(value, context=info.context)
    return value


def _built(value: Any, path: str, dereferences: bool = True) -> Any:
    """Return an argument with targets built and `env:NAME` replaced. A spec keeps its references: what it describes
    resolves them, and its own key and copies must not hold the value."""
    if isinstance(value, Target):
        return value.build()
    if isinstance(value, Spec):
        fields = {name: _built(getattr(value, name), path, False) for name in type(value).model_fields}
        return value.model_copy(update=fields)
    if isinstance(value, dict):
        return {k: _built(v, f"{path}.{k}", dereferences) for k, v in value.items()}
    if isinstance(value, list):
        return [_built(v, path, dereferences) for v in value]
    return dereference(value, path) if dereferences else value


def _resolved(value: Any) -> Any:
    if isinstance(value, Target):
        return value.resolved()
    if isinstance(value, Spec):
        return {name: _resolved(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, dict):
        return {k: _resolved(v) for k, v in value.items()}
    return [_resolved(v) for v in value] if isinstance(value, list | tuple) else to_jsonable_python(value)


def _targets_in(value: Any, place: str) -> Iterator[tuple[str, Target]]:
    if isinstance(value, Target):
        yield place, value
        return
    if isinstance(value, Spec):
        value = {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, one in items:
            yield from _targets_in(one, f"{place}.{name}" if place else str(name))


def _is_data(value: Any) -> bool:
    """Whether a value can stand in a key; a default such as a sentinel object cannot, and is left to the version of
    the code."""
    try:
        to_jsonable_python(value)
    except ValueError:
        return False
    return True


def _invalid(errors: list[tuple[tuple[str | int, ...], Any, PydanticCustomError]]) -> ValidationError:
    details = [InitErrorDetails(type=error, loc=loc, input=value) for loc, value, error in errors]
    return ValidationError.from_exception_data("Target", details)


class _NestedTargets:
    """Annotation for a parameter that is filled by nested targets."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return core_schema.with_info_plain_validator_function(_nested)
