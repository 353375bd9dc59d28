"""The canary: held-out prompts through an endpoint that was just deployed, before it is relied on.

The policy's own greedy answers were kept with the export. An endpoint passes where it answers every prompt, and as the
policy does in at least the share that is asked for: hosts compute in other types, where a near tie may fall the other
way, so that 1 is for a server of our own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from components.deployment.targets.protocol import Deployment
from components.errors import DeployError
from components.inference.protocol import ChatCompletion, ChatRequest
from components.json_client import Client, Failed, Patience, Reply
from components.json_text import read_json
from components.redaction import secret_variable

FILE = "answers.json"


def write_answers(folder: Path, requests: Sequence[ChatRequest], answers: Sequence[ChatCompletion]) -> None:
    """Keeps what the policy was asked and said."""
    said = [
        {
            "messages": request.messages,
            "tools": request.tools,
            "max_tokens": request.sampling.max_tokens,
            "answer": answer.message,
        }
        for request, answer in zip(requests, answers, strict=True)
    ]
    (folder / FILE).write_text(json.dumps(said, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def check_endpoint(deployment: Deployment, export: Path, *, prompts: int, agreement: float, timeout: float) -> float:
    """Asks the endpoint the first `prompts` of an export's held-out prompts; returns the share that it answers as the
    policy does. timeout: seconds for one answer, and for which a failing endpoint is asked again.

    Raises DeployError where it does not answer, or that share is below `agreement`.
    """
    assert deployment.url is not None, f"{deployment.target} has no endpoint"
    known = read_json(export / FILE)[:prompts]
    client = Client(
        deployment.url,
        secret_variable(deployment.key_variable or ""),
        Patience(timeout, timeout, "deploy.canary"),
        key_hint=f"set {deployment.key_variable}",
        error=DeployError,
    )
    try:
        found = [_said(_ask(client, deployment.model, one)) for one in known]
    finally:
        client.close()
    wanted = [_said(one["answer"]) for one in known]
    share = sum(a == b for a, b in zip(found, wanted, strict=True)) / len(known)
    if share < agreement:
        first = next(i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b)
        raise DeployError(
            f"{deployment.url} answers {share:.2f} of {len(known)} held-out prompts as the policy does, and "
            f"deploy.canary.agreement is {agreement:g}; prompt {first}: it says {found[first][:300]}, the policy "
            f"{wanted[first][:300]}"
        )
    return share


def _ask(client: Client, model: str, asked: dict[str, Any]) -> dict[str, Any]:
    body = {
        "model": model,
        "messages": asked["messages"],
        "temperature": 0,
        "max_tokens": asked["max_tokens"],
        **({"tools": asked["tools"]} if asked["tools"] else {}),
    }

    def read(reply: Reply) -> dict[str, Any]:
        try:
            message = reply.json()["choices"][0]["message"]
        except (KeyError, IndexError, TypeError) as error:
            raise Failed(f"an answer that is none ({type(error).__name__}: {error})", empty=True) from None
        if not message.get("content") and not message.get("tool_calls"):
            raise Failed("an empty answer", empty=True)
        return message

    return client.now("POST", "/chat/completions", body, read)


def _said(message: dict[str, Any]) -> str:
    """What a message says, without the ids of its calls."""
    calls = [(one["function"]["name"], _read(one["function"]["arguments"])) for one in message.get("tool_calls") or []]
    return json.dumps([(message.get("content") or "").strip(), *calls], ensure_ascii=False)


def _read(arguments: str) -> Any:
    """What JSON says, however it is spaced."""
    try:
        return json.loads(arguments)
    except (TypeError, ValueError):
        return arguments
