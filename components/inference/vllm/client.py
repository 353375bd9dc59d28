"""Client of one vLLM server: sampling from token ids, adapters, sleep mode.

A streamed completion reports tokens with their log-probabilities as they are sampled. The client reads server-sent
events in its own thread; increments are reported in the event loop of the request. The
last event, with the finish reason, is not reported: its tokens come with the response, as from the embedded engine. A
request that fails before its first increment is retried; one that fails later is an error, because another attempt may
sample other tokens.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from components.bounded_reply import limits_with_tokens
from components.errors import ContextOverflow, ResourceError, StalePolicy
from components.inference.growing_text import GrowingText, growing_response
from components.inference.protocol import ChatRequest, Increment, TokenLogprobs
from components.inference.vllm.adapters import joins_experts
from components.json_client import Client, RefusalCheck, fail_on_invalid_answer, ignore_body
from components.json_reply import MAX_QUOTED, FailedAttempt, Reply
from components.json_text import read_json
from components.trajectories.chat import ChatFormat

logger = logging.getLogger(__name__)


_TOKEN_ID = "token_id:"
"""Prefix of a token in a response to `return_tokens_as_token_ids`."""
_IMPOSSIBLE = -9999.0
"""Log-probability that vLLM writes for a token that cannot be sampled."""


class Sampled(NamedTuple):
    """Sampled tokens, their log-probabilities, and the most likely tokens at each of them if they were requested."""

    tokens: list[int]
    logprobs: list[float]
    likeliest: list[TokenLogprobs]


class Increments:
    """Increments of one response for the listener of its request. To be created in the event loop of the request.

    prompt: tokens of the prompt.
    """

    def __init__(self, request: ChatRequest, prompt: list[int], chat: ChatFormat):
        self.begun = False
        self._request = request
        self._prompt = prompt
        self._loop = asyncio.get_running_loop()
        self._growing: GrowingText | None = growing_response(chat.after(prompt), request)
        if request.start is not None:
            self._growing.extend(request.start.token_ids)

    def add(self, sampled: Sampled) -> None:
        """Report sampled tokens, from any thread."""
        self.begun = True
        self._loop.call_soon_threadsafe(self._report, sampled)

    def close(self) -> None:
        """Report nothing any more."""
        self._growing = None

    def _report(self, sampled: Sampled) -> None:
        if self._growing is None or self._request.listener is None:
            return
        try:
            text = self._growing.extend(sampled.tokens)
        except Exception:
            logger.exception("a response cannot be streamed; it is sent when it is complete")
            self.close()
            return
        prompt, policy = self._prompt, self._request.policy
        tokens, logprobs, likeliest = sampled
        parts = self._growing.calls, self._growing.reasoning
        self._request.listener(Increment(text, tokens, logprobs, prompt, policy, likeliest, *parts))


class StreamedCompletion:
    """Reader of one streamed completion (`components.json_client.StreamedBody`). body: request. policy: version, for
    messages."""

    def __init__(self, increments: Increments, body: dict[str, Any], policy: str):
        self._increments = increments
        self._body = body
        self._policy = policy

    @property
    def begun(self) -> bool:
        return self._increments.begun

    async def consume(self, chunks: AsyncIterator[bytes]) -> tuple[int, bytes]:
        """Return the completion as a response without streaming has it. Raises StalePolicy, ResourceError as
        `completion_tokens`, and FailedAttempt for a stream that ends early."""
        tokens: list[int] = []
        logprobs: dict[str, list[Any]] = {"token_logprobs": [], "top_logprobs": []}
        finished = False
        async for event in events(chunks):
            if "error" in event:
                return _status_of(event), orjson.dumps(event)
            if not event.get("choices"):
                continue
            new = completion_tokens(event, self._body, self._policy)
            tokens += new.tokens
            for name, values in logprobs.items():
                values += (event["choices"][0].get("logprobs") or {}).get(name) or []
            finished = finished or event["choices"][0].get("finish_reason") is not None
            if new.tokens and not finished:
                self._increments.add(new)
        if not finished:
            raise FailedAttempt("the stream ended before the response")
        choice = {"token_ids": tokens, "logprobs": logprobs}
        return 200, orjson.dumps({"model": self._body["model"], "choices": [choice]})


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON objects of server-sent events. Raises FailedAttempt for data that are no JSON object."""
    parts: list[bytes] = []
    async for chunk in chunks:
        parts.append(chunk)
        if b"\n" not in chunk:
            continue
        *lines, unfinished = b"".join(parts).split(b"\n")
        parts = [unfinished]
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or data == b"[DONE]":
                continue
            try:
                event = orjson.loads(data)
            except ValueError:
                event = None
            if not isinstance(event, dict):
                raise FailedAttempt(f"an event of the stream is no JSON object: {data[:MAX_QUOTED]!r}", empty=True)
            yield event


