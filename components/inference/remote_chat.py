"""Requests and responses of chat completions that remote engines share: OpenAI's JSON on both sides."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from components.inference.protocol import ANY_OBJECT, ChatRequest, ReportedTokens
from components.json_client import empty_answer


def body_of(request: ChatRequest, model: str) -> dict[str, Any]:
    """Return the request as JSON, without parameters at their neutral values, which some servers do not support."""
    sampling = request.sampling
    sampling.refuse_thinking_limit("remote")
    body: dict[str, Any] = {
        "model": model,
        "messages": [_sendable(message) for message in request.messages],
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
    }
    if sampling.temperature > 0:  # greedy decoding has no seed
        body["seed"] = request.seed % 2**63
    if request.tools:
        strict = {"strict": True} if request.form.strict else {}
        body["tools"] = [{**tool, "function": {**tool["function"], **strict}} for tool in request.tools]
    if request.stop:
        body["stop"] = list(request.stop)
    return body | sampling.cuts | _form(request)


def _form(request: ChatRequest) -> dict[str, Any]:
    """Return the parameters of the response's form and of changed logits."""
    body: dict[str, Any] = {}
    if request.form.json_schema is not None:
        schema = {"name": request.form.schema_name, "schema": request.form.schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
        if request.form.json_schema == ANY_OBJECT:
            body["response_format"] = {"type": "json_object"}
    if request.form.single:
        body["parallel_tool_calls"] = False
    if request.form.calls:
        names, offered = request.form.calls, {tool["function"]["name"] for tool in request.tools}
        single = {"type": "function", "function": {"name": names[0]}}
        body["tool_choice"] = "required" if set(names) == offered else single
    if request.change.bias:
        body["logit_bias"] = {str(token): value for token, value in request.change.bias}
    penalties = {"presence_penalty": request.change.presence, "frequency_penalty": request.change.frequency}
    return body | {name: value for name, value in penalties.items() if value}


def message_of(choice: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the message of a choice and its finish reason. Raises FailedAttempt for an empty message, and the errors
    that `fail_on_invalid_answer` catches."""
    raw = choice["message"]
    content, calls = raw.get("content") or "", raw.get("tool_calls") or []
    message: dict[str, Any] = {"role": "assistant", "content": str(content)}
    reasoning = raw.get("reasoning_content") or raw.get("reasoning")
    if reasoning:
        message["reasoning"] = str(reasoning)
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    if not content and not reasoning and not calls and not choice.get("token_ids"):
        raise empty_answer()
    return message, str(choice.get("finish_reason") or "stop")


def usage_of(completion: dict[str, Any], cost: Callable[[int, int], float | None]) -> ReportedTokens | None:
    """Return the token counts that the server reports; None if it reports none. cost: cost of these numbers of prompt
    and completion tokens."""
    usage = completion.get("usage") or {}
    read, written = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if not isinstance(read, int) or not isinstance(written, int) or min(read, written) < 0:
        return None
    return ReportedTokens(read, written, cost(read, written))


def _sendable(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with valid call arguments and its reasoning as `reasoning_content`. Servers reject
    conversations with arguments that are no JSON object, even if a model wrote them, so their text is wrapped in an
    object."""
    if "reasoning" in message:
        message = {**message, "reasoning_content": message["reasoning"]}
        del message["reasoning"]
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        text = call["function"]["arguments"]
        function = {**call["function"], "arguments": text if _is_object(text) else json.dumps({"unreadable": text})}
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def _is_object(text: str) -> bool:
    """Return True for the text of a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {
        "id": str(call["id"]),
        "type": "function",
        "function": {"name": str(function["name"]), "arguments": str(function["arguments"])},
    }
