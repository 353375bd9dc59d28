"""Tools of an MCP server, as offered to an agent."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from components.environments.adapters.mcp_session import EXTRA
from components.environments.optional_packages import import_optional
from components.errors import SpecError
from components.json_text import reject_constant
from components.specs.base import nearest
from components.specs.schemas import LimitExceeded, bounded, first_error, too_large, try_references

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""Valid name of a tool in OpenAI's format."""
MOST_ARGUMENTS = 100_000
"""Maximum length of the arguments of a call, in characters."""


class Tool:
    """A tool of a server, as offered to the agent. Raises SpecError if its schema is invalid."""

    def __init__(self, name: str, description: str, schema: dict[str, Any]):
        jsonschema, referencing = import_optional("jsonschema", EXTRA), import_optional("referencing", EXTRA)
        self.name = name
        if problem := too_large(schema):
            raise _invalid(name, problem)
        kind = bounded(jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator))
        try:
            kind.check_schema(schema)
            # An empty registry: a schema must not trigger requests to other hosts.
            self._validator = kind(schema, registry=referencing.Registry())
            try_references(self._validator)
        except (jsonschema.exceptions.SchemaError, referencing.exceptions.Unresolvable, LimitExceeded) as error:
            reason = str(getattr(error, "message", error)).splitlines()[0][:200]
            raise _invalid(name, reason) from None
        function = {"name": valid_name(name), "description": description, "parameters": schema}
        self.schema: dict[str, Any] = {"type": "function", "function": function}

    def parse(self, text: Any) -> tuple[dict[str, Any], str]:
        """Return the validated arguments of a call, and an error message; empty if they are valid."""
        text = text if isinstance(text, str) else json.dumps(text)
        if len(text) > MOST_ARGUMENTS:
            return {}, f"the arguments of {self.name} have more than {MOST_ARGUMENTS} characters"
        try:
            arguments = json.loads(text or "{}", parse_constant=reject_constant)
            text.encode()
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            return {}, f"the arguments of {self.name} are no JSON object"
        error = first_error(self._validator, arguments)
        if error is None:
            return arguments, ""
        at = ".".join(str(part) for part in error.absolute_path)
        return {}, f"{self.name}: {f'{at}: ' if at else ''}{error.message[:300]}"


def _invalid(name: str, reason: str) -> SpecError:
    message = (
        f"the tool {name!r:.200} of the server has an invalid input schema ({reason}); exclude it: list the other "
        "tools in environment.tools"
    )
    return SpecError.at("environment.tools", message)


def chosen(listed: Sequence[Any], offered: Sequence[str] | None) -> dict[str, Tool]:
    """Return the offered tools by the names that the agent sees. Raises SpecError.

    listed: tools of the server. offered: names of the tools to offer; None for all.
    """
    names = [tool.name for tool in listed]
    if unknown := [name for name in offered or () if name not in names]:
        message = f"the server has no tool {unknown[0]!r}; it has {', '.join(names) or 'none'}"
        raise SpecError.at("environment.tools", message, nearest(unknown[0], names))
    selected = [tool for tool in listed if offered is None or tool.name in offered]
    if not selected:
        raise SpecError.at("environment.tools", "no tools: the server lists none")
    tools: dict[str, Tool] = {}
    for tool in selected:
        name = valid_name(tool.name)
        if name in tools:
            message = f"{tool.name!r} and {tools[name].name!r} have the same name for an agent; offer only one of them"
            raise SpecError.at("environment.tools", message)
        tools[name] = Tool(tool.name, tool.description or tool.title or "", tool.input_schema)
    return tools


def valid_name(name: str) -> str:
    """Return the name of a tool in OpenAI's format."""
    return name if NAME.fullmatch(name) else re.sub(r"[^a-zA-Z0-9_-]", "_", name)[:64]
