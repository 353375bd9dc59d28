"""Which model is asked for a judgement, how long it is waited for, and what it costs."""

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
from components.specs.served import VARIABLE, Served

NON_KEY_FIELDS = {
    "price", "requests_per_minute", "tokens_per_minute", "timeout", "retry_for", "url", "key_variable", "batch",
}  # fmt: skip
"""Fields that do not determine answers: where a model is, how patiently and in what pieces it is asked."""
RESERVED_PARAMETERS = {"model", "messages", "stream", "n", "timeout", "num_retries", "max_retries"}
"""Parameters of a request that `extra` may not set."""


class PriceSpec(Spec):
    """In any currency, the same in the whole experiment."""

    input: float = Field(ge=0)
    """Of a million tokens that the judge reads."""
    output: float = Field(ge=0)
    """Of a million tokens that it writes."""

    def of(self, read: int, written: int) -> float:
        """Of so many tokens."""
        return (read * self.input + written * self.output) / 1_000_000


class AskedSpec(Spec):
    """How any model is asked."""

    temperature: float = Field(0.0, ge=0)
    """Of the judge; 0 is greedy."""
    max_tokens: int = Field(2048, ge=1)
    """Most tokens of one answer. What a judge thinks before it answers is among them."""
    longest: int = Field(200_000, ge=1000)
    """Most characters of what is shown to it at once: about three to four for a token of its context. A group that is
    longer is judged in parts."""

    @abstractmethod
    def key_part(self) -> dict[str, Any]:
        """What determines answers, for stage keys and for answers that are kept."""


class PaidSpec(AskedSpec):
    """How a model is asked that answers through a network."""

    price: PriceSpec | None = None
    """What it costs; null is not known, and is never counted as nothing."""
    structured: Literal["schema", "object", "none"] = "schema"
    """How it is asked for JSON: by its schema, as any JSON, or in words alone. A server that refuses one is asked in
    the next way."""
    extra: dict[str, Any] = {}
    """Further parameters of each request, such as `reasoning_effort`. One that is null is left out of it:
    `extra: {max_tokens: null, max_completion_tokens: 2048}`, on the command line `+reward.model.extra.NAME=VALUE`. A
    secret among them is named: `extra: {extra_headers: {Authorization: "env:NAME"}}` sends the value of that
    environment variable."""
    requests_per_minute: float | None = Field(None, gt=0)
    """Most requests that are begun in a minute; null is no limit."""
    tokens_per_minute: float | None = Field(None, gt=0)
    """Most tokens, read and written, of the requests of a minute; null is no limit."""
    timeout: float = Field(120.0, gt=0)
    """Seconds that one answer may take."""
    retry_for: float = Field(120.0, ge=0)
    """Seconds for which a request that failed is sent again, before those that it was to judge are unscored."""

    @field_validator("extra")
    @classmethod
    def _no_secrets(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if is_secret(name):
                raise ValueError(f"no keys or tokens, and {name} is one: name its variable, reward.model.key_variable")
            if name in RESERVED_PARAMETERS:
                raise ValueError(f"parameters that are not ours to set, and {name} is")
        return value

    def key_part(self) -> dict[str, Any]:
        price = None if self.price is None else self.price.model_dump()
        return {**self.model_dump(mode="json", exclude=NON_KEY_FIELDS), "price": price}


class ServedJudge(Served, PaidSpec):
    """A server that speaks OpenAI's chat completions."""

    key_path: ClassVar[str] = "reward.model"

    name: Literal["served"] = "served"
    batch: bool = False
    """Asks through OpenAI's Batch API: questions that come together are sent as one file, and answered within a day, in
    most cases sooner, at half the price. How many groups come together says `judge.concurrency`. Corrections, and what
    a batch has not answered, are asked one by one."""

    def key(self) -> str:
        """The server's key. Raises ResourceError where its variable, or one that `extra` names, is not set."""
        dereference(self.extra, "reward.model.extra")
        return super().key()


ADDRESS = ("api_base", "base_url")
"""Parameters that tell LiteLLM where a model is."""


class LiteLLMJudge(PaidSpec):
    """A model of any provider that LiteLLM knows."""

    name: Literal["litellm"] = "litellm"
    model: str = Field(pattern=r"^[^/\s]+/\S+$")
    """`PROVIDER/MODEL`, as LiteLLM names it: `anthropic/claude-sonnet-4-5`."""
    key_variable: str | None = Field(None, pattern=VARIABLE)
    """Environment variable that holds the provider's key; null takes the one that LiteLLM looks for."""

    def key_part(self) -> dict[str, Any]:
        part = super().key_part()
        return {**part, "extra": {name: value for name, value in self.extra.items() if name not in ADDRESS}}

    def key(self) -> str | None:
        """The key; None leaves it to LiteLLM. Raises ResourceError where it, or a variable that `extra` names, is not
        in the environment."""
        dereference(self.extra, "reward.model.extra")
        if self.key_variable is not None:
            found = secret_variable(self.key_variable)
            if not found:
                raise ResourceError(
                    f"reward.model.key_variable: the environment variable {self.key_variable} is not set; set it to "
                    f"the key for {self.model}"
                )
            return found
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


class EmbeddedJudge(AskedSpec):
    """A model on this machine, in the process of the stage."""

    name: Literal["embedded"] = "embedded"
    model: TeacherSpec
    """Its weights."""
    context: int = Field(4096, ge=256)
    """Most tokens that it reads and writes at once."""

    def key_part(self) -> dict[str, Any]:
        return {**self.model_dump(mode="json", exclude={"model"}), "model": self.model.key_part()}


class PolicyJudge(AskedSpec):
    """The policy whose episodes are judged, as it was when it played them."""

    name: Literal["policy"] = "policy"

    def key_part(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


JudgeModel = Annotated[ServedJudge | LiteLLMJudge | EmbeddedJudge | PolicyJudge, Field(discriminator="name")]


def several(model: JudgeModel | list[JudgeModel]) -> list[JudgeModel]:
    """The models of an argument that takes one or a list."""
    return model if isinstance(model, list) else [model]


def asked_by(target: Any) -> list[JudgeModel]:
    """The models that a reward asks, and those of which it is made: found in the arguments of its target."""
    if isinstance(target, AskedSpec):
        return [target]  # type: ignore[list-item]  # one of the four
    if isinstance(target, Target):
        return asked_by(target.arguments)
    if isinstance(target, Spec):
        target = {name: getattr(target, name) for name in type(target).model_fields}
    inside = target.values() if isinstance(target, Mapping) else target if isinstance(target, list) else ()
    return [model for one in inside for model in asked_by(one)]


def asks_policy(target: Target) -> bool:
    """Whether a reward asks the policy whose episodes it judges."""
    return any(isinstance(one, PolicyJudge) for one in asked_by(target))


def labels(models: list[JudgeModel]) -> list[str]:
    """Names under which several judges show, none twice."""
    found: list[str] = []
    for one in models:
        name = (
            "policy"
            if isinstance(one, PolicyJudge)
            else one.model.name
            if isinstance(one, EmbeddedJudge)
            else one.model
        )
        label = re.sub(r"[^\w.-]+", "_", name.rpartition("/")[2]).strip("_") or "judge"
        taken = sum(other == label or other.startswith(f"{label}-") for other in found)
        found.append(f"{label}-{taken + 1}" if taken else label)
    return found
