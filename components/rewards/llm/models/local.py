"""Judge models on this machine: a model with weights of its own, and the policy whose episodes are judged.

The engine holds an answer to its schema, or to the next form that it supports (`reward.model.structured`). The schema
bounds each text and number, so that a small model that repeats itself still ends its answer within `max_tokens`.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from components.errors import ContextOverflow, EngineBusy, EngineError, JudgeError, ResourceError, SpecError
from components.inference.protocol import ChatRequest, Sampling
from components.models.spec import FrozenModelSpec, ModelSpec
from components.rewards.llm.judge_model import FALLBACK_FORMAT, JudgeModelSpec, Structured
from components.rewards.llm.protocol import JudgeAnswer, Messages
from components.rewards.protocol import RewardResources

log = logging.getLogger(__name__)

ANY_OBJECT = {"type": "object"}
ROW_TOKENS = 24
"""Tokens of an answer for each of its texts besides the text: names, numbers and punctuation."""
LEAST_CHARACTERS = 40
"""Minimum length to which a text is bounded."""

STEPS = 100
"""Number of steps of a scale."""


class EmbeddedJudge(JudgeModelSpec):
    """Model on this machine, in the process of the stage."""

    name: Literal["embedded"] = "embedded"

    model: FrozenModelSpec
    """Weights of the model."""
    context: int = Field(4096, ge=256)
    """Context length: maximum tokens of prompt and answer together."""

    @property
    def label(self) -> str:
        return self.model.name

    @property
    def frozen_model(self) -> FrozenModelSpec:
        return self.model

    @property
    def local_model(self) -> ModelSpec:
        return self.model.model(self.context)

    def build(self, resources: RewardResources) -> LocalModelClient:
        return LocalModelClient(self, resources, self.model.model(self.context), self.model.adapter_dir())

    def with_model(self, change: Callable[[FrozenModelSpec], FrozenModelSpec]) -> EmbeddedJudge:
        return self.model_copy(update={"model": change(self.model)})

    def key_part(self) -> dict[str, Any]:
        return {**self.model_dump(mode="json", exclude={"model"}), "model": self.model.key_part()}


class PolicyJudge(JudgeModelSpec):
    """The policy whose episodes are judged, with the weights that generated them."""

    name: Literal["policy"] = "policy"

    asks_policy: ClassVar[bool] = True

    @property
    def label(self) -> str:
        return "policy"

    def build(self, resources: RewardResources) -> LocalModelClient:
        return LocalModelClient(self, resources)

    def key_part(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


class LocalModelClient:
    """Client of an engine on this machine, without cost. model: the model that judges, with the PEFT folder `adapter`;
    None is the policy whose episodes are judged. Raises ResourceError if there is no engine."""

    priced = True

    def __init__(
        self,
        spec: JudgeModelSpec,
        resources: RewardResources,
        model: ModelSpec | None = None,
        adapter: Path | None = None,
    ):
        if resources.engine is None:
            raise ResourceError("a judge on this machine needs an engine; expected RewardResources(engine=...)")
        self._spec = spec
        self._structured: Structured = spec.structured
        self.label = "the policy itself" if model is None else spec.label
        self._engine = resources.engine(model, adapter)
        self.version = self._engine.policy if model is None else ""

    def price(self, read: int, written: int) -> float:
        return 0.0

    async def call(
        self, messages: Messages, schema: dict[str, Any] | None, question_digest: str, immediate: bool
    ) -> JudgeAnswer:
        sampling = Sampling(temperature=self._spec.temperature, max_tokens=self._spec.max_tokens)
        request = ChatRequest([dict(message) for message in messages], policy=self._engine.policy, sampling=sampling)
        demanded_form: Structured = self._structured if schema is not None else "none"
        if schema is not None and demanded_form != "none":
            demanded = bounded(schema, self._spec.max_tokens) if demanded_form == "schema" else ANY_OBJECT
            request = replace(request, form=replace(request.form, json_schema=json.dumps(demanded), calls=()))
        try:
            response = await self._engine.chat(request)
        except SpecError as error:
            if not request.form.constrained:
                raise
            self._fall_back(demanded_form, error)
            return await self.call(messages, schema, question_digest, immediate)
        except ContextOverflow as error:
            hint = f"show the judge less: reward.model.longest={self._spec.longest}"
            raise JudgeError(f"{self.label}: {error}; {hint}") from error
        except EngineBusy as error:  # each group has a schema of its own, and they are compiled two at a time
            log.info("%s is asked again: %s", self.label, error)
            return await self.call(messages, schema, question_digest, immediate)
        except EngineError as error:
            raise JudgeError(f"{self.label}: {error}") from error
        return JudgeAnswer(
            text=str(response.message.get("content") or ""),
            prompt_tokens=len(response.prompt_token_ids),
            completion_tokens=len(response.token_ids),
            cut_off=response.finish_reason == "length",
        )

    def _fall_back(self, structured: Structured, error: SpecError) -> None:
        """Use the next form, unless a concurrent call has done so."""
        if self._structured == structured:
            self._structured = FALLBACK_FORMAT[structured]
            log.warning(
                "%s does not support reward.model.structured=%s; %s is used: %s",
                *(self.label, structured, self._structured, error),
            )

    def close(self) -> None:
        self._engine.release()


def bounded(schema: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    """Return an answer's schema with a maximum length of its free texts, and steps of its numbers, by which the answer
    fits into the tokens."""
    copied: dict[str, Any] = json.loads(json.dumps(schema))
    fields = list(_fields(copied))
    texts = [field for field in fields if field["type"] == "string" and "enum" not in field]
    longest = max(max_tokens // max(len(texts), 1) - ROW_TOKENS, LEAST_CHARACTERS)  # a character takes a token at most
    for field in texts:
        field["maxLength"] = longest
    for field in fields:
        if field["type"] == "number":  # otherwise it may have any number of digits
            low, high = field["minimum"], field["maximum"]
            values = {round(low + (high - low) * step / STEPS, 6) for step in range(STEPS + 1)}
            if high - low <= STEPS:  # the whole numbers of a scale from 1 to 10 are no steps of it
                values |= set(range(math.ceil(low), math.floor(high) + 1))
            field |= {"enum": [int(value) if value == int(value) else value for value in sorted(values)]}
    return copied


def _fields(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the schemas of all values that are no objects."""
    if schema["type"] != "object":
        yield schema
    for inner in schema.get("properties", {}).values():
        yield from _fields(inner)
