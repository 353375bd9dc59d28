"""Canary check: held-out prompts sent to a newly deployed endpoint, before it is used.

The policy's own greedy answers are stored with the export. An endpoint passes if it answers every prompt, and at least
the required share as the policy does. Hosts compute in other types, where a near tie may be decided differently, so a
share of 1 is only for our own server.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from components.chat_client import ChatClient, empty_answer, reading
from components.deployment.targets.base import Deployment
from components.errors import ContextOverflow, DeployError
from components.inference.protocol import ChatCompletion, ChatRequest
from components.json_client import Patience
from components.json_text import read_json
from components.redaction import secret_variable

FILE = "answers.json"


def write_answers(folder: Path, requests: Sequence[ChatRequest], answers: Sequence[ChatCompletion]) -> None:
    """Store the policy's requests and answers."""
    records = [
        {
            "messages": request.messages,
            "tools": request.tools,
            "max_tokens": request.sampling.max_tokens,
            "answer": answer.message,
        }
        for request, answer in zip(requests, answers, strict=True)
    ]
    (folder / FILE).write_text(json.dumps(records, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def check_endpoint(deployment: Deployment, export: Path, *, prompts: int, agreement: float, timeout: float) -> float:
    """Send the first `prompts` of an export's held-out prompts to the endpoint; return the share of equal answers.

    timeout: seconds for one answer, and for which a failing endpoint is retried. Raises DeployError if the endpoint
    does not answer, or the share is below `agreement`.
    """
    assert deployment.url is not None, f"{deployment.target} has no endpoint"
    records = read_json(export / FILE)[:prompts]
    client = ChatClient(
        deployment.url,
        secret_variable(deployment.key_variable or ""),
        Patience(timeout, timeout, "deploy.canary"),
        key_hint=f"set {deployment.key_variable}",
        error=DeployError,
    )
    try:
        answers = [_text(message) for message in asyncio.run(_ask(client, deployment.model, records))]
    except ContextOverflow as error:
        raise DeployError(str(error)) from None
    finally:
        client.close()
    expected = [_text(record["answer"]) for record in records]
    share = sum(a == b for a, b in zip(answers, expected, strict=True)) / len(records)
    if share < agreement:
        first = next(i for i, (a, b) in enumerate(zip(answers, expected, strict=True)) if a != b)
        raise DeployError(
            f"{deployment.url} answers {share:.2f} of {len(records)} held-out prompts as the policy does, and "
            f"deploy.canary.agreement is {agreement:g}; prompt {first}: it answers {answers[first][:300]}, the policy "
            f"{expected[first][:300]}"
        )
    return share


async def _ask(client: ChatClient, model: str, records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the endpoint's messages, one prompt after the other."""

    def read(completion: dict[str, Any]) -> dict[str, Any]:
        with reading():
            message = completion["choices"][0]["message"]
            if not message.get("content") and not message.get("tool_calls"):
                raise empty_answer()
            return message

    messages = []
    for record in records:
        tools = {"tools": record["tools"]} if record["tools"] else {}
        limits = {"temperature": 0, "max_tokens": record["max_tokens"]}
        body = {"model": model, "messages": record["messages"], **limits, **tools}
        messages.append(await client.complete(body, read))
    return messages


def _text(message: dict[str, Any]) -> str:
    """Return the text and calls of a message, without the ids of the calls."""
    calls = [
        (call["function"]["name"], _read(call["function"]["arguments"])) for call in message.get("tool_calls") or []
    ]
    return json.dumps([(message.get("content") or "").strip(), *calls], ensure_ascii=False)


def _read(arguments: str) -> Any:
    """Return the value of a JSON text; the text itself if it is invalid."""
    try:
        return json.loads(arguments)
    except (TypeError, ValueError):
        return arguments
