"""Messages of OpenEnv servers: their replies as models, their errors, and the forms that the agent sees."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from components.bounded_reply import InvalidReply
from components.environments.tools import ACT
from components.specs.schemas import too_large

MAX_TOOLS = 1000
"""Maximum number of tools of a server."""
FULL = "CAPACITY_REACHED"
"""Error code of a server at capacity."""
INVALID = ("VALIDATION_ERROR", "INVALID_JSON")
"""Error codes for an invalid action."""


class ServerError(Exception):
    """Error that a server reports in place of a result."""

    def __init__(self, data: ErrorData):
        self.full, self.invalid = data.code == FULL, data.code in INVALID
        details = [f"{'.'.join(map(str, error.loc))}: {error.msg}" for error in data.errors or ()]
        super().__init__("; ".join([data.message or "it gives no reason", *details])[:1000])


class ActionSchema(BaseModel):
    """JSON schema of an action."""

    model_config = ConfigDict(extra="allow")

    properties: dict[str, dict[str, Any]] = {}
    required: list[str] = []


class Schemas(BaseModel):
    """Response of /schema."""

    action: ActionSchema


class _ListedTool(BaseModel):
    name: str = Field(min_length=1)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, validation_alias=AliasChoices("inputSchema", "input_schema"))


class _Tools(BaseModel):
    tools: list[_ListedTool] = Field(min_length=1, max_length=MAX_TOOLS)


class _ListResult(BaseModel):
    result: _Tools


class Listed(BaseModel):
    """Response to tools/list."""

    data: _ListResult


class _Result(BaseModel):
    observation: dict[str, Any] | None = None
    reward: float | None = Field(None, allow_inf_nan=False)
    done: bool | None = None


class Observed(BaseModel):
    """Response to a reset or a step."""

    type: Literal["observation"]
    data: _Result


class _FieldError(BaseModel):
    loc: list[str | int] = []
    msg: str = ""


class ErrorData(BaseModel):
    """Error that a server reports."""

    code: str = ""
    message: str | None = None
    errors: list[_FieldError] | None = None


def bounded_schema(schema: ActionSchema | dict[str, Any]) -> dict[str, Any]:
    """Return a schema. Raises InvalidReply if it is too large to validate against."""
    data = schema.model_dump() if isinstance(schema, ActionSchema) else schema
    if problem := too_large(data):
        raise InvalidReply(f"returned a schema with {problem}")
    return data


def render_fields(observation: dict[str, Any]) -> str:
    """Render the non-empty fields of an observation; a single text is returned unchanged."""
    fields = {name: value for name, value in observation.items() if value not in (None, "", [], {})}
    if len(fields) == 1 and isinstance(text := next(iter(fields.values())), str):
        return text
    lines = [f"{name}: {value if isinstance(value, str) else json.dumps(value)}" for name, value in fields.items()]
    return "\n".join(lines)


def act_tool(action: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tool whose arguments are an action."""
    required = [name for name in action.get("required") or () if name in fields]
    parameters: dict[str, Any] = {"type": "object", "properties": dict(fields), "required": required}
    if "$defs" in action:
        parameters["$defs"] = action["$defs"]
    about = " ".join(str(action.get("description") or "carries out one action").split())
    return {"type": "function", "function": {"name": ACT.name, "description": about, "parameters": parameters}}


def tool_result(observation: Mapping[str, Any]) -> str:
    """Return the result of a tool call as text."""
    if error := observation.get("error"):
        return f"error: {error.get('message', error) if isinstance(error, Mapping) else error}"
    result = observation["result"]
    if isinstance(result, Mapping) and "data" in result:
        result = result["data"]
    return result if isinstance(result, str) else json.dumps(result)
