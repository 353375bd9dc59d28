"""Exports of Langfuse (observations, traces with their observations, scores), LangSmith (runs) and MLflow (traces)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from components.data.columns import parsed
from components.data.logs.parts import LogPart, called, either, structured

LANGFUSE = "Export observations with input and output (fields=core,basic,io)"
LANGSMITH = "Export runs with inputs and outputs; LANGSMITH_HIDE_INPUTS and LANGSMITH_HIDE_OUTPUTS remove them"
TRACES = "has no observations, which have the calls. Export the table of observations, or the trace as JSON"
MLFLOW = "Trace the calls with mlflow.openai.autolog() or another autolog, which records their inputs and outputs"
SPANS = "Search with include_spans=True"
_MODELS = ("CHAT_MODEL", "LLM")
"""Types of MLflow's spans that call a model."""
_LISTS = {"input", "output", "metadata", "tags", "traceTags", "comments", "toolCalls", "toolCallNames"}
"""Columns of Langfuse's observations in which a list is no score."""


def langfuse(row: Mapping[str, Any]) -> list[LogPart] | None:
    """Return the parts of an observation, a trace with observations, or a score; None for another row."""
    observations = parsed(row.get("observations"))
    if isinstance(observations, list) and all(isinstance(item, Mapping) for item in observations):
        entries = [*observations, *(parsed(row.get("scores")) or [])]
        return [part for entry in entries for part in langfuse({"traceId": row.get("id"), **entry}) or []]
    trace = either(row, "traceId", "trace_id")
    if trace is None and row.keys() >= {"timestamp", "output", "release", "public"}:
        return [LogPart(str(row.get("id")), problem=f"trace {row.get('id')} {TRACES}")]
    if trace is None or not (kind := row.get("type")) or "run_type" in row:
        known = trace is not None and "name" in row and ("value" in row or "stringValue" in row)
        return [LogPart(str(trace), scores={str(row["name"]): _score(row)})] if known else None
    values = {name: parsed(value) for name, value in row.items()}
    scores = {name: _combined(items) for name, items in values.items() if name not in _LISTS and _scores(items)}
    parts = [LogPart(str(trace), scores=scores)] if scores else []
    if str(kind).upper() != "GENERATION":
        return parts
    failed = either(row, "statusMessage", "status_message") or "its level is ERROR"
    return [
        *parts,
        called(
            str(trace),
            either(row, "startTime", "start_time"),
            f"observation {row.get('id')}",
            row.get("input"),
            row.get("output"),
            error=failed if row.get("level") == "ERROR" else None,
            hint=LANGFUSE,
        ),
    ]


def langsmith(row: Mapping[str, Any]) -> list[LogPart] | None:
    """Return the parts of a run: its call, and its feedback; None for another row."""
    if "run_type" not in row or "inputs" not in row:
        return None
    trace = str(either(row, "trace_id", "id"))
    inputs, outputs, extra, feedback = (
        structured(row, name) or {} for name in ("inputs", "outputs", "extra", "feedback_stats")
    )
    scores = {name: item["avg"] for name, item in feedback.items() if isinstance(item, Mapping) and "avg" in item}
    parts = [LogPart(trace, scores=scores)] if scores else []
    if row["run_type"] == "llm":
        tools = (extra.get("invocation_params") or {}).get("tools")
        start, name, error = row.get("start_time"), f"run {row.get('id')}", row.get("error")
        parts.append(called(trace, start, name, inputs, outputs, tools=tools, error=error, hint=LANGSMITH))
    return parts


def mlflow(row: Mapping[str, Any]) -> list[LogPart] | None:
    """Return the parts of a trace: the calls of its spans, and the feedback of its assessments; None for another
    row."""
    whole = parsed(row.get("trace")) if "trace" in row else row
    info, data = (whole.get("info"), whole.get("data")) if isinstance(whole, Mapping) else (None, None)
    if not isinstance(info, Mapping) or not isinstance(data, Mapping) or not isinstance(data.get("spans"), list):
        return None
    trace = str(either(info, "trace_id", "request_id"))
    parts = [] if data["spans"] else [LogPart(trace, problem=f"trace {trace} has no spans. {SPANS}")]
    for span in data["spans"]:
        values = {name: parsed(value) for name, value in (span.get("attributes") or {}).items()}
        if str(values.get("mlflow.spanType")).strip('"') not in _MODELS:
            continue
        status = span.get("status") or {}
        failed = either(status, "message", "code") if "ERROR" in str(status.get("code")) else None
        request, response = values.get("mlflow.spanInputs"), values.get("mlflow.spanOutputs")
        start, name = either(span, "start_time_unix_nano", "start_time"), f"span {span.get('span_id')}"
        tools = values.get("mlflow.chat.tools")
        parts.append(called(trace, start, name, request, response, tools=tools, error=failed, hint=MLFLOW))
    for item in info.get("assessments") or []:
        if isinstance(feedback := item.get("feedback"), Mapping) and item.get("valid", True):
            parts.append(LogPart(trace, scores={str(item.get("assessment_name")): feedback.get("value")}))
    return parts


def _score(row: Mapping[str, Any]) -> Any:
    """Return the value of a score of Langfuse: its number, or the text of a category that no configuration maps to a
    number, for which the number is missing or 0."""
    unmapped = row.get("dataType") == "CATEGORICAL" and either(row, "configId", "config_id") is None
    return row.get("stringValue") if unmapped or row.get("value") is None else row["value"]


def _scores(value: Any) -> bool:
    """Return True for the values of a score, which has a column of its own in tables: numbers or categories."""
    return isinstance(value, list) and bool(value) and all(isinstance(item, int | float | str) for item in value)


def _combined(items: Sequence[Any]) -> Any:
    """Return the mean of numbers, the category on which all agree, or else all values."""
    if all(type(item) in (int, float) for item in items):
        return fmean(items)
    return items[0] if all(item == items[0] for item in items) else items
