"""The tools that an environment offers, checked before a model is told of them: what is wrong with one is said by name,
not by what a chat template or a server makes of it. And the arguments of a call, held against the schema of its tool.

A schema is read in the dialect that its `$schema` names, else in the newest."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from typing import Any

from components.errors import EnvironmentFailed

_NAME = re.compile(r"[\w.-]{1,64}")
_FORM = '{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}'


def as_tools(found: Any) -> list[dict[str, Any]]:
    """The tools, if they are in OpenAI's form, with JSON schemas of objects; else EnvironmentFailed. Their schemas are
    held against the meta-schema where the package jsonschema is installed."""
    if not isinstance(found, list | tuple):
        raise EnvironmentFailed(f"tools returned {type(found).__name__}, expected a list of tools")
    try:
        text = json.dumps(found, allow_nan=False, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvironmentFailed(f"tools returned what is no JSON data: {error}") from None
    if problem := _problem(text):
        raise EnvironmentFailed(f"tools returned {problem}")
    return list(found)


@functools.lru_cache(maxsize=64)  # each episode asks, mostly for the same
def _problem(text: str) -> str | None:
    """What is wrong with the tools, as JSON text; None where nothing is."""
    seen = set()
    for tool in json.loads(text):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict):
            return f"{tool!r:.200} for a tool; expected {_FORM}"
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            return f"a tool with the name {name!r:.80}; expected up to 64 letters, digits, '_', '-', '.'"
        if name in seen:
            return f"two tools with the name {name!r}"
        seen.add(name)
        if not isinstance(function.get("description", ""), str):
            return f"the tool {name!r} with the description {function['description']!r:.80}; expected text"
        for where, what in _schema_problems(function.get("parameters", {"type": "object"})):
            return f"the tool {name!r} with an invalid schema: {'.'.join(['parameters', *where])}: {what:.200}"
    return None


def _schema_problems(schema: Any) -> Iterator[tuple[list[str], str]]:
    if not isinstance(schema, dict):
        yield [], f"{schema!r:.80}; expected a mapping"
        return
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if schema.get("type", "object") != "object":
        yield ["type"], f"{schema['type']!r:.80}; arguments come by name, expected 'object'"
    elif not isinstance(properties, dict) or not all(isinstance(one, dict) for one in properties.values()):
        yield ["properties"], f"{properties!r:.80}; expected a schema for each argument"
    elif not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        yield ["required"], f"{required!r:.80}; expected a list of names"
    else:
        yield from _against_the_meta_schema(schema)


def _against_the_meta_schema(schema: dict[str, Any]) -> Iterator[tuple[list[str], str]]:
    try:
        dialect = _dialect(schema)
    except ImportError:
        return
    for error in sorted(dialect(dialect.META_SCHEMA).iter_errors(schema), key=lambda one: list(map(str, one.path))):
        yield [str(part) for part in error.absolute_path], error.message


def misfit(function: dict[str, Any], arguments: dict[str, Any]) -> str:
    """What is wrong with the arguments of a call of a tool that was checked; empty where nothing is. Raises
    EnvironmentFailed where its schema refers to what is not in it."""
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    from components.specs.schemas import first_error

    schema = {"type": "object", **(function.get("parameters") or {})}
    try:
        # No registry that fetches: a schema may not make us ask another machine.
        found = first_error(_dialect(schema)(schema, registry=Registry()), arguments)
    except Unresolvable as error:
        text = f"tools: the schema of the tool {function['name']!r} cannot be used: {error!s:.200}"
        raise EnvironmentFailed(text) from None
    if found is None:
        return ""
    place = "".join(f".{part}" for part in found.absolute_path)
    return f"{function['name']}{place}: {found.message:.300}"


def _dialect(schema: dict[str, Any]) -> Any:
    """The validator for it. Raises ImportError where the package jsonschema is not installed."""
    from jsonschema import validators

    from components.specs.schemas import bounded

    return bounded(validators.validator_for(schema, default=validators.validator_for({})))
