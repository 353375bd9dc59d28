"""Specs: plain, typed, immutable descriptions of what to build.

Two kinds. A `Spec` is a pydantic model that lives beside the component it configures; every field has a docstring.
A `Target` names a class or function by dotted path, `{"_target_": "components.environments.shop.Shop", ...}`, with
its arguments; this is how environments, rewards and filters, ours or a user's own, are chosen. Its arguments are
checked against the signature. Only names below the allowed packages are imported.

Specs are light: nothing here, and nothing that only defines a spec, imports torch, prefect, mlflow or hydra.
`validate` turns every mistake into one `SpecError`, each with its key path and the nearest valid name.
"""

from __future__ import annotations

import copy
import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PydanticUserError,
    ValidationError,
    ValidationInfo,
    create_model,
    model_serializer,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError, to_jsonable_python

from components.errors import Problem, SpecError

OWN_PACKAGE = "components"
"""The package from which a `_target_` may always come."""

MISSING = "???"
"""How a config file marks a value that the user must give."""

S = TypeVar("S", bound="Spec")


class Spec(BaseModel):
    """Base of all specs: immutable, no unknown keys, no infinite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @classmethod
    def cross_problems(cls, parts: Mapping[str, Any]) -> Iterable[Problem]:
        """What is wrong between fields that are right on their own. `parts` holds the valid fields by name, so that
        these mistakes are reported together with those of single fields."""
        return ()


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

    model_config = ConfigDict(validate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, Mapping) or "_target_" not in data:
            example = '{"_target_": "package.module.Name", ...}'
            raise PydanticCustomError("target", "expected a class or function with its arguments, as {e}", {"e": example})
        path, arguments = data["_target_"], {k: v for k, v in data.items() if k != "_target_"}
        allow = (info.context or {}).get("allow", ())
        problem, found = _locate(path, allow)
        if problem is not None:
            raise _invalid([(("_target_",), path, problem)])
        assert found is not None
        return {"target": path, "arguments": _check_arguments(path, found, arguments, info.context)}

    @model_serializer
    def _flat(self) -> dict[str, Any]:
        return {"_target_": self.target, **to_jsonable_python(self.arguments)}

    def factory(self) -> Callable[..., Any]:
        """The class or function itself."""
        return _import(self.target)

    def build(self, **runtime: Any) -> Any:
        """A class becomes an instance, a function a `functools.partial`. `runtime` adds keyword arguments that are
        no configuration; it may not repeat one that is."""
        assert not runtime.keys() & self.arguments.keys(), f"{self.target}: {runtime.keys() & self.arguments.keys()}"
        thing = _import(self.target)
        parameters = _parameters(thing)
        arguments = {
            name: value if _takes_target(parameters, name) else _built(value)
            for name, value in copy.deepcopy(self.arguments).items()
        }
        if inspect.isclass(thing):
            return thing(**arguments, **runtime)
        return functools.partial(thing, **arguments, **runtime)

    def resolved(self) -> dict[str, Any]:
        """Plain data for a stage key: the path, every argument with its default, and, for code that is not ours, the
        digest of the module's source, so that an edited environment is not taken from the cache."""
        parameters = _parameters(_import(self.target))
        defaults = {n: p.default for n, p in parameters.items() if p.default is not inspect.Parameter.empty}
        data: dict[str, Any] = {
            name: _resolved(value) for name, value in {**defaults, **self.arguments}.items() if _is_data(value)
        }
        data["_target_"] = self.target
        if not _below(self.target, OWN_PACKAGE):
            data["source_sha256"] = source_digest(_import(self.target).__module__)
        return data


