"""Validation of an environment's tools, and of the arguments of a call against the tool's JSON schema.

Tools are validated before a model reads them, so that an error names the tool instead of appearing in a chat template
or a server. A schema's dialect is the one named by `$schema`, else the newest.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from typing import Any

from components.errors import EnvironmentFailed

_NAME = re.compile(r"[\w.-]{1,64}")
_FORM = '{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}'


def as_tools(value: Any) -> list[dict[str, Any]]:
    """Return the validated tools. Raises EnvironmentFailed unless they have OpenAI's format with JSON schemas of
    objects. Schemas are validated against the meta-schema if the package jsonschema is installed."""
    if not isinstance(value, list | tuple):
        raise EnvironmentFailed(f"tools returned {type(value).__name__}, expected a list of tools")
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvironmentFailed(f"tools returned data that cannot be serialized as JSON: {error}") from None
    if problem := _problem(text):
        raise EnvironmentFailed(f"tools returned {problem}")
    return list(value)


@functools.lru_cache(maxsize=64)  # most episodes have the same tools
def _problem(text: str) -> str | None:
    """Return the first problem of tools given as JSON text, or None."""
    names = set()
    for tool in json.loads(text):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict):
            return f"{tool!r:.200} for a tool; expected {_FORM}"
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            return f"a tool with the name {name!r:.80}; expected up to 64 letters, digits, '_', '-', '.'"
        if name in names:
            return f"two tools with the name {name!r}"
        names.add(name)
        if not isinstance(function.get("description", ""), str):
            return f"the tool {name!r} with the description {function['description']!r:.80}; expected text"
        for path, problem in _schema_problems(function.get("parameters", {"type": "object"})):
            return f"the tool {name!r} with an invalid schema: {'.'.join(['parameters', *path])}: {problem:.200}"
    return None


def _schema_problems(schema: Any) -> Iterator[tuple[list[str], str]]:
    """Yield the path and description of each problem of a parameter schema."""
    if not isinstance(schema, dict):
        yield [], f"{schema!r:.80}; expected a mapping"
        return
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if schema.get("type", "object") != "object":
        yield ["type"], f"{schema['type']!r:.80}; arguments come by name, expected 'object'"
    elif not isinstance(properties, dict) or not all(isinstance(schema, dict) for schema in properties.values()):
        yield ["properties"], f"{properties!r:.80}; expected a schema for each argument"
    elif not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        yield ["required"], f"{required!r:.80}; expected a list of names"
    else:
        yield from _meta_schema_problems(schema)


def _meta_schema_problems(schema: dict[str, Any]) -> Iterator[tuple[list[str], str]]:
    try:
        dialect = _dialect(schema)
    except ImportError:
        return
    for error in sorted(dialect(dialect.META_SCHEMA).iter_errors(schema), key=lambda error: list(map(str, error.path))):
        yield [str(part) for part in error.absolute_path], error.message


def misfit(function: dict[str, Any], arguments: dict[str, Any]) -> str:
    """Return the first violation of a validated tool's schema by the arguments of a call, or an empty string. Raises
    EnvironmentFailed if the schema has an external reference."""
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    from components.specs.schemas import first_error

    schema = {"type": "object", **(function.get("parameters") or {})}
    try:
        # No registry that fetches: a schema must not trigger network requests.
        violation = first_error(_dialect(schema)(schema, registry=Registry()), arguments)
    except Unresolvable as error:
        text = f"tools: the schema of the tool {function['name']!r} cannot be used: {error!s:.200}"
        raise EnvironmentFailed(text) from None
    if violation is None:
        return ""
    place = "".join(f".{part}" for part in violation.absolute_path)
    return f"{function['name']}{place}: {violation.message:.300}"


def _dialect(schema: dict[str, Any]) -> Any:
    """Return the validator class of the schema's dialect. Raises ImportError if jsonschema is not installed."""
    from jsonschema import validators

    from components.specs.schemas import bounded

    return bounded(validators.validator_for(schema, default=validators.validator_for({})))
