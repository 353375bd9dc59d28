"""Serving check: an export, served over HTTP, must answer held-out prompts exactly as the trained policy does.

Both answer greedily, one prompt at a time and in the same order, so that both compute the same batches. Prompts are
compared as tokens too, which reveals a tokenizer or chat template that was lost in the export.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from components.deployment.answers import answers_of
from components.errors import EngineError
from components.inference.protocol import BASE_POLICY, ChatCompletion, ChatRequest, Engine, Sampling
from components.trajectories.convert import to_openai
from components.trajectories.roles import tools_of
from components.trajectories.schema import Trajectory


def opening_requests(
    trajectories: Iterable[Trajectory], count: int, *, policy: str, max_tokens: int, role: str | None = None
) -> list[ChatRequest]:
    """Return greedy requests for the first answer of the first `count` scenarios; fewer if there are fewer. role: whose
    first answer; None: that of the first history."""
    sampling = Sampling(temperature=0.0, max_tokens=max_tokens)
    requests: dict[str, ChatRequest] = {}
    for trajectory in trajectories:
        if len(requests) == count:
            break
        own = [history for history in trajectory.histories if role in (None, history.agent)]
        if trajectory.group in requests or not own:
            continue
        messages = []
        for message in own[0].messages:
            if message.role == "assistant":
                break
            messages.append(to_openai(message))
        if messages:
            request = ChatRequest(messages, tools_of(trajectory, own[0]), policy, sampling)
            requests[trajectory.group] = request if role is None else replace(request, agent=role)
    return list(requests.values())


def check_serving(
    model_dir: Path,
    requests: Sequence[ChatRequest],
    answers: Sequence[ChatCompletion],
    *,
    serve: Callable[[Path], AbstractContextManager[Engine]],
) -> dict[str, float]:
    """Compare the answers of the export in `model_dir`, served by `serve`, with those of the policy.

    requests: greedy. answers: the policy's (`deployment.answers`). serve: context manager of an engine that asks a
    server of the folder's model over HTTP. Returns `prompts`, `tokens` and `max_logprob_difference` (nats). Raises
    EngineError at the first difference, if the server fails, and if there is nothing to compare.
    """
    if not requests:
        raise EngineError("no held-out prompt to compare the export on: the evaluation has no episode with messages")
    # The export is a separate model, which serves its weights as the base policy.
    with serve(model_dir) as engine:
        try:
            served_answers = answers_of(engine, [replace(request, policy=BASE_POLICY) for request in requests])
        except EngineError as error:
            raise EngineError(f"the served export rejected a held-out prompt: {error}") from None
    max_difference = 0.0
    for index, (expected, answer) in enumerate(zip(answers, served_answers, strict=True)):
        _compare(index, expected, answer)
        differences = (abs(a - b) for a, b in zip(expected.logprobs, answer.logprobs, strict=True))
        max_difference = max(max_difference, *differences)
    tokens = sum(len(answer.token_ids) for answer in answers)
    return {"prompts": len(requests), "tokens": tokens, "max_logprob_difference": max_difference}


def _compare(index: int, expected: ChatCompletion, answer: ChatCompletion) -> None:
    """Raise EngineError with the first difference."""
    for part, policy_tokens, exported_tokens in (
        ("prompt", expected.prompt_token_ids, answer.prompt_token_ids),
        ("answer", expected.token_ids, answer.token_ids),
    ):
        if policy_tokens == exported_tokens:
            continue
        position = next(
            (i for i, (a, b) in enumerate(zip(policy_tokens, exported_tokens, strict=False)) if a != b),
            min(len(policy_tokens), len(exported_tokens)),
        )
        raise EngineError(
            f"the export differs from the policy {expected.policy} on held-out prompt {index}: token {position} of the "
            f"{part} is {_at(exported_tokens, position)}, the policy has {_at(policy_tokens, position)}. The policy "
            f"answers {_text(expected.message)}, the export {_text(answer.message)}"
        )
    if expected.finish_reason != answer.finish_reason or _text(expected.message) != _text(answer.message):
        raise EngineError(
            f"the export parses the same tokens differently on held-out prompt {index}: {_text(answer.message)} "
            f"({answer.finish_reason}), the policy {_text(expected.message)} ({expected.finish_reason})"
        )


def _at(tokens: list[int], position: int) -> str:
    return str(tokens[position]) if position < len(tokens) else "missing"


def _text(message: dict[str, Any]) -> str:
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return json.dumps([message.get("content") or "", *calls], ensure_ascii=False)