def validate(cls: type[S], data: Mapping[str, Any], *, path: str = "", allow: Iterable[str] | None = None) -> S:
    """Turns plain data into a spec.

    `path` is put before every key path in messages. `allow` lists the packages from which a `_target_` may come
    besides our own; None reads the key `allow` of the data. Raises SpecError with every problem that was found.
    """
    if not isinstance(data, Mapping):
        raise SpecError([Problem(path or cls.__name__, f"{data!r} is not a mapping of keys to values")])
    given = data.get("allow") if allow is None else allow
    packages = [p for p in given if isinstance(p, str)] if isinstance(given, Iterable) else []
    context = {"allow": packages}
    unset = list(_unset(data))
    problems = [Problem(_key(p), f"needs a value: {_key(p)}=VALUE") for p in unset]
    spec = None
    try:
        spec = cls.model_validate(data, context=context)
        parts = {name: getattr(spec, name) for name in cls.model_fields}
    except ValidationError as error:
        problems += [p for p in _problems(cls, data, error, context) if p.path not in {_key(u) for u in unset}]
        parts = dict(_valid_parts(cls, data, context, {u[0] for u in unset}))
    problems += cls.cross_problems(parts)
    if problems:
        raise SpecError([Problem(f"{path}.{p.path}" if path else p.path, p.message, p.nearest) for p in problems])
    assert spec is not None
    return spec


def nearest(name: Any, valid: Iterable[Any]) -> str | None:
    """The valid name most like `name`, or None where none is like it."""
    names = [str(v) for v in valid]
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    if close:
        return close[0]
    last = {n.rsplit(".", 1)[-1]: n for n in names}
    close = difflib.get_close_matches(str(name).rsplit(".", 1)[-1], last, n=1, cutoff=0.6)
    return last[close[0]] if close else None


def source_digest(module: str) -> str:
    """sha256 of a module's source file."""
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None or not Path(found.origin).is_file():
        raise SpecError([Problem(module, "has no source file, so its results could not be cached safely")])
    return hashlib.sha256(Path(found.origin).read_bytes()).hexdigest()


def names_below(cls: type[Spec], data: Any, path: Iterable[str | int], allow: Iterable[str] = ()) -> list[str]:
    """Valid keys of the mapping that lies at `path` in `data`; empty where it is free or not a mapping."""
    annotation: Any = cls
    for part in path:
        annotation = _annotation(annotation, data, part, allow)
        data = data[part] if isinstance(data, Mapping | list) and _holds(data, part) else None
    model = _model(annotation, data)
    if model is None:
        return []
    if issubclass(model, Target):
        found = _locate(data["_target_"], allow)[1] if isinstance(data, Mapping) and "_target_" in data else None
        return ["_target_", *(_settable(found) if found else ())]
    return list(model.model_fields)


# --- targets --------------------------------------------------------------------------------------------------------


def _below(path: str, package: str) -> bool:
    return path == package or path.startswith(package + ".")


def _import(path: str) -> Callable[..., Any]:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _locate(path: Any, allow: Iterable[str]) -> tuple[PydanticCustomError | None, Callable[..., Any] | None]:
    """The class or function at `path`, or why there is none."""

    def problem(message: str, near: str | None = None) -> tuple[PydanticCustomError, None]:
        return PydanticCustomError("target", "{message}", {"message": message, "nearest": near}), None

    if not isinstance(path, str) or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", path):
        return problem(f"{path!r} is not a dotted path such as package.module.Name")
    packages = [OWN_PACKAGE, *allow]
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
        return problem(f"{name!r} {what} in {module_name}; it has {', '.join(sorted(ours)) or 'none'}", nearest(name, ours))
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
    function = thing.__init__ if inspect.isclass(thing) and "__init__" in vars(thing) else thing
    names = {**vars(sys.modules[thing.__module__])}
    parameters = {}
    for name, parameter in inspect.signature(thing).parameters.items():
        annotation = parameter.annotation
        if isinstance(annotation, str):
            try:
                annotation = eval(annotation, getattr(function, "__globals__", names))  # text from imported code
            except (NameError, AttributeError):  # imported for type checkers only
                annotation = Any
        parameters[name] = parameter.replace(
            annotation=Any if annotation is inspect.Parameter.empty else annotation,
        )
    return parameters


