"""The remote engine: any server with OpenAI's chat completions API, optionally with token ids.

`components.retry` implements retries of failed requests.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from components.bounded_reply import LIMITS, limits_with_tokens
from components.errors import EngineError, Problem, ResourceError, StalePolicy
from components.inference.engine_spec import EngineSpec
from components.inference.protocol import (
    BASE_POLICY,
    ChatCompletion,
    ChatRequest,
    EngineHost,
    ModelEngine,
    ensure_usable,
)
from components.inference.remote_chat import body_of, message_of, usage_of
from components.json_client import fail_on_invalid_answer, ignore_body
from components.json_reply import Reply
from components.models.spec import ModelSpec
from components.specs.served import ModelEndpoint

logger = logging.getLogger(__name__)

MOST_IDS = 2**20
"""Maximum number of interned token ids: larger than any vocabulary."""


class RemoteSpec(ModelEndpoint, EngineSpec):
    """A server with OpenAI's chat completions API."""

    key_path: ClassVar[str] = "inference"

    name: Literal["remote"] = "remote"
    model: str = Field(min_length=1)
    """Served name of the model. Trained policies are loaded as adapters named `MODEL@VERSION`; the server must see the
    run folder under the same path."""
    tokens: bool = True
    """Token ids and log-probabilities in responses (`return_token_ids`), which Espalier's server and vLLM return.
    Training requires them. Without them, any such server can be evaluated."""
    timeout: float = Field(300.0, gt=0)
    """Time limit of one response in seconds."""
    retry_for: float = Field(120.0, ge=0)
    """Period in seconds in which a failed request is retried before the episode fails."""
    wait_for: float = Field(0.0, ge=0)
    """Seconds to wait for a server that has not answered yet, such as one that is starting. With 0, a refused
    connection or an unknown host is an error at first contact."""
    max_requests: int | None = Field(None, ge=1)
    """Maximum number of concurrent requests; further requests wait. None: as many as there are episodes."""

    @property
    def needs_model(self) -> bool:
        return False

    @property
    def returns_tokens(self) -> bool:
        return self.tokens

    def check_prerequisites(self) -> None:
        self.key()

    def lacks_tokens(self, use: str) -> Problem:
        return Problem("inference.tokens", f"false, but {use}; expected true")

    def build(self, model: ModelSpec, host: EngineHost) -> ModelEngine:
        return ensure_usable(RemoteEngine(self, model.chat_template_kwargs))

    def key_part(self) -> dict[str, Any]:
        # neither the address nor the time limits
        return {"inference": {"name": self.name, "model": self.model, "tokens": self.tokens}}


