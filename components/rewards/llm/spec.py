"""Specs of judge models: model, timeouts, limits and price."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from components.errors import ResourceError
from components.models.spec import TeacherSpec
from components.redaction import dereference, is_secret, secret_variable
from components.specs import Spec, Target
from components.specs.served import VARIABLE, ModelEndpoint

NON_KEY_FIELDS = {
    "price", "requests_per_minute", "tokens_per_minute", "timeout", "retry_for", "url", "key_variable", "batch",
}  # fmt: skip
"""Fields that do not determine answers: address, timeouts, limits, price and batching."""
RESERVED_PARAMETERS = {"model", "messages", "stream", "n", "timeout", "num_retries", "max_retries"}
"""Request parameters that `extra` may not set."""


class PriceSpec(Spec):
    """Price in any currency, the same in the whole experiment."""

    input: float = Field(ge=0)
    """Price of a million prompt tokens."""
    output: float = Field(ge=0)
    """Price of a million completion tokens."""

    def of(self, read: int, written: int) -> float:
        """Return the cost of these numbers of prompt and completion tokens."""
        return (read * self.input + written * self.output) / 1_000_000


class JudgeModelSpec(Spec):
    """Settings of any judge model."""

    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of the judge; 0 is greedy."""
    max_tokens: int = Field(2048, ge=1)
    """Maximum tokens of one answer, including the judge's reasoning."""
    longest: int = Field(200_000, ge=1000)
    """Maximum characters of one prompt: about three to four for a token of the judge's context. A longer group is
    judged in parts."""

    @abstractmethod
    def key_part(self) -> dict[str, Any]:
        """Return what determines the answers, for stage keys and the answer cache."""


class PaidSpec(JudgeModelSpec):
    """Settings of a judge model behind a network."""

    price: PriceSpec | None = None
    """Price of the model; null is unknown, and never counts as free."""
    structured: Literal["schema", "object", "none"] = "schema"
    """Form in which JSON is requested: by its schema, as any JSON object, or in words alone. If a server rejects a
    form, the next one is used."""
    extra: dict[str, Any] = {}
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

    @field_validator("extra")
    @classmethod
    def _no_secrets(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if is_secret(name):
                raise ValueError(
                    f"no secrets such as {name}; name the environment variable instead: reward.model.key_variable"
                )
            if name in RESERVED_PARAMETERS:
                raise ValueError(f"parameters other than {name}, which is reserved")
        return value

    def key_part(self) -> dict[str, Any]:
        price = None if self.price is None else self.price.model_dump()
        return {**self.model_dump(mode="json", exclude=NON_KEY_FIELDS), "price": price}


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


ADDRESS = ("api_base", "base_url")
"""Parameters that set the address of a LiteLLM model."""


class LiteLLMJudge(PaidSpec):
    """Model of any provider that LiteLLM supports."""

    name: Literal["litellm"] = "litellm"
    model: str = Field(pattern=r"^[^/\s]+/\S+$")
    """Name in LiteLLM's form `PROVIDER/MODEL`: `anthropic/claude-sonnet-4-5`."""
    key_variable: str | None = Field(None, pattern=VARIABLE)
    """Environment variable that holds the provider's key; null uses LiteLLM's default variable."""

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


class EmbeddedJudge(JudgeModelSpec):
    """Model on this machine, in the process of the stage."""

    name: Literal["embedded"] = "embedded"
    model: TeacherSpec
    """Weights of the model."""
    context: int = Field(4096, ge=256)
    """Context length: maximum tokens of prompt and answer together."""

    def key_part(self) -> dict[str, Any]:
        return {**self.model_dump(mode="json", exclude={"model"}), "model": self.model.key_part()}


class PolicyJudge(JudgeModelSpec):
    """The policy whose episodes are judged, with the weights that generated them."""

    name: Literal["policy"] = "policy"

    def key_part(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


JudgeModel = Annotated[ServedJudge | LiteLLMJudge | EmbeddedJudge | PolicyJudge, Field(discriminator="name")]


def several(model: JudgeModel | list[JudgeModel]) -> list[JudgeModel]:
    """Return the models of an argument that takes one or a list."""
    return model if isinstance(model, list) else [model]


def asked_by(target: Any) -> list[JudgeModel]:
    """Return the models that a reward and its parts ask, found in the arguments of its target."""
    if isinstance(target, JudgeModelSpec):
        return [target]  # type: ignore[list-item]  # one of the four
    if isinstance(target, Target):
        return asked_by(target.arguments)
    if isinstance(target, Spec):
        target = {name: getattr(target, name) for name in type(target).model_fields}
    values = target.values() if isinstance(target, Mapping) else target if isinstance(target, list) else ()
    return [model for value in values for model in asked_by(value)]


def asks_policy(target: Target) -> bool:
    """Return True if a reward asks the policy whose episodes it judges."""
    return any(isinstance(model, PolicyJudge) for model in asked_by(target))


def labels(models: list[JudgeModel]) -> list[str]:
    """Return unique display names of several judges."""
    names: list[str] = []
    for model in models:
        name = (
            "policy"
            if isinstance(model, PolicyJudge)
            else model.model.name
            if isinstance(model, EmbeddedJudge)
            else model.model
        )
        label = re.sub(r"[^\w.-]+", "_", name.rpartition("/")[2]).strip("_") or "judge"
        duplicates = sum(existing == label or existing.startswith(f"{label}-") for existing in names)
        names.append(f"{label}-{duplicates + 1}" if duplicates else label)
    return names