def _settable(thing: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Parameters that a config may fill: all of a class, all but the first positional one of a function."""
    fixed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    parameters = _parameters(thing)
    if not inspect.isclass(thing):
        positional = [n for n, p in parameters.items() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        parameters.pop(positional[0], None) if positional else None
    return {name: p for name, p in parameters.items() if p.kind not in fixed}


def _check_arguments(path: str, thing: Callable[..., Any], arguments: dict[str, Any], context: Any) -> dict[str, Any]:
    parameters = _settable(thing)
    free = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in _parameters(thing).values())
    fields: dict[str, Any] = {}
    for i, (name, parameter) in enumerate(parameters.items()):
        annotation = parameter.annotation
        if _has_target(arguments.get(name)) and not _takes_target(parameters, name):
            annotation = _Built
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        fields[f"p{i}"] = (annotation, Field(default, alias=name))
    config = ConfigDict(extra="allow" if free else "forbid", arbitrary_types_allowed=True, allow_inf_nan=False)
    try:
        model = create_model("Arguments", __config__=config, **fields)
    except PydanticUserError as error:
        reason = f"the annotations of {path} cannot be checked: {error.message}"
        raise PydanticCustomError("target", "{message}", {"message": reason}) from error
    checked = model.model_validate(arguments, context=context)
    names = {f"p{i}": name for i, name in enumerate(parameters)}
    return {names[f]: getattr(checked, f) for f in names if f in checked.model_fields_set} | (checked.model_extra or {})


def _has_target(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "_target_" in value or any(map(_has_target, value.values()))
    return isinstance(value, list) and any(map(_has_target, value))


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
        return {k: _nested(v, info) for k, v in value.items()}
    return [_nested(v, info) for v in value] if isinstance(value, list) else value


def _built(value: Any) -> Any:
    if isinstance(value, Target):
        return value.build()
    if isinstance(value, dict):
        return {k: _built(v) for k, v in value.items()}
    return [_built(v) for v in value] if isinstance(value, list) else value


def _resolved(value: Any) -> Any:
    if isinstance(value, Target):
        return value.resolved()
    if isinstance(value, dict):
        return {k: _resolved(v) for k, v in value.items()}
    return [_resolved(v) for v in value] if isinstance(value, list | tuple) else to_jsonable_python(value)


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


# --- messages -------------------------------------------------------------------------------------------------------

_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "dict": "a mapping of keys to values",
    "model": "a mapping of keys to values",
    "none": "null",
}
_BOUNDS = {"greater_than": ("more than", "gt"), "greater_than_equal": ("at least", "ge"),
           "less_than": ("less than", "lt"), "less_than_equal": ("at most", "le")}  # fmt: skip


def _problems(cls: type[Spec], data: Any, error: ValidationError, context: dict[str, Any]) -> list[Problem]:
    found: dict[str, Problem] = {}
    for detail in error.errors(include_url=False):
        path = _path(data, detail["loc"], detail["type"] == "missing")
        problem = _problem(cls, data, path, detail, context["allow"])
        earlier = found.get(problem.path)
        if earlier is not None:  # the members of a union, each with its complaint
            _, _, more = problem.message.rpartition("expected ")
            problem = Problem(problem.path, f"{earlier.message} or {more}", earlier.nearest)
        found[problem.path] = problem
    return list(found.values())


def _problem(cls: type[Spec], data: Any, path: list[str | int], detail: Any, allow: list[str]) -> Problem:
    kind, context, value = detail["type"], detail.get("ctx", {}), detail["input"]
    key = _key(path)
    if kind == "extra_forbidden":
        names = names_below(cls, data, path[:-1], allow)
        where = _key(path[:-1])
        message = f"no such key{f' in {where}' if where else ''}; there are {', '.join(names)}"
        near = nearest(path[-1], names)
        return Problem(key, message, _key([*path[:-1], near]) if near else None)
    if kind == "missing":
        return Problem(key, f"needs a value: {key}=VALUE")
    if kind == "union_tag_invalid":
        names = re.findall(r"'([^']*)'", context["expected_tags"])
        return Problem(f"{key}.name", f"{context['tag']!r}: expected one of {', '.join(names)}", nearest(context["tag"], names))
    if kind == "union_tag_not_found":
        return Problem(f"{key}.name", f"needs a value: {key}.name=VALUE")
    if kind == "target":
        return Problem(key, detail["msg"], context.get("nearest"))
    shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."
    if kind == "literal_error":
        names = re.findall(r"'([^']*)'", context["expected"])
        return Problem(key, f"{shown}: expected one of {', '.join(names)}", nearest(value, names))
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        return Problem(key, f"{shown}: expected {words} {context[name]:g}")
    expected = _EXPECTED.get(kind.split("_")[0], "")
    if not expected:
        expected = detail["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return Problem(key, f"{shown}: expected {expected}")


def _path(data: Any, loc: tuple[str | int, ...], missing: bool) -> list[str | int]:
    """The key path of an error. pydantic's location also names members of unions; these are no keys."""
    path: list[str | int] = []
    for i, part in enumerate(loc):
        absent = missing and i == len(loc) - 1
        if isinstance(data, Mapping) and (part in data or absent):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int):
            data = data[part]
        else:
            continue
        path.append(part)
    return path


