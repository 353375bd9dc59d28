"""An engine behind a URL: any server of OpenAI's chat completions that can say which tokens it sampled.

A server may fail for a while: it restarts, it is overloaded, the line breaks. A request that it did not answer, cut
short or answered with something that is no answer is sent again, after a pause that grows, or as long as the server
says; when that has gone on for too long, the request has failed. What asking again cannot mend is raised at once: as
ResourceError where every other request would fail as well (a key that is refused, a model that is not there).

Thousands of requests may be under way at once: a request costs a few tenths of a millisecond of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import random
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import aiohttp
import orjson
import uvloop

from components.errors import ContextOverflow, EngineError, ResourceError, StalePolicy
from components.inference.protocol import BASE_POLICY, ChatCompletion, ChatRequest
from components.inference.spec import RemoteSpec
from components.inference.wire import is_object

logger = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 10.0
"""Seconds before a request is sent again: the first time, and at most. A server that says how long is believed."""
QUIET = 3.0
"""Seconds of failing after which it is said on the console; what is over sooner is only in the log."""
EMPTY_ANSWERS = 3
"""Times that a request may be answered with nothing, or with something that is no answer: the server is there, so
that waiting does not help."""
AGAIN = {408, 409, 425, 429, *range(500, 600)}
"""Statuses that may be better the next time."""
SHOWN = 300
"""Characters of a server's own words in a message."""
MOST_IDS = 2**20
"""Token ids that are shared: more than any vocabulary has."""
CONNECT = 10.0
"""Seconds in which a connection must come about."""
IDLE = 4.0
"""Seconds after which an unused connection is closed: before servers do, of which most wait five."""

Answer = TypeVar("Answer")


class _Failed(Exception):
    """A try that may go better the next time."""

    def __init__(self, message: str, *, pause: float | None = None, empty: bool = False):
        super().__init__(message)
        self.pause = pause
        """Seconds that the server asks to wait."""
        self.empty = empty


class _Reply(NamedTuple):
    status: int
    reason: str
    headers: Mapping[str, str]
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")


