"""Spans of OpenTelemetry, in OTLP's JSON, as ConsoleSpanExporter prints them, and as Phoenix exports them.

The calls of models among them are those of the conventions for generative AI (`gen_ai.input.messages`), of OpenLLMetry
before these (`gen_ai.prompt.0.content`), of OpenInference (`llm.input_messages.0.message.content`), and of Langfuse's
client (`langfuse.observation.input`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from components.data.columns import parsed
from components.data.logs.parts import LogPart, called, either, structured

HINT = (
    "Switch the capture of content on: TRACELOOP_TRACE_CONTENT=true (OpenLLMetry), "
    "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=true (OpenTelemetry), OPENINFERENCE_HIDE_INPUTS and _OUTPUTS "
    "unset (OpenInference)"
)
_CALLS = (None, "chat", "text_completion", "generate_content")
"""Operations of `gen_ai.operation.name` that call a model; agents repeat the messages of their calls."""
_DEEPEST = 16
"""Maximum number of dots of an attribute's name that separate levels."""


def span_parts(row: Mapping[str, Any]) -> list[LogPart] | None:
    """Return the calls among the spans of a row; None for a row without spans."""
    spans = list(_spans(row))
    return [part for span in spans if (part := _part(*span)) is not None] if spans else None


def _spans(row: Mapping[str, Any]) -> Iterator[tuple[str, str, Any, dict[str, Any], Any]]:
    """Yield trace, name, start, attributes and status of each span."""
    for resource in either(row, "resourceSpans", "resource_spans") or ([row] if "scopeSpans" in row else []):
        for scope in either(resource, "scopeSpans", "scope_spans") or []:
            for span in scope.get("spans") or []:
                attributes = {item["key"]: _value(item.get("value")) for item in span.get("attributes") or []}
                name = f"span {span.get('spanId')} ({span.get('name')})"
                yield str(span.get("traceId")), name, int(span.get("startTimeUnixNano") or 0), attributes, span
    context = row.get("context") or {name: row.get(f"context.{name}") for name in ("trace_id", "span_id")}
    if isinstance(context, Mapping) and context.get("trace_id"):
        flat = {key.removeprefix("attributes."): row[key] for key in row if key.startswith("attributes.")}
        name = f"span {context.get('span_id')} ({row.get('name')})"
        attributes = parsed(row.get("attributes")) or flat
        yield str(context["trace_id"]), name, row.get("start_time"), attributes, row


def _value(value: Any) -> Any:
    """Return a value of OTLP's JSON."""
    match value:
        case {"arrayValue": {"values": list(items)}}:
            return [_value(item) for item in items]
        case {"kvlistValue": {"values": list(items)}}:
            return {item["key"]: _value(item.get("value")) for item in items}
        case {"intValue": number}:
            return int(number)
    return next(iter(value.values()), None) if isinstance(value, Mapping) else None


def _part(trace: str, name: str, start: Any, flat: Mapping[str, Any], span: Mapping[str, Any]) -> LogPart | None:
    attributes = _nested(flat)
    model = attributes.get("gen_ai") or {}
    llm = attributes.get("llm") or {}
    observation = (attributes.get("langfuse") or {}).get("observation") or {}
    kind = (attributes.get("openinference") or {}).get("span", {}).get("kind")
    tools: Any = None
    if observation.get("type") == "generation":
        request, response = observation.get("input"), observation.get("output")
    elif llm.get("input_messages") or kind == "LLM":
        request, response = (_openinference(structured(llm, side)) for side in ("input_messages", "output_messages"))
        tools = [parsed(item["tool"]["json_schema"]) for item in structured(llm, "tools") or []]
    elif model.get("request") and (model.get("operation") or {}).get("name") in _CALLS:
        request = parsed(either(model.get("input") or {}, "messages") or model.get("prompt"))
        response = parsed(either(model.get("output") or {}, "messages") or model.get("completion"))
        if isinstance(system := parsed(model.get("system_instructions")), list) and isinstance(request, list):
            request = [{"role": "system", "parts": system}, *request]
        functions = (llm.get("request") or {}).get("functions")
        tools = (model.get("tool") or {}).get("definitions") or functions
    else:
        return None
    status = span.get("status") or {}
    code = str(span.get("status_code") or status.get("status_code") or status.get("code"))
    error = either(status, "description", "message") or "the span has the status ERROR"
    failed = error if code.endswith("ERROR") or code == "2" else None
    return called(trace, start, name, request, response, tools=tools, error=failed, hint=HINT)


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes with `a.0.b` as `{"a": [{"b": ...}]}`. Nested ones stay."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *levels, last = path.split(".", _DEEPEST)
        node = tree
        for level in levels:
            if not isinstance(node.get(level), dict):
                node[level] = {}
            node = node[level]
        node[last] = _lists(value) if isinstance(value, list | dict) else value
    return {name: _indexed(value) for name, value in tree.items()}


def _lists(value: Any) -> Any:
    """Return the values of a table's column, whose objects have names with dots."""
    if isinstance(value, list):
        return [_nested(item) if isinstance(item, dict) else item for item in value]
    return _nested(value)


def _indexed(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    inner = {name: _indexed(item) for name, item in value.items()}
    if inner and all(name.isdecimal() for name in inner):
        return [inner[name] for name in sorted(inner, key=int)]
    return inner


def _openinference(logged: Any) -> list[dict[str, Any]]:
    messages = []
    for item in logged or []:
        message = dict(item.get("message") or {})
        calls = [entry.get("tool_call") or {} for entry in message.pop("tool_calls", None) or []]
        contents = [entry.get("message_content") or {} for entry in message.pop("contents", None) or []]
        message |= {"content": contents} if contents else {}
        messages.append(message | ({"tool_calls": calls} if calls else {}))
    return messages
