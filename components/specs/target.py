"""Targets: a class or function by dotted path, with its arguments.

A pydantic model made from the signature validates the arguments, so annotations such as
`Annotated[float, Field(ge=0)]` and `Literal["a", "b"]` apply.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Self, get_args, get_origin

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    PydanticUserError,
    TypeAdapter,
    ValidationInfo,
    create_model,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema, to_jsonable_python

from components.redaction import dereference, reference
from components.specs.base import Spec, reject_texts_for_numbers
from components.specs.component_path import (
    OWN_PACKAGE,
    allowed_component,
    import_component,
    is_below,
    target_error,
    validation_error,
)
from components.specs.marks import may_refer
from components.specs.parameters import parameters_of, settable, takes_positional
from components.specs.registered import registered_name
from components.specs.source import source_digest

_NUMBERS: dict[str, Any] = {
    "numbers": model_validator(mode="before")(classmethod(reject_texts_for_numbers))  # type: ignore[arg-type]
}
_NO_REFERENCE = (
    "this argument may not hold a reference to an environment variable (env:NAME); expected a plain value. In code of "
    "your own, declare it: Annotated[str, components.specs.marks.REFERENCE]"
)


class Target(Spec):
    """A class or function by dotted path, with its arguments.

    Written flat: `{"_target_": "package.module.Name", "argument": value}`. A class must accept the arguments as
    keywords. A function is called later with one positional argument (a reward: the trajectory); the arguments here
    bind its other parameters. A nested `{"_target_": ...}` is built too, unless the parameter's type is Target.
    """

    target: str = Field(alias="_target_")
    """Dotted path: module, then the name of a class or function defined in an allowed package."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments, validated against the signature and converted to its types."""

    called_with: ClassVar[tuple[str, ...] | None] = None
    """Parameters that the caller binds and a config may not; None: the first positional one."""

    called_by_name: ClassVar[bool] = False
    """True if the caller passes every parameter by name, except those that a config binds."""

    built_in: ClassVar[tuple[str, ...]] = ()
    """Packages of the project, besides `components`, from which this kind of target may come."""

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
        component = allowed_component(path, (*(info.context or {}).get("allow", ()), *cls.built_in))
        return {"target": path, "arguments": _check_arguments(path, component, arguments, info.context, cls)}

    def below(self, place: str = "") -> Iterator[tuple[str, Target]]:
        """Yield the targets nested in the arguments with their key paths, deepest first."""
        for path, target in _targets_in(self.arguments, place):
            yield from target.below(path)
            yield path, target

    def has(self, method: str) -> bool:
        """Return True if its class, or that of a nested target, has a method."""
        return any(hasattr(target.factory(), method) for target in [self, *(nested for _, nested in self.below())])

    @model_serializer
    def _flat(self) -> dict[str, Any]:
        return {"_target_": self.target, **to_jsonable_python(self.arguments)}

    def parameters(self) -> list[str]:
        """Return the names of the arguments that it accepts."""
        return list(settable(self.factory(), self.called_with))

    def with_arguments(self, **arguments: Any) -> Self:
        """Return the target with other values of these arguments, which are not validated."""
        return self.model_copy(update={"arguments": {**self.arguments, **arguments}})

    def factory(self) -> Callable[..., Any]:
        """Return the class or function."""
        return import_component(self.target)

    def build(self, **runtime: Any) -> Any:
        """Return an instance of a class, or a `functools.partial` of a function.

        `env:NAME` in an argument with the mark `REFERENCE` is read from that environment variable; raises ResourceError
        if it is not set. `runtime`
        adds keyword arguments outside the configuration; it must not repeat a configured one."""
        assert not runtime.keys() & self.arguments.keys(), f"{self.target}: {runtime.keys() & self.arguments.keys()}"
        component = import_component(self.target)
        parameters = parameters_of(component)
        arguments = {
            name: value
            if _takes_target(parameters, name)
            else _built(value, f"{self.target}.{name}", _may_refer(parameters, name))
            for name, value in copy.deepcopy(self.arguments).items()
        }
        if inspect.isclass(component):
            return component(**arguments, **runtime)
        return functools.partial(component, **arguments, **runtime)

    def resolved(self) -> dict[str, Any]:
        """Return plain data for a stage key: registered name or path, and every argument, including defaults.

        For user code it includes the digest of the module's source, so an edited environment is not served from the
        cache. A class that reads files defines a static method `key_arguments`, which replaces paths by digests of the
        files' content."""
        component = import_component(self.target)
        parameters = parameters_of(component)
        defaults = {n: p.default for n, p in parameters.items() if p.default is not inspect.Parameter.empty}
        arguments = {**{name: value for name, value in defaults.items() if _is_data(value)}, **self.arguments}
        if hasattr(component, "key_arguments"):
            arguments = component.key_arguments(arguments)
        data: dict[str, Any] = {
            "_target_": registered_name(component) or self.target,
            **{name: _resolved(value) for name, value in arguments.items()},
        }
        if not is_below(self.target, OWN_PACKAGE):
            data["source_sha256"] = source_digest(import_component(self.target).__module__)
        return data


