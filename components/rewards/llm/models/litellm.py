"""Judge model of any provider that LiteLLM supports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from components.errors import ResourceError
from components.redaction import dereference, secret_variable
from components.rewards.llm.judge_model import PaidSpec
from components.specs.served import VARIABLE

if TYPE_CHECKING:
    from components.rewards.llm.protocol import ModelClient
    from components.rewards.protocol import Means

ADDRESS = ("api_base", "base_url")
"""Parameters that set the address of a LiteLLM model."""


class LiteLLMJudge(PaidSpec):
    """Model of any provider that LiteLLM supports."""

    name: Literal["litellm"] = "litellm"
    model: str = Field(pattern=r"^[^/\s]+/\S+$")
    """Name in LiteLLM's form `PROVIDER/MODEL`: `anthropic/claude-sonnet-4-5`."""
    key_variable: str | None = Field(None, pattern=VARIABLE)
    """Environment variable that holds the provider's key; null uses LiteLLM's default variable."""

    @property
    def label(self) -> str:
        return self.model

    def build(self, means: Means) -> ModelClient:
        from components.rewards.llm.providers import LiteLLMClient

        return LiteLLMClient(self)

    def require(self, budget: float | None) -> None:
        from components.rewards.llm.litellm_import import listed

        self.key()
        if budget is not None and self.price is None and not listed(self.model):
            raise ResourceError(
                f"judge.budget={budget:g} cannot be enforced: LiteLLM has no price for {self.model}; expected its "
                "price per million tokens, reward.model.price={input: 2.0, output: 8.0}, or judge.budget=null"
            )

    def key_part(self) -> dict[str, Any]:
        part = super().key_part()
        return {**part, "extra": {name: value for name, value in self.extra.items() if name not in ADDRESS}}

    def key(self) -> str | None:
        """Return the key; None leaves it to LiteLLM. Raises ResourceError if the key, or a variable that `extra` names,
        is not in the environment."""
        dereference(self.extra, "reward.model.extra")
        if self.key_variable is not None:
            key = secret_variable(self.key_variable)
            if not key:
                raise ResourceError(
                    f"reward.model.key_variable: the environment variable {self.key_variable} is not set; set it to "
                    f"the key for {self.model}"
                )
            return key
        from components.rewards.llm.litellm_import import litellm

        try:
            litellm().get_llm_provider(self.model)
        except litellm().BadRequestError:
            provider = self.model.partition("/")[0]
            raise ResourceError(
                f"reward.model.model={self.model}: LiteLLM knows no provider {provider}; expected one as in "
                "anthropic/claude-sonnet-4-5. A server of your own: judge_model@reward.model=served"
            ) from None
        address = next((self.extra[name] for name in ADDRESS if self.extra.get(name)), None)
        missing = litellm().validate_environment(self.model, api_base=address)["missing_keys"]
        if missing:
            raise ResourceError(
                f"reward.model.model={self.model}: the environment lacks {', '.join(missing)}; set it, or name the "
                "variable that holds the key: reward.model.key_variable=NAME"
            )
        return None
