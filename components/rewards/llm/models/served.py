"""Judge model behind an OpenAI-compatible URL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from components.errors import Problem
from components.redaction import dereference
from components.rewards.llm.judge_model import PaidSpec
from components.rewards.spec import JudgeSpec
from components.specs.served import ModelEndpoint

if TYPE_CHECKING:
    from components.rewards.llm.protocol import ModelClient
    from components.rewards.protocol import Means


class ServedJudge(ModelEndpoint, PaidSpec):
    """Server with an OpenAI-compatible chat completions API."""

    key_path: ClassVar[str] = "reward.model"

    name: Literal["served"] = "served"
    batch: bool = False
    """Use OpenAI's Batch API: questions that come together are uploaded as one file, and answered within a day, usually
    sooner, at half the price. `judge.concurrency` sets how many groups come together. Corrections, and questions that a
    batch left unanswered, are sent one by one."""

    def key(self) -> str:
        """Return the server's key. Raises ResourceError if its variable, or one that `extra` names, is not set."""
        dereference(self.extra, "reward.model.extra")
        return super().key()

    @property
    def label(self) -> str:
        return self.model

    def build(self, means: Means) -> ModelClient:
        from components.rewards.llm.openai_endpoint import OpenAIClient

        return OpenAIClient(self, means.answers, means.waiting)

    def require(self, budget: float | None) -> None:
        self.key()

    def problems(self, settings: JudgeSpec, requests: int, unit: str) -> Iterator[Problem]:
        if self.price is None and settings.budget is not None:
            yield Problem(
                "judge.budget",
                f"{settings.budget:g} cannot be enforced: the price of {self.model} is not set; expected its price per "
                "million tokens, reward.model.price={input: 2.0, output: 8.0}, or judge.budget=null",
            )
        if not self.batch:
            return
        if settings.concurrency < requests:
            yield Problem(
                "judge.concurrency",
                f"{settings.concurrency}: limits a batch to this many {unit}, and a batch may take a day; expected at "
                f"least {requests}, so that a stage sends one batch",
            )
        limits = {"requests_per_minute": self.requests_per_minute, "tokens_per_minute": self.tokens_per_minute}
        for name, limit in limits.items():
            if limit is not None:
                yield Problem(
                    f"reward.model.{name}",
                    f"{limit:g}: does not apply to batches (reward.model.batch=true); expected null, or batch=false",
                )