def _key(path: Iterable[str | int]) -> str:
    return ".".join(map(str, path))


def _unset(data: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if data == MISSING and isinstance(data, str):
        yield path
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from _unset(value, (*path, key))
    elif isinstance(data, list):
        for i, value in enumerate(data):
            yield from _unset(value, (*path, i))


def _valid_parts(cls: type[Spec], data: Mapping[str, Any], context: Any, skip: set[Any]) -> Iterator[tuple[str, Any]]:
    for name, field in cls.model_fields.items():
        if name in skip:
            continue
        if name not in data:
            if not field.is_required():
                yield name, field.get_default(call_default_factory=True, validated_data={})
            continue
        part = create_model(cls.__name__, __config__=cls.model_config, **{name: (field.annotation, field)})
        try:
            yield name, getattr(part.model_validate({name: data[name]}, context=context), name)
        except ValidationError:
            continue


def _holds(data: Any, part: str | int) -> bool:
    return part in data if isinstance(data, Mapping) else isinstance(part, int) and part < len(data)


def _model(annotation: Any, value: Any) -> type[Spec] | None:
    """The spec class that an annotation means for this value; a union of specs is told apart by `name`."""
    models = [a for a in _flat_types(annotation) if inspect.isclass(a) and issubclass(a, Spec)]
    if len(models) > 1 and isinstance(value, Mapping):
        tag = value.get("name")
        models = [m for m in models if "name" in m.model_fields and m.model_fields["name"].default == tag]
    return models[0] if len(models) == 1 else None


def _flat_types(annotation: Any) -> Iterator[Any]:
    if inspect.isclass(annotation) and get_origin(annotation) is None:
        yield annotation
    elif get_origin(annotation) not in (list, dict, tuple, Literal):
        for a in get_args(annotation):
            yield from _flat_types(a)


def _annotation(annotation: Any, value: Any, part: str | int, allow: Iterable[str]) -> Any:
    """The type expected at `part` of a value of type `annotation`."""
    model = _model(annotation, value)
    if model is not None and issubclass(model, Target):
        found = _locate(value["_target_"], allow)[1] if isinstance(value, Mapping) and "_target_" in value else None
        parameters = _settable(found) if found else {}
        inner = parameters[str(part)].annotation if part in parameters else None
        nested = value.get(part) if isinstance(value, Mapping) else None
        return Target if _has_target(nested) and not isinstance(nested, list) else inner
    if model is not None:
        return model.model_fields[str(part)].annotation if part in model.model_fields else None
    arguments = [a for a in get_args(annotation) if a is not type(None)]
    return arguments[-1] if arguments else annotation if inspect.isclass(annotation) else None


class _NestedTargets:
    """Annotation for a parameter that is filled by nested targets."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.with_info_plain_validator_function(_nested)


_Built = _NestedTargets
