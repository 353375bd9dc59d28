"""Client of one vLLM server: sampling from token ids, adapters, sleep mode."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from components.bounded_reply import limits_with_tokens
from components.errors import ContextOverflow, EngineError, ResourceError, StalePolicy
from components.inference.vllm.stream import Increments, Sampled, StreamedCompletion, completion_tokens
from components.json_client import Client, RefusalCheck
from components.json_reply import FailedAttempt, Reply
from components.json_text import read_json


class UnknownAdapter(Exception):
    """The server does not have the adapter, because it was restarted."""


class GrammarRefused(Exception):
    """The server does not accept the grammar of a request."""


class VllmClient(Client):
    """Client of one vLLM server. Methods raise the exceptions of `Client.post`, and ResourceError for a server that
    lacks a feature."""

    async def sample(self, body: dict[str, Any], policy: str, increments: Increments | None = None) -> Sampled:
        """Return the tokens and log-probabilities of a completion. Raises UnknownAdapter, GrammarRefused,
        ContextOverflow and StalePolicy. policy: version, for messages. increments: receives the tokens as they are
        sampled."""

        def read(reply: Reply) -> Sampled:
            return _sampled_tokens(reply.json(), body, policy)

        limits = limits_with_tokens(body["max_tokens"], body.get("logprobs") or 0, prompt=len(body["prompt"]))
        if increments is None:
            return await self.post("/v1/completions", body, read, _refused, limits=limits)
        stream = StreamedCompletion(increments, body, policy)
        return await self.post("/v1/completions", {**body, "stream": True}, read, _refused, stream, limits)

    async def probe(self, body: dict[str, Any]) -> Sampled:
        """Return the same for a request of the base model whose grammar the server may be unable to enforce. Raises
        GrammarRefused for each failure of such a request, without a retry."""

        def refused(reply: Reply, text: str) -> Exception | None:
            return GrammarRefused(text) if reply.status in (400, 500) else _refused(reply, text)

        return await self.post(
            "/v1/completions", body, lambda reply: _sampled_tokens(reply.json(), body, body["model"]), refused
        )

    def sample_now(self, body: dict[str, Any], policy: str) -> Sampled:
        """Return the same for the base model, and block the calling thread."""
        return self.now("POST", "/v1/completions", body, lambda reply: _sampled_tokens(reply.json(), body, policy))

    def tokenize(self, model: str, text: str) -> list[int]:
        """Return the token ids of a text."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        return self.now("POST", "/tokenize", body, lambda reply: list(reply.json().get("tokens") or []))

    def load_adapter(self, name: str, folder: str) -> None:
        """Load an adapter if the server does not list it with this folder, and verify it in the list."""
        if (listed := self.adapter_folder(name)) != folder:
            # In place only if another folder has the name.
            body = {"lora_name": name, "lora_path": folder, "load_inplace": listed is not None}
            self.now("POST", "/v1/load_lora_adapter", body, _nothing, _not_loaded(name, folder))
        if (listed := self.adapter_folder(name)) != folder:
            raise StalePolicy(f"{self.url} was given {name} from {folder}, and lists it from {listed}")

    def sleep(self) -> None:
        """Put the server to sleep until `wake`."""
        self.now("POST", "/sleep?level=1", {}, _nothing, _no_sleep)

    def wake(self) -> None:
        """Wake the server if it sleeps."""
        if self.now("GET", "/is_sleeping", None, lambda reply: reply.json()["is_sleeping"], _no_sleep):
            self.now("POST", "/wake_up", {}, _nothing, _no_sleep)

    def adapter_folder(self, name: str) -> str | None:
        """Return the folder of an adapter according to the server's list; None if it is not loaded."""
        return next((model.get("root") for model in self.models() if model.get("id") == name), None)

    def models(self) -> list[dict[str, Any]]:
        """Return the server's models and adapters."""

        def read(reply: Reply) -> list[dict[str, Any]]:
            try:
                return [{**model, "id": str(model["id"])} for model in reply.json()["data"]]
            except (KeyError, TypeError):
                raise EngineError("its list of models is invalid") from None

        return self.now("GET", "/v1/models", None, read)


def _sampled_tokens(answer: dict[str, Any], body: dict[str, Any], policy: str) -> Sampled:
    """Return sampled tokens and log-probabilities of a response. Raises FailedAttempt for an invalid response, and
    StalePolicy and ResourceError as `completion_tokens`."""
    sampled = completion_tokens(answer, body, policy)
    if not sampled.tokens or not math.isfinite(sum(sampled.logprobs)):
        raise FailedAttempt(f"{len(sampled.tokens)} tokens, not all of them with a finite log-probability", empty=True)
    return sampled


def _refused(reply: Reply, text: str) -> Exception | None:
    if reply.status == 404 and "does not exist" in text:
        return UnknownAdapter()
    if reply.status == 404:
        return ResourceError(f"a server has no /v1/completions ({text}); expected vLLM")
    if reply.status == 400 and "maximum" in text and "length" in text:
        return ContextOverflow(text)
    if reply.status == 400 and "rammar" in text:
        return GrammarRefused(text)
    return None


def _not_loaded(name: str, folder: str) -> RefusalCheck:
    def refused(reply: Reply, text: str) -> Exception | None:
        if "max_lora_rank" in text:
            rank = read_json(Path(folder) / "adapter_config.json").get("r")
            return ResourceError(
                f"the adapter {folder} has rank {rank}, more than the server takes ({text}); start it with "
                f"--max-lora-rank {rank} (for a server that the run starts: inference.max_lora_rank={rank}), or "
                "train one of a smaller rank (model.lora.rank)"
            )
        if reply.status in (404, 405) and "lora" not in text.lower():
            return ResourceError(
                f"the server loads no adapters ({text}); start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and "
                "--enable-lora"
            )
        if reply.status in (400, 403, 404, 500):
            return ResourceError(
                f"the server does not load {name} from {folder}, which it has to see under this path ({text})"
            )
        return None

    return refused


def _no_sleep(reply: Reply, text: str) -> Exception | None:
    if reply.status == 404:
        return ResourceError(
            f"inference.sleep: the server does not sleep ({text}); start it with VLLM_SERVER_DEV_MODE=1 and "
            "--enable-sleep-mode, on a GPU, or set inference.sleep=false"
        )
    return None


def _nothing(reply: Reply) -> None:
    """Ignore the body; the status suffices."""
