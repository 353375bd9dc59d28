"""Client of a model of any provider that LiteLLM supports, as judges and the inference engine use it: its key, its
price, one call, and the meaning of its errors. A provider with OpenAI's chat completions needs none
(`components.json_client`).

By default LiteLLM fetches a price table when it is imported, prints advertisements at each error, and installs its own
log handlers. It also keeps connections for later calls, which outlive the event loop they were created on. Therefore
all calls share one event loop and one HTTP session, which end with the process. The package's own session is left
alone: agents of users may call LiteLLM in the same process, on event loops of their own.

LiteLLM sends each request once. The client retries (`components.retry.retry_with_backoff`).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from components.bounded_reply import IDENTITY, InvalidReply, LateReply, check_encoding, complete_parts
from components.errors import BoundaryError, ContextOverflow, ResourceError
from components.exceptions import never_connected
from components.json_client import NO_CREDIT_CODES, RefusalCheck
from components.json_reply import AGAIN, MAX_QUOTED, FailedAttempt, Reply, asked_to_wait, packed
from components.redaction import MASK, dereference, is_secret, secret_variable
from components.retry import Answer, ClientTimeouts, record_contact, retry_with_backoff

LOCAL = ("LITELLM_LOCAL_MODEL_COST_MAP", "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS", "LITELLM_LOCAL_BLOG_POSTS")
"""Variables that select the bundled tables instead of downloaded ones."""
LOGGERS = ("LiteLLM", "LiteLLM Router", "LiteLLM Proxy")
LAST = 5.0
"""Seconds that closing the connections may take at exit."""


@functools.cache
def litellm() -> Any:
    """Return the configured `litellm` package."""
    for name in LOCAL:
        os.environ.setdefault(name, "True")
    import litellm as package

    package.suppress_debug_info = True
    package.telemetry = False
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # errors are raised as exceptions
    return package


async def _completion(**sent: Any) -> Any:
    """Return the result of `acompletion`, run on the shared event loop. Raises LateReply after `timeout` seconds, which
    LiteLLM applies to each read."""

    async def ask() -> Any:
        try:
            async with asyncio.timeout(sent["timeout"]):
                return await litellm().acompletion(**sent, shared_session=_session())
        except TimeoutError:
            raise LateReply(f"timed out after {sent['timeout']:g} s") from None

    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(ask(), _loop()))


@functools.cache
def _session() -> Any:
    """Return the HTTP session of all calls, which bounds replies. Called on the shared event loop."""
    import aiohttp

    async def bound(request: Any, handler: Any) -> Any:
        request.headers.update(IDENTITY)
        response = await handler(request)
        check_encoding(response.headers)
        response.content = _BoundedContent(response.content, response.headers)
        return response

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),  # callers limit their own concurrency
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        middlewares=(bound,),
    )


class _BoundedContent:
    """Body of a response, which LiteLLM reads in chunks."""

    def __init__(self, content: Any, headers: Any):
        self._content, self._headers = content, headers

    def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        return complete_parts(self._headers, self._content.iter_chunked(size))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="LiteLLM", daemon=True).start()

    async def close() -> None:
        await litellm().close_litellm_async_clients()
        await _session().close()

    def end() -> None:
        with contextlib.suppress(Exception):  # an unresponsive server must not delay the exit
            asyncio.run_coroutine_threadsafe(close(), loop).result(LAST)
        loop.call_soon_threadsafe(loop.stop)

    atexit.register(end)
    return loop


def listed(model: str) -> bool:
    """Return True if LiteLLM's table has a price. Models without a known price have 0 there."""
    prices = litellm().model_cost
    name, provider, *_ = litellm().get_llm_provider(model)
    name_row = prices.get(name, {})
    row = prices.get(model) or prices.get(f"{provider}/{name}") or name_row
    if row is name_row and name_row.get("litellm_provider") != provider:
        return False
    return all((row.get(f"{kind}_cost_per_token") or 0) > 0 for kind in ("input", "output"))


PROVIDER_MODEL = r"^[^/\s]+/\S+$"
"""Name of a model in LiteLLM's form `PROVIDER/MODEL`."""
SHORTEST_KEY = 8
"""Minimum length of an environment value that is masked as a key."""
ADDRESS = ("api_base", "base_url")
"""Parameters that set the address of a LiteLLM model."""


