"""Validation of plain data into a spec, reporting every problem at once.

pydantic detects the problems; this module adds the key path as typed on the command line and the nearest valid name,
`components.specs.wording` plain wording.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError, create_model

from components.errors import Problem, SpecError
from components.redaction import mask_text, refuse_secrets
from components.specs.base import FieldError, Spec, nearest
from components.specs.component_path import locate
from components.specs.parameters import settable
from components.specs.target import Target
from components.specs.wording import EXPECTED, choices, expected, quoted, shortened

MISSING = "???"
"""Marker in a config file for a value that the user must set."""

LARGEST = 2**63 - 1
"""Largest integer that numpy, torch and SQLite can store."""

MAX_PROBLEMS, MAX_PROBLEMS_OF_REQUEST = 100, 10
"""Limit on reported problems of single fields. A request may be wrong everywhere, on purpose."""

S = TypeVar("S", bound=Spec)


def validate(
    cls: type[S],
    data: Any,
    *,
    path: str = "",
    allow: Iterable[str] | None = None,
    configuration: bool = True,
) -> S:
    """Return plain data as a spec.

    Args:
        path: Prefix of every key path in messages.
        allow: Packages besides our own from which a `_target_` may come; None reads the key `allow` of the data.
        configuration: True if `???` marks a missing value, secrets are rejected, and messages suggest overrides of the
            command line. False for a request, whose values are arbitrary user input.

    Raises SpecError with every problem; of problems of single fields at most MAX_PROBLEMS, or MAX_PROBLEMS_OF_REQUEST.
    If a configuration contains secrets, only these are reported, so that no other message repeats one. Takes time
    linear in the size of the data.
    """
    if configuration:
        refuse_secrets(data, path)
    if not isinstance(data, Mapping):
        shown = mask_text(shortened(data))
        raise SpecError([Problem(path or cls.__name__, f"{shown}: expected a mapping of keys to values")])
    allowed = data.get("allow") if allow is None else allow
    listed = isinstance(allowed, Iterable) and not isinstance(allowed, str | Mapping)
    packages = [p for p in allowed or () if isinstance(p, str)] if listed else []
    context = {"allow": packages, "overrides": configuration}
    unset = list(_unset(data)) if configuration else []
    problems = [Problem(_key(p), f"needs a value: {_key(p)}=VALUE") for p in unset]
    large = list(_too_large(data)) if configuration else []
    spec = None
    try:
        spec = cls.model_validate(data, context=context)
        parts = {name: getattr(spec, name) for name in cls.model_fields if name not in {u[0] for u in unset}}
    except ValidationError as error:
        most = MAX_PROBLEMS if configuration else MAX_PROBLEMS_OF_REQUEST
        problems += [p for p in _problems(cls, data, error, context, most) if p.path not in {_key(u) for u in unset}]
        parts = dict(_valid_parts(cls, data, context, {u[0] for u in unset}))
    reported = {problem.path for problem in problems}
    problems += [problem for problem in large if problem.path not in reported]
    roots = {problem.path.partition(".")[0] for problem in large}
    problems += cls.cross_problems({name: part for name, part in parts.items() if name not in roots})
    if problems:
        raise SpecError([Problem(f"{path}.{p.path}" if path else p.path, p.message, p.nearest) for p in problems])
    assert spec is not None
    return spec


def names_below(cls: type[Spec], data: Any, path: Iterable[str | int], allow: Iterable[str] = ()) -> list[str]:
    """Return the valid keys of the mapping at `path` in `data`; empty if any key is valid or it is not a mapping."""
    annotation: Any = cls
    for part in path:
        annotation = _annotation(annotation, data, part, allow)
        data = _child(data, part)
        if isinstance(data, Mapping) and "_target_" in data and not _is_target(annotation):
            annotation = Target
    model = _model(annotation, data)
    if model is None:
        return []
    if issubclass(model, Target):
        named = isinstance(data, Mapping) and "_target_" in data
        component = locate(data["_target_"], (*allow, *model.built_in))[1] if named else None
        return ["_target_", *(settable(component, model.called_with) if component else ())]
    return list(model.model_fields)


def _is_target(annotation: Any) -> bool:
    return inspect.isclass(annotation) and issubclass(annotation, Target)


def _problems(cls: type[Spec], data: Any, error: ValidationError, context: dict[str, Any], most: int) -> list[Problem]:
    problems: dict[str, Problem] = {}
    details = [(_path(data, d["loc"], d["type"] == "missing"), d) for d in error.errors(include_url=False)]
    inner = {tuple(path[:length]) for path, _ in details for length in range(len(path))}
    for path, detail in details:
        if len(problems) == most:
            break
        if detail["type"] in EXPECTED and tuple(path) in inner:
            continue  # another member of the union matched the type and reports the inner problem
        problem = _problem(cls, data, path, detail, context)
        earlier = problems.get(problem.path)
        if earlier is not None:  # the members of a union report one problem each
            _, _, more = problem.message.rpartition("expected ")
            repeated = earlier.message.endswith((f"expected {more}", f" or {more}"))
            message = earlier.message if repeated else f"{earlier.message} or {more}"
            problem = Problem(problem.path, message, earlier.nearest)
        problems[problem.path] = problem
    return list(problems.values())


def _problem(cls: type[Spec], data: Any, path: list[str | int], detail: Any, settings: dict[str, Any]) -> Problem:
    """Return one problem. settings: context of the validation."""
    kind, context, value = detail["type"], detail.get("ctx", {}), detail["input"]
    key, overrides = _key(path), settings["overrides"]
    if kind == "extra_forbidden":
        names = names_below(cls, data, path[:-1], settings["allow"])
        where = _key(path[:-1])
        message = f"no such key{f' in {where}' if where else ''}; expected one of {', '.join(names)}"
        near = nearest(path[-1], names)
        return Problem(key, message, _key([*path[:-1], near]) if near else None)
    if kind == "missing":
        return Problem(key, f"needs a value: {key}=VALUE" if overrides else "is missing")
    if kind == "union_tag_invalid":
        names = re.findall(r"'([^']*)'", context["expected_tags"])
        tag = value["name"]
        return Problem(f"{key}.name", f"{shortened(tag)}: expected one of {', '.join(names)}", nearest(tag, names))
    if kind == "union_tag_not_found":
        return Problem(f"{key}.name", f"needs a value: {key}.name=VALUE" if overrides else "is missing")
    if kind == "target":
        return Problem(key, detail["msg"], context.get("nearest"))
    if isinstance(error := context.get("error"), FieldError):
        return Problem(_key([*path, error.field]), str(error))
    shown = quoted(key, value)
    if kind == "literal_error":
        names = choices(detail)
        return Problem(key, f"{shown}: expected one of {', '.join(names)}", nearest(value, names))
    if kind == "list_type" and overrides and isinstance(value, str) and shown == repr(value):
        return Problem(key, f"{shown}: expected a list: {key}=[{value}]")
    return Problem(key, f"{shown}: expected {expected(detail)}")


def _path(data: Any, loc: tuple[str | int, ...], missing: bool) -> list[str | int]:
    """Return the key path of an error. pydantic's location also contains members of unions, which are not keys."""
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