def completion_tokens(answer: dict[str, Any], body: dict[str, Any], policy: str) -> Sampled:
    """Return the tokens of a completion or of an event, as the request `body` demands. Raises FailedAttempt for an
    invalid one, StalePolicy for one of another model, ResourceError for one without token ids."""
    with fail_on_invalid_answer():
        answered, choice = str(answer["model"]), answer["choices"][0]
        sampled, logprob_data = choice.get("token_ids"), choice.get("logprobs")
        if sampled is None or (logprob_data is None and sampled):
            raise ResourceError("a server answers without token ids and log-probabilities; expected vLLM")
        logprob_data = logprob_data or {"token_logprobs": [], "top_logprobs": []}
        logprobs = [float(logprob) for logprob in logprob_data["token_logprobs"]]
        tokens = [int(token) for token in sampled]
        count = body["logprobs"]
        likeliest = [_likeliest(entry, count) for entry in logprob_data["top_logprobs"]] if count else []
    if answered != body["model"]:
        raise StalePolicy(f"asked for policy {policy} ({body['model']}), and {answered} answered")
    if len(tokens) != len(logprobs) or (count and len(tokens) != len(likeliest)):
        raise FailedAttempt(f"{len(tokens)} tokens and {len(logprobs)} log-probabilities", empty=True)
    return Sampled(tokens, logprobs, likeliest)


def _likeliest(entry: dict[str, float], count: int) -> TokenLogprobs:
    """Return the `count` most likely tokens of an entry, which also has the sampled one, without tokens that cannot be
    sampled."""
    known = [(int(token.removeprefix(_TOKEN_ID)), float(logprob)) for token, logprob in entry.items()]
    known.sort(key=lambda token: -token[1])
    return [(token, logprob) for token, logprob in known[:count] if logprob > _IMPOSSIBLE]


def _status_of(event: dict[str, Any]) -> int:
    """Return the HTTP status of an event with an error."""
    code = event["error"].get("code") if isinstance(event["error"], dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 500


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

    def prompt_logprobs(self, model: str, prompt: list[int]) -> list[float]:
        """Return the log-probability of each token of a prompt but the first, and block the calling thread. Raises
        UnknownAdapter as `sample`."""
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "prompt_logprobs": 0, "temperature": 0.0}

        def read(reply: Reply) -> list[float]:
            with fail_on_invalid_answer():
                entries = reply.json()["choices"][0]["prompt_logprobs"][1:]
                tokens = zip(prompt[1:], entries, strict=True)
                return [float(entry[str(token)]["logprob"]) for token, entry in tokens]

        return self.now("POST", "/v1/completions", body, read, _refused)

    def tokenize(self, model: str, text: str) -> list[int]:
        """Return the token ids of a text."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        return self.now("POST", "/tokenize", body, lambda reply: list(reply.json().get("tokens") or []))

    def load_adapter(self, name: str, folder: str) -> None:
        """Load an adapter if the server does not list it with this folder, and verify it in the list."""
        if (listed := self.adapter_folder(name)) != folder:
            # In place only if another folder has the name.
            body = {"lora_name": name, "lora_path": folder, "load_inplace": listed is not None}
            if joins_experts(Path(folder)):
                body["is_3d_lora_weight"] = True
            self.now("POST", "/v1/load_lora_adapter", body, ignore_body, _not_loaded(name, folder))
        if (listed := self.adapter_folder(name)) != folder:
            raise StalePolicy(f"{self.url} was given {name} from {folder}, and lists it from {listed}")

    def load_weights(self, folder: str) -> None:
        """Replace all weights by those in a folder. Requests in flight end before, and later ones wait for it. Raises
        StalePolicy if keys and values of the weights before stay in the prefix cache."""
        self.now("POST", "/pause?mode=wait", {}, ignore_body, _no_reload)
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        self.now("POST", "/collective_rpc", body, ignore_body, _no_reload)
        if not self.now("POST", "/reset_prefix_cache", {}, lambda reply: reply.json()["success"], _no_reload):
            raise StalePolicy(f"{self.url} keeps keys and values of other weights than those of {folder}")
        self.now("POST", "/resume", {}, ignore_body, _no_reload)

    def sleep(self, level: int) -> None:
        """Put the server to sleep until `wake`."""
        self.now("POST", f"/sleep?level={level}", {}, ignore_body, _no_sleep)

    def wake(self, level: int) -> bool:
        """Wake the server from a level of sleep. Return True if it slept."""
        if not self.now("GET", "/is_sleeping", None, lambda reply: reply.json()["is_sleeping"], _no_sleep):
            return False
        if level == 1:
            self.now("POST", "/wake_up", {}, ignore_body, _no_sleep)
            return True
        # The weights were discarded: read them before there is a cache, whose memory the reading may need.
        self.now("POST", "/wake_up?tags=weights", {}, ignore_body, _no_sleep)
        self.now("POST", "/collective_rpc", {"method": "reload_weights"}, ignore_body, _no_sleep)
        self.now("POST", "/wake_up?tags=kv_cache", {}, ignore_body, _no_sleep)
        return True

    def adapter_folder(self, name: str) -> str | None:
        """Return the folder of an adapter according to the server's list; None if it is not loaded."""
        return next((model.get("root") for model in self.models("/v1/models") if model.get("id") == name), None)


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


def _no_reload(reply: Reply, text: str) -> Exception | None:
    if reply.status in (400, 404, 500):
        return ResourceError(
            f"the server does not read the weights of a policy ({text}); expected vLLM 0.26 or later, started with "
            "VLLM_SERVER_DEV_MODE=1, which sees the folder under its path"
        )
    return None


def _no_sleep(reply: Reply, text: str) -> Exception | None:
    if reply.status == 404:
        return ResourceError(
            f"inference.sleep: the server does not sleep ({text}); start it with VLLM_SERVER_DEV_MODE=1 and "
            "--enable-sleep-mode, on a GPU, or set inference.sleep=0"
        )
    return None