@dataclass(frozen=True)
class LiteLLMModel:
    """A model, and the keys of the configuration that messages refer to."""

    name: str
    """`PROVIDER/MODEL`."""
    path: str
    """Key path of the model's section, such as `inference`."""
    own_server: str
    """Override that selects a server of the user's own."""
    key_variable: str | None
    """Environment variable that holds the provider's key; None uses LiteLLM's default variable."""
    extra: dict[str, Any]
    """Additional parameters of a request."""

    def key(self) -> str | None:
        """Return the key; None leaves it to LiteLLM. Raises ResourceError if the key, or a variable that `extra` names,
        is not in the environment."""
        dereference(self.extra, f"{self.path}.extra")
        if self.key_variable is not None:
            key = secret_variable(self.key_variable)
            if not key:
                raise ResourceError(
                    f"{self.path}.key_variable: the environment variable {self.key_variable} is not set; set it to "
                    f"the key for {self.name}"
                )
            return key
        try:
            litellm().get_llm_provider(self.name)
        except litellm().BadRequestError:
            provider = self.name.partition("/")[0]
            raise ResourceError(
                f"{self.path}.model={self.name}: LiteLLM knows no provider {provider}; expected one as in "
                f"anthropic/claude-sonnet-4-5. A server of your own: {self.own_server}"
            ) from None
        address = self._address
        missing = litellm().validate_environment(self.name, api_base=address)["missing_keys"]
        if missing:
            raise ResourceError(
                f"{self.path}.model={self.name}: the environment lacks {', '.join(missing)}; set it, or name the "
                f"variable that holds the key: {self.path}.key_variable=NAME"
            )
        return None

    @property
    def server(self) -> str:
        """Return the name of the server: the model, and its address if one is set."""
        address = self._address
        return f"{self.name} at {address}" if address else self.name

    @property
    def _address(self) -> Any:
        return next((self.extra[name] for name in ADDRESS if self.extra.get(name)), None)

    def listed_price(self, read: int, written: int) -> float:
        """Return the cost of these numbers of prompt and completion tokens by LiteLLM's price table."""
        return float(sum(litellm().cost_per_token(self.name, prompt_tokens=read, completion_tokens=written)))

    def masked(self, error: object, key: str | None) -> str:
        """Return the error's text with keys masked, in case the provider repeats one."""
        text = str(error).removeprefix("litellm.")[:MAX_QUOTED]
        for name, value in os.environ.items():
            if len(value) >= SHORTEST_KEY and is_secret(name):
                text = text.replace(value, MASK)
        return text.replace(key, MASK) if key else text


class LiteLLMClient:
    """Client of one model, used as `json_client.ChatClient`. Raises ResourceError if its key is not in the environment.

    error: raised when a request has failed for good."""

    def __init__(self, model: LiteLLMModel, patience: ClientTimeouts, error: type[BoundaryError]):
        self._model = model
        self._key = model.key()
        self._patience = patience
        self._error = error

    async def complete(
        self, body: dict[str, Any], read: Callable[[dict[str, Any]], Answer], refused: RefusalCheck = lambda *_: None
    ) -> Answer:
        """Send a request and return `read(completion)`, with the exceptions of `ChatClient.complete`. refused: maps
        errors of the request (400, 422) to exceptions."""

        async def attempt() -> Answer:
            import openai

            try:
                completion = await self._send(body)
            except openai.OpenAIError as error:  # the base class of LiteLLM's errors
                raise self._translated(error, refused) from None
            return read(completion)

        try:
            return await retry_with_backoff(attempt, self._patience, self._model.server)
        except FailedAttempt as error:
            raise self._error(f"{self._model.name}: {error}") from None

    def close(self) -> None:
        """Keep LiteLLM's connections open, for the next client of the same provider."""

    async def _send(self, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request once and return the completion in the providers' form."""
        timeout = self._patience.timeout
        try:
            result = await _completion(**body, api_key=self._key, timeout=timeout, num_retries=0, max_retries=0)
        except LateReply:
            limit = f"{timeout:g} s ({self._patience.path}.timeout)"
            raise FailedAttempt(f"timed out: no answer within {limit}") from None
        except InvalidReply as error:
            raise FailedAttempt(f"the server {error}", empty=True) from None
        record_contact(self._model.server)
        return _provider_form(result.model_dump())

    def _translated(self, error: Any, refused: RefusalCheck) -> Exception:
        """Return the exception for an error of LiteLLM: FailedAttempt if it may pass."""
        errors, model = litellm(), self._model
        text = model.masked(error, self._key)
        status = getattr(error, "status_code", None)
        unreachable = never_connected(error)
        # LiteLLM reports a refused connection with status 500, which no server has sent
        if status is not None and not unreachable and not isinstance(error, errors.APIConnectionError | errors.Timeout):
            record_contact(model.server)
        if isinstance(error, errors.ContextWindowExceededError):
            return ContextOverflow(f"{model.name}: {text}")
        if status in (400, 422):
            content = packed({"error": {"message": text}})
            if (refusal := refused(Reply(status, "", {}, content), text)) is not None:
                return refusal
        if isinstance(error, errors.UnsupportedParamsError):
            hint = f"remove the parameter, for instance +{model.path}.extra.temperature=null"
            return ResourceError(f"{model.name}: {text}; {hint}")
        if status in (401, 403):
            variable = model.key_variable or f"the one of its provider, or name another: {model.path}.key_variable="
            return ResourceError(f"{model.name} refuses the key ({text}); set {variable}")
        if status == 404:
            return ResourceError(f"{model.name} does not exist ({text}); see {model.path}.model")
        codes = (getattr(error, "code", None), (getattr(error, "body", None) or {}).get("code"))
        if status == 402 or any(code in NO_CREDIT_CODES for code in codes):
            return ResourceError(f"the account for {model.name} has no credit left ({text})")
        if status in AGAIN or isinstance(error, errors.APIConnectionError):
            pause = asked_to_wait(getattr(error, "litellm_response_headers", None) or {})
            return FailedAttempt(text, pause=pause, unreachable=unreachable)
        return self._error(f"{model.name}: {text}")


def _provider_form(completion: dict[str, Any]) -> dict[str, Any]:
    """Return a completion in the providers' form: LiteLLM moves the refusal elsewhere, and reports 0 tokens if none
    were counted."""
    message = completion["choices"][0]["message"] if completion.get("choices") else {}
    message["refusal"] = (message.get("provider_specific_fields") or {}).get("refusal")
    prompt_tokens = (completion.get("usage") or {}).get("prompt_tokens")
    return completion if prompt_tokens else completion | {"usage": None}
