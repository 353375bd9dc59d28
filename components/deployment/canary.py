"""Canary check: held-out prompts sent to a newly deployed endpoint, before it is used.

The policy's own greedy answers are stored with the export. An endpoint passes if it answers every prompt, and at least
the required share as the policy does. Hosts compute in other types, where a near tie may be decided differently, so a
share of 1 is only for our own server.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from components.deployment.answers import answers_of
from components.deployment.targets.base import Deployment
from components.errors import DeployError, EngineError
from components.inference.protocol import ChatCompletion, ChatRequest, Engine, Sampling
from components.json_text import read_json

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


def check_endpoint(engine: Engine, deployment: Deployment, export: Path, *, prompts: int, agreement: float) -> float:
    """Send the first `prompts` of an export's held-out prompts to the endpoint; return the share of equal answers.

    engine: engine of the endpoint. Raises DeployError if the endpoint does not answer, or the share is below
    `agreement`.
    """
    records = read_json(export / FILE)[:prompts]
    requests = [
        ChatRequest(
            record["messages"],
            record["tools"],
            sampling=Sampling(temperature=0.0, max_tokens=record["max_tokens"]),
        )
        for record in records
    ]
    try:
        answers = [_text(answer.message) for answer in answers_of(engine, requests)]
    except EngineError as error:
        raise DeployError(str(error)) from None
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