class RemoteEngine:
    """One policy at a time on a server; concurrent requests are the server's to batch.

    Requests run on a loop of the engine's own, so that it can be used from several loops, one after the other, and an
    environment that holds its loop up does not hold up answers.
    Raises ResourceError where the variable of the key is not set.
    """

    def __init__(self, spec: RemoteSpec):
        self.spec = spec
        self._key = spec.key()
        self._policy = BASE_POLICY
        self._model = spec.model
        self._away_since: float | None = None
        self._told = False
        self._proxy = _proxy(spec.url)
        self._session: aiohttp.ClientSession | None = None
        self._turns = asyncio.Semaphore(spec.max_requests) if spec.max_requests else None
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="remote-engine", daemon=True)
        self._thread.start()

    @property
    def policy(self) -> str:
        return self._policy

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        """Answers one conversation. Raises StalePolicy, ContextOverflow, EngineError, and ResourceError for what every
        request would fail of."""
        if request.policy != self._policy:
            raise StalePolicy(f"asked for policy {request.policy}, but the engine holds {self._policy}")
        body = _body(request, self._model, self.spec.tokens)

        def read(reply: _Reply) -> ChatCompletion:
            return _completion(_json(reply), request.policy, self.spec)

        return await asyncio.wrap_future(self._start(self._ask("POST", "/chat/completions", body, read)))

    def load_policy(self, version: str, folder: str | None) -> None:
        """Asks the server to load an adapter, and to let go of the one before. Raises ResourceError where it does not
        do that, EngineError where it fails at it."""
        if version == self._policy:
            return
        before, self._model = self._model, self.spec.model
        self._policy = BASE_POLICY
        if folder is not None:
            name = f"{self.spec.model}@{version}"
            body = {"lora_name": name, "lora_path": os.path.abspath(folder), "load_inplace": True}
            self._start(self._ask("POST", "/load_lora_adapter", body, _nothing)).result()
            self._model = name
        if before not in (self.spec.model, self._model):
            try:
                self._start(self._ask("POST", "/unload_lora_adapter", {"lora_name": before}, _nothing)).result()
            except (EngineError, ResourceError) as error:
                logger.info("%s keeps %s: %s", self.spec.url, before, error)
        self._policy = version

    def check(self) -> None:
        """Raises ResourceError where the server is away, for as long as requests are sent again, or lacks the model."""

        def names(reply: _Reply) -> list[str]:
            try:
                return [str(one["id"]) for one in _json(reply)["data"]]
            except (KeyError, TypeError):
                raise EngineError("its list of models is none") from None

        try:
            found = self._start(self._ask("GET", "/models", None, names)).result()
        except EngineError as error:
            raise ResourceError(f"inference.url: {self.spec.url} is no server that can be used: {error}") from None
        if self.spec.model not in found:
            raise ResourceError(
                f"inference.model: {self.spec.url} does not have {self.spec.model!r}; it has {', '.join(found[:10])}"
            )

    def release(self) -> None:
        """Nothing is held here."""

    def close(self) -> None:
        if not self._loop.is_closed():
            if self._session is not None:
                self._start(self._session.close()).result(10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()

    # One request

    def _start(self, work: Coroutine[Any, Any, Answer]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _ask(
        self, method: str, path: str, body: dict[str, Any] | None, read: Callable[[_Reply], Answer]
    ) -> Answer:
        """Sends a request until it is answered, or has failed for good."""
        content = None if body is None else _packed(body)
        deadline = None
        pause = FIRST_PAUSE
        empty = 0
        while True:
            try:
                answer = await self._try(method, path, content, read)
                self._is_back()
                return answer
            except _Failed as error:
                now = time.monotonic()
                deadline = deadline or now + self.spec.retry_for
                wait = error.pause if error.pause is not None else random.uniform(0.5, 1.0) * pause
                empty = empty + 1 if error.empty else 0
                if empty >= EMPTY_ANSWERS:
                    raise EngineError(f"{self._printable(error)}, {empty} times in a row") from None
                if now + wait > deadline:
                    raise EngineError(
                        f"{self._printable(error)}; sent again for {self.spec.retry_for:g} s (inference.retry_for)"
                    ) from None
                self._is_away(error)
                await asyncio.sleep(wait)
                pause = min(2 * pause, LONGEST_PAUSE)

    async def _try(self, method: str, path: str, content: bytes | None, read: Callable[[_Reply], Answer]) -> Answer:
        if self._session is None:
            self._session = self._connected()
        async with self._turns or contextlib.nullcontext():
            try:
                async with (
                    asyncio.timeout(self.spec.timeout),
                    self._session.request(
                        method, self.spec.url + path, data=content, allow_redirects=False, proxy=self._proxy
                    ) as response,
                ):
                    reply = _Reply(response.status, response.reason or "", response.headers, await response.read())
            except TimeoutError:
                raise _Failed(f"no answer within {self.spec.timeout:g} s (inference.timeout)") from None
            except (aiohttp.ClientError, OSError) as error:
                raise _Failed(f"the connection broke: {str(error) or type(error).__name__}") from None
        if reply.status != 200:
            raise self._refused(reply, path)
        return read(reply)

    def _connected(self) -> aiohttp.ClientSession:
        verified: ssl.SSLContext | bool = True
        if self.spec.url.startswith("https:"):
            import httpx

            verified = httpx.create_ssl_context()  # with certificates of its own where the system has none
        headers = {"Content-Type": "application/json", "User-Agent": "espalier"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,  # the collector says how many episodes there are at once
                keepalive_timeout=IDLE,
                ssl=verified,
            ),
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=min(CONNECT, self.spec.timeout)),
        )

    def _refused(self, reply: _Reply, path: str) -> Exception:
        """What a status other than 200 means."""
        status = reply.status
        code, said = _error(reply)
        text = self._printable(f"HTTP {status}: {said}")
        if path.endswith("lora_adapter") and status in (400, 403, 404, 405, 501):
            return ResourceError(
                f"{self.spec.url} does not load the adapter ({text}); our server does with --adapters DIR, DIR being a "
                "folder above the run's"
            )
        if status in (401, 403):
            which = self.spec.key_variable or "one: inference.key_variable=NAME"
            return ResourceError(f"{self.spec.url} refuses the key ({text}); set {which}")
        if status == 404:
            return ResourceError(f"{self.spec.url} has no {path} or no model {self._model} ({text})")
        if code == "stale_policy":
            return StalePolicy(text)
        if code == "context_length_exceeded" or (status == 400 and "maximum context length" in said):
            return ContextOverflow(text)
        if status in AGAIN and reply.headers.get("x-should-retry") != "false":
            return _Failed(text, pause=_pause(reply.headers.get("retry-after")))
        return EngineError(text)

    def _is_away(self, error: _Failed) -> None:
        if self._away_since is None:
            self._away_since = time.monotonic()
        said = self._printable(error)
        if self._told or time.monotonic() < self._away_since + QUIET:
            logger.info("%s: %s", self.spec.url, said)
            return
        self._told = True
        logger.warning("%s: %s; asking again for up to %g s", self.spec.url, said, self.spec.retry_for)

    def _is_back(self) -> None:
        if self._away_since is not None and self._told:
            logger.warning("%s answers again, after %.1f s", self.spec.url, time.monotonic() - self._away_since)
        self._away_since, self._told = None, False

    def _printable(self, said: object) -> str:
        """Without the key, should the server repeat it."""
        text = str(said)
        return text.replace(self._key, "***") if self._key else text