def _too_large(data: Any, path: tuple[str | int, ...] = ()) -> Iterator[Problem]:
    """Yield a problem for each integer that exceeds what libraries can store, at any key."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from _too_large(value, (*path, key))
    elif isinstance(data, list):
        for i, value in enumerate(data):
            yield from _too_large(value, (*path, i))
    elif isinstance(data, int) and abs(data) > LARGEST:
        yield Problem(_key(path), f"{shortened(data)}: expected at most {LARGEST} and at least -{LARGEST}")


def _valid_parts(cls: type[Spec], data: Mapping[str, Any], context: Any, skip: set[Any]) -> Iterator[tuple[str, Any]]:
    for name, field in cls.model_fields.items():
        if name in skip:
            continue
        if name not in data:
            if not field.is_required():
                yield name, field.get_default(call_default_factory=True, validated_data={})
            continue
        try:
            yield name, getattr(_field_model(cls, name).model_validate({name: data[name]}, context=context), name)
        except ValidationError:
            continue


@functools.cache
def _field_model(cls: type[Spec], name: str) -> type[BaseModel]:
    """Return a model with one field. It uses no docstrings: pydantic would search all modules for them."""
    field = cls.model_fields[name]
    definition: Any = {name: (field.annotation, field)}
    return create_model(cls.__name__, __config__=cls.model_config | {"use_attribute_docstrings": False}, **definition)


def _child(data: Any, part: str | int) -> Any:
    if isinstance(data, Mapping):
        return data.get(part)
    return data[part] if isinstance(data, list) and isinstance(part, int) and part < len(data) else None


def _model(annotation: Any, value: Any) -> type[Spec] | None:
    """Return the spec class of an annotation for this value; `name` selects a member of a union of specs."""
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
    """Return the type expected at `part` of a value of type `annotation`."""
    model = _model(annotation, value)
    if model is not None and issubclass(model, Target):
        component = locate(value["_target_"], allow)[1] if isinstance(value, Mapping) and "_target_" in value else None
        parameters = settable(component) if component else {}
        return parameters[str(part)].annotation if part in parameters else None
    if model is not None:
        return model.model_fields[str(part)].annotation if part in model.model_fields else None
    arguments = [a for a in get_args(annotation) if a is not type(None)]
    return arguments[-1] if arguments else annotation if inspect.isclass(annotation) else None
