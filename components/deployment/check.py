"""The serving check: an export, asked over HTTP, must answer held-out prompts exactly as the trained policy does.

Both are asked greedily and one prompt at a time, in the same order, so that both compute the same batches. Prompts
are compared as tokens too: a tokenizer or chat template that got lost in the export shows here.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from components.errors import EngineError
from components.inference.protocol import BASE_POLICY, ChatCompletion, ChatRequest, Sampling
from components.trajectories.convert import to_openai
from components.trajectories.schema import Trajectory


class Served(Protocol):
    """A running server."""

    @property
    def url(self) -> str:
        """OpenAI's `base_url`."""
        ...

    @property
    def name(self) -> str:
        """Model name that it serves."""
        ...


def opening_requests(
    trajectories: Iterable[Trajectory], count: int, *, policy: str, max_tokens: int
) -> list[ChatRequest]:
    """Greedy requests for the first answer of the first `count` scenarios; fewer where there are fewer."""
    sampling = Sampling(temperature=0.0, max_tokens=max_tokens)
    requests: dict[str, ChatRequest] = {}
    for trajectory in trajectories:
        if len(requests) == count:
            break
        if trajectory.group in requests or not trajectory.histories:
            continue
        messages = []
        for message in trajectory.histories[0].messages:
            if message.role == "assistant":
                break
            messages.append(to_openai(message))
        if messages:
            requests[trajectory.group] = ChatRequest(messages, trajectory.tools, policy, sampling)
    return list(requests.values())


def check_serving(
    model_dir: Path,
    requests: Sequence[ChatRequest],
    answers: Sequence[ChatCompletion],
    *,
    serve: Callable[[Path], AbstractContextManager[Served]],
    timeout: float = 600.0,
) -> dict[str, float]:
    """Asks the export in `model_dir`, served by `serve`, what the policy was asked.

    requests: greedy. answers: the policy's (`deployment.answers`). serve:
    `components.inference.server.serve_model`, with its options bound. timeout: seconds for one answer.
    Returns `prompts`, `tokens` and `max_logprob_difference` (nats). Raises EngineError at the first difference, where
    the server fails, and where there is nothing to compare.
    """
    if not requests:
        raise EngineError("no held-out prompt to compare the export on: the evaluation holds no episode with messages")
    tokens, widest = 0, 0.0
    with serve(model_dir) as served:
        for index, (request, want) in enumerate(zip(requests, answers, strict=True)):
            # The export is a model of its own: what it holds is its base.
            got = _ask_server(served, replace(request, policy=BASE_POLICY), timeout)
            _compare(index, want, got)
            tokens += len(want.token_ids)
            gaps = (abs(a - b) for a, b in zip(want.logprobs, got["logprobs"], strict=True))
            widest = max(widest, *gaps)
    return {"prompts": len(requests), "tokens": tokens, "max_logprob_difference": widest}


def _ask_server(served: Served, request: ChatRequest, timeout: float) -> dict[str, Any]:
    """The answer as `{prompt_token_ids, token_ids, logprobs, message, finish_reason}`."""
    sampling = request.sampling
    body = {
        "model": f"{served.name}@{request.policy}",
        "messages": request.messages,
        "temperature": sampling.temperature,
        "max_completion_tokens": sampling.max_tokens,
        "seed": request.seed,
        "logprobs": True,
        "return_token_ids": True,
    }
    if request.tools:
        body["tools"] = request.tools
    post = urllib.request.Request(
        f"{served.url}/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is on this machine
    try:
        with direct.open(post, timeout=timeout) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            raise EngineError(f"the served export refused a held-out prompt: {error.read().decode()}") from None
    except OSError as error:
        raise EngineError(f"the served export did not answer on {served.url}: {error}") from None
    choice = answer["choices"][0]
    return {
        "prompt_token_ids": answer["prompt_token_ids"],
        "token_ids": choice["token_ids"],
        "logprobs": [token["logprob"] for token in choice["logprobs"]["content"]],
        "message": choice["message"],
        "finish_reason": choice["finish_reason"],
    }


def _compare(index: int, want: ChatCompletion, got: dict[str, Any]) -> None:
    """Raises EngineError with the first difference."""
    for what, ours, theirs in (
        ("prompt", want.prompt_token_ids, got["prompt_token_ids"]),
        ("answer", want.token_ids, got["token_ids"]),
    ):
        if ours == theirs:
            continue
        place = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
        )
        raise EngineError(
            f"the export differs from the policy {want.policy} on held-out prompt {index}: token {place} of the {what} "
            f"is {_at(theirs, place)}, the policy has {_at(ours, place)}. The policy says "
            f"{_said(want.message)}, the export {_said(got['message'])}"
        )
    if want.finish_reason != got["finish_reason"] or _said(want.message) != _said(got["message"]):
        raise EngineError(
            f"the export reads the same tokens differently on held-out prompt {index}: {_said(got['message'])} "
            f"({got['finish_reason']}), the policy {_said(want.message)} ({want.finish_reason})"
        )


def _at(tokens: list[int], place: int) -> str:
    return str(tokens[place]) if place < len(tokens) else "missing"


def _said(message: dict[str, Any]) -> str:
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return json.dumps([message.get("content") or "", *calls], ensure_ascii=False)
