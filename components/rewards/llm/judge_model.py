"""Base classes of judge models: the configuration of a model that judges, and what is known of it.

Each is a module of `components.rewards.llm.models` with a file in `conf/judge_model`; `llm.spec` derives the rest.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from components.errors import Problem
from components.models.spec import FrozenModelSpec, ModelSpec
from components.rewards.llm.protocol import ModelClient
from components.rewards.llm.rate_limits import RateLimits
from components.rewards.protocol import RewardResources
from components.rewards.spec import JudgeSpec
from components.specs import Spec
from components.specs.marks import SERVER
from components.specs.served import PriceSpec, check_extra

NON_KEY_FIELDS = {
    "price", "requests_per_minute", "tokens_per_minute", "timeout", "retry_for", "wait_for", "url", "key_variable",
    "batch",
}  # fmt: skip
"""Fields that do not determine answers: address, timeouts, limits, price and batching."""


Structured = Literal["schema", "object", "none"]
FALLBACK_FORMAT: dict[Structured, Structured] = {"schema": "object", "object": "none"}
"""Next form of requesting JSON, if a server or an engine does not support one."""


class JudgeModelSpec(Spec):
    """Base class of judge models. A subclass that is a model has a `name`."""

    name: str
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of the judge; 0 is greedy."""
    max_tokens: int = Field(2048, ge=1)
    """Maximum tokens of one answer, including the judge's reasoning."""
    longest: int = Field(200_000, ge=1000)
    """Maximum characters of one prompt: about three to four for a token of the judge's context. A longer group is
    judged in parts."""

    structured: Structured = "schema"
    """Form in which JSON is requested: by its schema, as any JSON object, or in words alone. If a server or an engine
    does not support a form, the next one is used. A judge that has to reason before its answer needs `none`, unless its
    server separates the reasoning."""

    paid: ClassVar[bool] = False
    """True if answers may cost money."""
    asks_policy: ClassVar[bool] = False
    """True if the model is the policy whose episodes are judged."""

    @property
    @abstractmethod
    def label(self) -> str:
        """Name of the model, for display."""

    @property
    def frozen_model(self) -> FrozenModelSpec | None:
        """Model whose weights are loaded in the process of the stage, besides the policy's; None without one."""
        return None

    @property
    def local_model(self) -> ModelSpec | None:
        """`frozen_model`, once it is known of which run it is, as an engine loads it."""
        return None

    def with_model(self, change: Callable[[FrozenModelSpec], FrozenModelSpec]) -> JudgeModelSpec:
        """Return it with another model in place of one with weights of its own."""
        return self

    @abstractmethod
    def key_part(self) -> dict[str, Any]:
        """Return what determines the answers, for stage keys and the answer cache."""

    @abstractmethod
    def build(self, resources: RewardResources) -> ModelClient:
        """Return the client of the model. Raises ResourceError if an API key or the engine is missing."""

    def estimated_cost(self, read: int, written: int) -> float | None:
        """Return the cost of these numbers of prompt and completion tokens; None if the price is unknown."""
        return 0.0

    def rate_limits(self) -> RateLimits:
        """Return new rate limits of one client."""
        return RateLimits(None, None)

    def check_prerequisites(self, budget: float | None) -> None:
        """Raise ResourceError if something is missing without which no question can be answered: an API key, or with
        a budget the price. budget: limit on the cost of a stage's judges, in the currency of their prices."""

    def problems(self, settings: JudgeSpec, requests: int, unit: str) -> Iterator[Problem]:
        """Yield the problems of the model with the settings of the judge stage. requests: number of judgements of the
        largest stage. unit: what one of them judges, in the plural."""
        yield from ()


class PaidSpec(JudgeModelSpec):
    """Settings of a judge model behind a network."""

    paid: ClassVar[bool] = True

    price: PriceSpec | None = None
    """Price of the model; null is unknown, and never counts as free."""
    extra: Annotated[dict[str, Any], SERVER] = {}
    """Further parameters of each request, such as `reasoning_effort`. With null, a default parameter is removed:
    `extra: {max_tokens: null, max_completion_tokens: 2048}`, on the command line `+reward.model.extra.NAME=VALUE`. A
    secret is given by the name of its environment variable: `extra: {extra_headers: {Authorization: "env:NAME"}}`."""
    requests_per_minute: float | None = Field(None, gt=0)
    """Rate limit in requests per minute; null is no limit."""
    tokens_per_minute: float | None = Field(None, gt=0)
    """Rate limit in prompt and completion tokens per minute; null is no limit."""
    timeout: float = Field(120.0, gt=0)
    """Timeout of one answer, in seconds."""
    retry_for: float = Field(120.0, ge=0)
    """Seconds for which a failed request is retried, before its episodes are unscored."""
    wait_for: float = Field(0.0, ge=0)
    """Seconds to wait for a server that has not answered yet, such as one that is starting. With 0, a refused
    connection or an unknown host is an error at first contact."""

    @field_validator("extra")
    @classmethod
    def _no_secrets(cls, value: dict[str, Any]) -> dict[str, Any]:
        return check_extra(value, "reward.model")

    def key_part(self) -> dict[str, Any]:
        price = None if self.price is None else self.price.model_dump()
        return {**self.model_dump(mode="json", exclude=NON_KEY_FIELDS), "price": price}

    def estimated_cost(self, read: int, written: int) -> float | None:
        return None if self.price is None else self.price.of(read, written)

    def rate_limits(self) -> RateLimits:
        return RateLimits(self.requests_per_minute, self.tokens_per_minute)