def _check_arguments(
    path: str,
    component: Callable[..., Any],
    arguments: dict[str, Any],
    context: Any,
    kind: type[Target],
) -> dict[str, Any]:
    by_name = kind.called_by_name and not inspect.isclass(component)
    called_with = () if by_name else kind.called_with
    parameters = settable(component, called_with)
    if called_with is None and (columns := {"completions", "prompts"} & set(list(parameters_of(component))[:1])):
        name = columns.pop()
        message = (
            f"{path} takes columns (its first parameter is {name!r}), but is called with a single object here; "
            f"expected reward=columns reward.function={path}"
        )
        raise target_error(path, message)
    if called_with is None and not inspect.isclass(component) and not takes_positional(component):
        raise target_error(path, f"{path} takes no positional argument, but is called with one; give it a parameter")
    missing = [n for n, p in parameters.items() if p.default is inspect.Parameter.empty and n not in arguments]
    if called_with is not None and missing and not by_name:
        hint = f"expected some of {', '.join(called_with)}, and values for others in the configuration"
        message = f"{path} requires {', '.join(missing)}; {hint}"
        raise PydanticCustomError("target", "{message}", {"message": message})
    free = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters_of(component).values())
    fields: dict[str, Any] = {}
    for i, (name, parameter) in enumerate(parameters.items()):
        annotation = parameter.annotation
        if has_target(arguments.get(name)) and not _takes_target(parameters, name):
            typed = _mentions(annotation, Spec)  # the rest of the annotation also constrains the nested targets
            annotation = Annotated[annotation, BeforeValidator(_nested)] if typed else _NestedTargets
        required = parameter.default is inspect.Parameter.empty and not by_name
        default = ... if required else None if by_name else parameter.default
        fields[f"p{i}"] = (annotation, Field(default, alias=name))
    config = ConfigDict(extra="allow" if free else "forbid", arbitrary_types_allowed=True, allow_inf_nan=False)
    try:
        model = create_model("Arguments", __config__=config, __validators__=_NUMBERS, **fields)
    except PydanticUserError as error:
        reason = f"the annotations of {path} cannot be checked: {error.message}"
        raise PydanticCustomError("target", "{message}", {"message": reason}) from error
    checked = model.model_validate(arguments, context=context)
    names = {f"p{i}": name for i, name in enumerate(parameters)}
    values = {names[f]: getattr(checked, f) for f in names if f in checked.model_fields_set}
    values |= checked.model_extra or {}
    every = parameters_of(component)
    if errors := [
        ((name,), value, PydanticCustomError("reference", _NO_REFERENCE))
        for name, value in values.items()
        if not _may_refer(every, name) and _holds_reference(value)
    ]:
        raise validation_error(errors)
    return values


def has_target(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "_target_" in value or any(map(has_target, value.values()))
    return isinstance(value, list) and any(map(has_target, value))


def _mentions(annotation: Any, base: type) -> bool:
    if inspect.isclass(annotation) and get_origin(annotation) is None:
        return issubclass(annotation, base)
    return any(_mentions(a, base) for a in get_args(annotation))


def _takes_target(parameters: Mapping[str, inspect.Parameter], name: str) -> bool:
    return name in parameters and _mentions(parameters[name].annotation, Target)


def _may_refer(parameters: Mapping[str, inspect.Parameter], name: str) -> bool:
    """Return True for an argument that may hold `env:NAME`."""
    free = [p for p in parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    return any(may_refer(p.annotation) for p in ([parameters[name]] if name in parameters else free))


def _holds_reference(value: Any) -> bool:
    """Return True if plain data has a reference; nested targets and specs check theirs."""
    if isinstance(value, Mapping):
        return any(map(_holds_reference, value.values()))
    return any(map(_holds_reference, value)) if isinstance(value, list | tuple) else reference(value) is not None


def _nested(value: Any, info: ValidationInfo) -> Any:
    """Convert nested mappings to Target. The component that takes the built objects checks their types."""
    if isinstance(value, Mapping) and "_target_" in value:
        return Target.model_validate(value, context=info.context)
    if isinstance(value, Mapping):
        return TypeAdapter(dict[str, _NestedTargets]).validate_python(value, context=info.context)
    if isinstance(value, list):
        return TypeAdapter(list[_NestedTargets]).validate_python(value, context=info.context)
    return value


def _built(value: Any, path: str, dereferences: bool) -> Any:
    """Return an argument with targets built and `env:NAME` replaced. A spec keeps its references and resolves them
    itself: its key and its copies must not hold the value."""
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
        for name, item in items:
            yield from _targets_in(item, f"{place}.{name}" if place else str(name))


def _is_data(value: Any) -> bool:
    """Return True if a value can be part of a key. A default such as a sentinel object cannot; the code version covers
    it."""
    try:
        to_jsonable_python(value)
    except ValueError:
        return False
    return True


class _NestedTargets:
    """Annotation of a parameter that takes nested targets."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return core_schema.with_info_plain_validator_function(_nested)
