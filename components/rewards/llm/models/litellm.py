"""Judge model of any provider that LiteLLM supports, at the price that LiteLLM lists or the configuration gives.

Retries and their delays are the same as for a judge behind a URL.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from components.errors import JudgeError, ResourceError
from components.litellm_client import ADDRESS, PROVIDER_MODEL, LiteLLMClient, LiteLLMModel, listed
from components.retry import ClientTimeouts
from components.rewards.llm.judge_model import PaidSpec
from components.rewards.llm.models.served import ChatJudge
from components.rewards.protocol import RewardResources
from components.specs.marks import ENV_VARIABLE, SERVER
from components.specs.served import VARIABLE


class LiteLLMJudge(PaidSpec):
    """Model of any provider that LiteLLM supports."""

    name: Literal["litellm"] = "litellm"
    model: Annotated[str, SERVER] = Field(pattern=PROVIDER_MODEL)
    """Name in LiteLLM's form `PROVIDER/MODEL`: `anthropic/claude-sonnet-4-5`."""
    key_variable: Annotated[str | None, ENV_VARIABLE] = Field(None, pattern=VARIABLE)
    """Environment variable that holds the provider's key; null uses LiteLLM's default variable."""

    @property
    def label(self) -> str:
        return self.model

    def build(self, resources: RewardResources) -> ChatJudge:
        patience = ClientTimeouts(self.timeout, self.retry_for, "reward.model", self.wait_for)
        return ChatJudge(self, self.model, LiteLLMClient(self.remote_model(), patience, JudgeError))

    def check_prerequisites(self, budget: float | None) -> None:
        self.key()
        if budget is not None and self.price is None and not listed(self.model):
            raise ResourceError(
                f"judge.budget={budget:g} cannot be enforced: LiteLLM has no price for {self.model}; expected its "
                "price per million tokens, reward.model.price={input: 2.0, output: 8.0}, or judge.budget=null"
            )

    def estimated_cost(self, read: int, written: int) -> float | None:
        if self.price is None and listed(self.model):
            return self.remote_model().listed_price(read, written)
        return super().estimated_cost(read, written)

    def key_part(self) -> dict[str, Any]:
        part = super().key_part()
        return {**part, "extra": {name: value for name, value in self.extra.items() if name not in ADDRESS}}

    def key(self) -> str | None:
        """Return the key; None leaves it to LiteLLM. Raises ResourceError if it is not in the environment."""
        return self.remote_model().key()

    def remote_model(self) -> LiteLLMModel:
        """Return the model as LiteLLM calls it."""
        own_server = "judge_model@reward.model=served"
        return LiteLLMModel(self.model, "reward.model", own_server, self.key_variable, self.extra)
