"""What every engine speaks: OpenAI chat completions that also return token ids and log-probabilities.

Messages and tools are OpenAI's JSON. An engine says with each answer which tokens it saw and which it sampled, so a
recorder can keep the exact stream. The model under training is addressed by version: a request for a version that
the engine does not hold fails with `StalePolicy`, never with an answer from another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

BASE_POLICY = "base"
"""Version of the policy before any training: the model as it was loaded."""
MAIN = "main"
"""The agent that gives itself no name."""


@dataclass(slots=True, frozen=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    max_tokens: int = 128
    """Most tokens of one answer."""
    min_p: float = 0.0
    """Smallest probability, as a share of the likeliest token's."""

    @property
    def cuts(self) -> dict[str, float]:
        """Those of top_p, top_k and min_p that cut anything, as requests name them."""
        cuts = {"top_p": self.top_p < 1, "top_k": self.top_k > 0, "min_p": self.min_p > 0}
        return {name: getattr(self, name) for name, cut in cuts.items() if cut}


@dataclass(slots=True, frozen=True)
class ChatRequest:
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    policy: str = BASE_POLICY
    sampling: Sampling = Sampling()
    seed: int = 0
    """The same request with the same seed gives the same answer."""
    agent: str = MAIN
    """Who asks, where several agents play one episode. The answer does not depend on it."""
    episode: str = ""
    """In which, where messages come from somewhere else and are not the very objects that were said: of answers that
    read the same, its own are continued."""


@dataclass(slots=True, frozen=True)
class ChatCompletion:
    message: dict[str, Any]
    """OpenAI assistant message: role, content, tool_calls."""
    finish_reason: str
    """`stop`, `tool_calls` or `length`."""
    prompt_token_ids: list[int]
    token_ids: list[int]
    """Sampled tokens, end-of-turn token included."""
    logprobs: list[float]
    """One for each sampled token, under the distribution it was drawn from; 0.0 for greedy choices is not used:
    greedy answers carry the log-probability at temperature 1."""
    policy: str
    """Version that answered."""


class Engine(Protocol):
    """Generates text with one policy at a time."""

    @property
    def policy(self) -> str:
        """Version held now."""
        ...

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        """Answers one request; concurrent calls are batched. Raises EngineError and its kin."""
        ...

    def load_policy(self, version: str, folder: str | None) -> None:
        """Holds `version` from now on: what was learned in `folder` (`components.models.trained_weights`), or the base
        model where it is None."""
        ...

    def close(self) -> None: ...


async def all_answers(
    chat: Callable[[ChatRequest], Awaitable[ChatCompletion]], requests: Sequence[ChatRequest]
) -> list[ChatCompletion]:
    """The answers to several requests at once; where one fails, the others are given up."""
    tasks = [asyncio.ensure_future(chat(request)) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
