"""Forms of logs of model calls, whose conversations are joined from parts in several rows (`components.data.logs`).

openai_stored  stored chat completions, with their messages
openai_batch   input and output files of batches
otel           spans of OpenTelemetry: OpenLLMetry, OpenInference (Phoenix), Langfuse's client
langfuse       observations, traces and scores
langsmith      runs
mlflow         traces
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from components.data.columns import RowColumns
from components.data.examples import DataExample, RowProblem
from components.data.forms.base import Form, conversation
from components.data.logs import exports, openai_api, spans
from components.data.logs.parts import LogPart
from components.data.messages import read_messages


def _read(columns: RowColumns) -> DataExample:
    """Return the example of a joined conversation."""
    messages, tools = read_messages(columns.need("messages")), columns.get("tools")
    for number, message in enumerate(messages):
        if message.tool_calls and not tools:
            call = f"message {number} calls {message.tool_calls[0].name}"
            raise RowProblem(f"{call}, but the log has no tools. Let the instrumentation record them", "unknown_tool")
    reward = columns.number("reward")
    return DataExample(
        [conversation(messages, 1.0 if reward is None else reward)], missing=columns.get("missing") or {}
    )


def _form(
    name: str,
    summary: str,
    parts: Callable[[Mapping[str, Any]], list[LogPart] | None],
    assemble: Callable[[Sequence[LogPart]], list[LogPart]] | None = None,
) -> Form:
    more = {"missing": ("missing",)}
    return Form(name, summary, {"messages": ("messages",)}, _read, more=more, parts=parts, assemble=assemble)


LOGS = (
    _form("otel", "spans of OpenTelemetry (OTLP JSON, ConsoleSpanExporter, Phoenix)", spans.span_parts),
    _form("mlflow", "traces of MLflow (info and data)", exports.mlflow),
    _form("langsmith", "runs of LangSmith (run_type, inputs, outputs)", exports.langsmith),
    _form("langfuse", "observations and scores of Langfuse (traceId, type, input, output)", exports.langfuse),
    _form("openai_batch", "requests and responses of OpenAI's batches", openai_api.batch, openai_api.one_call),
    _form("openai_stored", "OpenAI's stored chat completions", openai_api.stored, openai_api.one_call),
)
"""Forms of logs, in the order of recognition."""