class RemoteEngine:
    """An engine with one policy at a time on a server, which batches concurrent requests.

    template_kwargs: values of variables of the server's chat template (`model.chat_template_kwargs`). fixed: further
    parameters of each request. Raises ResourceError if the environment variable of the API key is not set.
    """

    def __init__(
        self,
        spec: RemoteSpec,
        template_kwargs: Mapping[str, Any] | None = None,
        fixed: Mapping[str, Any] | None = None,
    ):
        self.spec = spec
        self._fixed = {**({"chat_template_kwargs": dict(template_kwargs)} if template_kwargs else {}), **(fixed or {})}
        self._policy = BASE_POLICY
        self._model = spec.model
        self._client = spec.client(spec.timeout, spec.retry_for, EngineError, spec.max_requests, spec.wait_for)

    @property
    def policy(self) -> str:
        return self._policy

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        """Return the response to a request. Raises StalePolicy, ContextOverflow, EngineError, and ResourceError for
        errors that affect every request."""
        if request.policy != self._policy:
            raise StalePolicy(f"asked for policy {request.policy}, but the engine holds {self._policy}")
        body = body_of(request, self._model) | self._fixed
        if self.spec.tokens:
            body |= {"logprobs": True, "return_token_ids": True}

        def read(completion: dict[str, Any]) -> ChatCompletion:
            return replace(_completion(completion, request.policy, self.spec), altered=request.altered)

        limits = LIMITS
        if self.spec.tokens:  # a prompt has at most a token for each byte that was sent
            prompt = len(json.dumps([body["messages"], body.get("tools")]).encode())
            limits = limits_with_tokens(request.sampling.max_tokens, prompt=prompt)
        return await self._client.complete(body, read, _stale, limits)

    def load_policy(self, version: str, folder: str | None) -> None:
        """Load an adapter on the server and unload the previous one. Raises ResourceError if the server rejects it,
        EngineError if the server fails."""
        if version == self._policy:
            return
        before, self._model = self._model, self.spec.model
        self._policy = BASE_POLICY
        if folder is not None:
            name = f"{self.spec.model}@{version}"
            body = {"lora_name": name, "lora_path": os.path.abspath(folder), "load_inplace": True}
            self._client.now("POST", "/load_lora_adapter", body, ignore_body, self._not_loaded)
            self._model = name
        if before not in (self.spec.model, self._model):
            try:
                body = {"lora_name": before}
                self._client.now("POST", "/unload_lora_adapter", body, ignore_body, self._not_loaded)
            except (EngineError, ResourceError) as error:
                logger.info("%s keeps %s: %s", self.spec.url, before, error)
        self._policy = version

    def models(self) -> list[str]:
        """Return the names of the server's models. Raises ResourceError if the server is unreachable for the retry
        period."""

        try:
            return [model["id"] for model in self._client.models("/models")]
        except EngineError as error:
            raise ResourceError(f"inference.url: {self.spec.url} is no server that can be used: {error}") from None

    def check(self) -> None:
        """Raise ResourceError if the server is unreachable for the retry period, or does not have the model."""
        names = self.models()
        if self.spec.model not in names:
            raise ResourceError(
                f"inference.model: {self.spec.url} does not have {self.spec.model!r}; it has {', '.join(names[:10])}"
            )

    def release(self) -> None:
        """Do nothing: this process has no resources to release."""

    def close(self) -> None:
        self._client.close()

    def _not_loaded(self, reply: Reply, text: str) -> Exception | None:
        if reply.status not in (400, 403, 404, 405, 501):
            return None
        return ResourceError(
            f"{self.spec.url} does not load the adapter ({text}); Espalier's server does with --adapters DIR, where "
            "DIR is a folder above the run's"
        )


def _stale(reply: Reply, text: str) -> Exception | None:
    return StalePolicy(text) if reply.error()[0] == "stale_policy" else None


def _completion(body: dict[str, Any], policy: str, spec: RemoteSpec) -> ChatCompletion:
    """Return the parsed `chat.completion` object. Raises FailedAttempt for an invalid or empty response, StalePolicy
    for a response of another policy, ResourceError for a response without the requested token ids."""
    with fail_on_invalid_answer():
        answered = str(body.get("model", ""))
        choice = body["choices"][0]
        message, reason = message_of(choice)
        prompt, sampled, logprobs = _tokens(body, choice, spec) if spec.tokens else ([], [], [])
        usage = None if spec.tokens else usage_of(body, lambda *_: None)
    name, at, version = answered.partition("@")
    if at and name == spec.model and version != policy:
        raise StalePolicy(f"asked for policy {policy}, and {answered} answered")
    return ChatCompletion(message, reason, prompt, sampled, logprobs, policy, usage)


def _tokens(body: dict[str, Any], choice: dict[str, Any], spec: RemoteSpec) -> tuple[list[int], list[int], list[float]]:
    """Return prompt tokens, sampled tokens and log-probabilities."""
    prompt, sampled = body.get("prompt_token_ids"), choice.get("token_ids")
    if prompt is None or sampled is None or not choice.get("logprobs"):
        raise ResourceError(
            f"{spec.url} answers without token ids and log-probabilities, and training needs them: use a server that "
            "supports `return_token_ids`, or only evaluate, with inference.tokens=false"
        )
    logprobs = [float(entry["logprob"]) for entry in choice["logprobs"]["content"]]
    if len(logprobs) != len(sampled) or not math.isfinite(sum(logprobs)):
        raise ValueError(f"{len(sampled)} tokens and {len(logprobs)} log-probabilities, not all of them finite")
    return list(map(_ids.__getitem__, prompt)), list(map(_ids.__getitem__, sampled)), logprobs


class _Ids(dict[int, int]):
    """Interned token ids: one object per id, shared by all episodes. A thousand tokens of an episode take 8 kB instead
    of 36 kB."""

    def __missing__(self, token_id: Any) -> int:
        if not isinstance(token_id, int) or token_id < 0:
            raise ValueError(f"the token id {token_id!r:.50}")
        if len(self) < MOST_IDS:
            self[token_id] = int(token_id)
        return int(token_id)


_ids = _Ids()