def _body(request: ChatRequest, model: str, tokens: bool) -> dict[str, Any]:
    """A request as JSON. What changes nothing is left out: not every server knows every parameter."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": model,
        "messages": [_sendable(message) for message in request.messages],
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
        "seed": request.seed % 2**63,
    }
    if request.tools:
        body["tools"] = request.tools
    if sampling.top_p < 1:
        body["top_p"] = sampling.top_p
    if sampling.top_k > 0:
        body["top_k"] = sampling.top_k
    if sampling.min_p > 0:
        body["min_p"] = sampling.min_p
    if tokens:
        body |= {"logprobs": True, "return_token_ids": True}
    return body


def _packed(body: dict[str, Any]) -> bytes:
    """As JSON."""
    try:
        return orjson.dumps(body)
    except TypeError:  # what orjson does not write: halves of surrogate pairs, numbers of more than 64 bits
        return json.dumps(body).encode()


def _sendable(message: dict[str, Any]) -> dict[str, Any]:
    """A server refuses a conversation in which a call has arguments that are no JSON object, though a model wrote them:
    they are sent as text in one."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        text = call["function"]["arguments"]
        function = {**call["function"], "arguments": text if is_object(text) else json.dumps({"unreadable": text})}
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def _completion(body: dict[str, Any], policy: str, spec: RemoteSpec) -> ChatCompletion:
    """A `chat.completion` object, read. Raises _Failed for one that is none or says nothing, StalePolicy for one by
    another policy, ResourceError for one without the tokens that were asked for."""
    try:
        answered = str(body.get("model", ""))
        choice = body["choices"][0]
        given = choice["message"]
        content, calls = given.get("content") or "", given.get("tool_calls") or []
        message: dict[str, Any] = {"role": "assistant", "content": str(content)}
        if calls:
            message["tool_calls"] = [_call(one) for one in calls]
        if not content and not calls and not choice.get("token_ids"):
            raise _Failed("an empty answer", empty=True)
        prompt, sampled, logprobs = _tokens(body, choice, spec) if spec.tokens else ([], [], [])
        reason = str(choice.get("finish_reason") or "stop")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise _Failed(f"an answer that is none ({type(error).__name__}: {error})", empty=True) from None
    name, at, version = answered.partition("@")
    if at and name == spec.model and version != policy:
        raise StalePolicy(f"asked for policy {policy}, and {answered} answered")
    return ChatCompletion(message, reason, prompt, sampled, logprobs, policy)


def _tokens(body: dict[str, Any], choice: dict[str, Any], spec: RemoteSpec) -> tuple[list[int], list[int], list[float]]:
    prompt, sampled = body.get("prompt_token_ids"), choice.get("token_ids")
    if prompt is None or sampled is None or not choice.get("logprobs"):
        raise ResourceError(
            f"{spec.url} answers without token ids and log-probabilities, and training needs them: take a server that "
            "knows `return_token_ids`, or only evaluate, with inference.tokens=false"
        )
    logprobs = [float(one["logprob"]) for one in choice["logprobs"]["content"]]
    if len(logprobs) != len(sampled) or not math.isfinite(sum(logprobs)):
        raise ValueError(f"{len(sampled)} tokens and {len(logprobs)} log-probabilities, not all of them finite")
    return list(map(_ids.__getitem__, prompt)), list(map(_ids.__getitem__, sampled)), logprobs


class _Ids(dict[int, int]):
    """Token ids by their value: one object for each, however many episodes hold it. A thousand tokens of an episode
    take 8 kB so, and 36 kB otherwise."""

    def __missing__(self, one: Any) -> int:
        if not isinstance(one, int) or one < 0:
            raise ValueError(f"the token id {one!r:.50}")
        if len(self) < MOST_IDS:
            self[one] = int(one)
        return int(one)


_ids = _Ids()


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {
        "id": str(call["id"]),
        "type": "function",
        "function": {"name": str(function["name"]), "arguments": str(function["arguments"])},
    }


def _json(reply: _Reply) -> dict[str, Any]:
    try:
        body = orjson.loads(reply.content)
    except ValueError:
        raise _Failed(f"an answer that is no JSON: {reply.text[:SHOWN]!r}", empty=True) from None
    if not isinstance(body, dict):
        raise _Failed(f"an answer that is no JSON object: {reply.text[:SHOWN]!r}", empty=True)
    return body


def _nothing(reply: _Reply) -> None:
    """The status says it all."""


def _error(reply: _Reply) -> tuple[str, str]:
    """Code and message of OpenAI's error object; the text itself where there is none."""
    try:
        error = orjson.loads(reply.content)["error"]
        return str(error.get("code") or ""), str(error.get("message") or "")[:SHOWN]
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", reply.text[:SHOWN] or reply.reason


def _pause(header: str | None) -> float | None:
    """Seconds of a Retry-After header; None where there is none that can be read."""
    try:
        return max(float(header), 0.0) if header else None
    except ValueError:
        return None


def _proxy(url: str) -> str | None:
    """The proxy that the environment's variables name for a URL; none for this machine."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if host in ("localhost", "::1") or host.startswith("127.") or urllib.request.proxy_bypass(host):
        return None
    known = urllib.request.getproxies()
    return known.get(parts.scheme) or known.get("all")
