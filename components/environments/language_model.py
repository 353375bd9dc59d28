"""Language models that environments call: a customer, a judge, an author of tasks.

Any server of OpenAI's chat completions works. Every request carries a seed; transient failures are retried.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
from typing import ClassVar

import httpx
from pydantic import BaseModel, Field

from components.bounded_reply import InvalidReply, RawReply, parse, request, typed
from components.environments.protocol import Messages
from components.errors import EnvironmentFailed, EnvironmentUnavailable, ResourceError
from components.exceptions import passes, status_of
from components.json_reply import AGAIN, packed
from components.retry import Backoff
from components.specs.served import ModelEndpoint

RETRIES, PAUSE = 3, 0.5
"""Maximum number of retries; seconds before the first one."""


class ServedModel(ModelEndpoint):
    """A model served over OpenAI's chat completions."""

    role: ClassVar[str] = "model"
    """Role of the model in the environment, for error messages."""
    key_path: ClassVar[str] = "environment.model"

    timeout: float = Field(60.0, gt=0, le=600)
    """Timeout of one request, in seconds."""

    async def ask(self, messages: Messages, *, seed: int, max_tokens: int, temperature: float = 0.0) -> str:
        """Return the model's reply to a conversation.

        Raises EnvironmentFailed if the server returns no reply, EnvironmentUnavailable if the failure is transient, and
        ResourceError if the server rejects the model or its key (HTTP 401, 403, 404).
        """
        body = {
            "model": self.model,
            "messages": messages,
            "temperature": temperature,
            "seed": seed,
            "max_tokens": max_tokens,
        }
        key = self.key()
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        backoff = Backoff(retries=RETRIES, first=PAUSE)
        async with httpx.AsyncClient(headers=headers, verify=_tls()) as client:
            while True:
                try:
                    reply = await request(
                        client, "POST", f"{self.url}/chat/completions", seconds=self.timeout, content=packed(body)
                    )
                    if reply.status != 200:
                        raise _StatusError(reply)
                    return _content(reply.content)
                except (httpx.HTTPError, _StatusError, InvalidReply) as error:
                    if (pause := self._pause(error, backoff, key)) is None:
                        kind = EnvironmentUnavailable if passes(error) else EnvironmentFailed
                        raise kind(f"the {self.role} at {self.url} returned no reply: {_problem(error, key)}") from None
                await asyncio.sleep(pause)

    def _pause(self, error: Exception, backoff: Backoff, key: str) -> float | None:
        """Return the seconds before the next attempt; None if there is none. Raises ResourceError for a status that
        every request would get."""
        status = status_of(error)
        if status in (401, 403, 404):
            raise ResourceError(
                f"{self.key_path}: {self.url} rejects model {self.model!r} or its key ({_problem(error, key)}); "
                f"correct {self.key_path}.model, url or key_variable"
            ) from None
        return backoff.pause() if status is None or status in AGAIN else None


def _problem(error: Exception, key: str) -> str:
    """Return the text of a failed attempt with the key masked."""
    text = f"{type(error).__name__}: {error}" if isinstance(error, httpx.HTTPError) else str(error)
    return text.replace(key, "***") if key else text


@functools.cache
def _tls() -> ssl.SSLContext:
    """Return the TLS context, created once: it loads all certificates, and each request has its own client."""
    return httpx.create_ssl_context()


class _StatusError(Exception):
    """Reply with an error status."""

    def __init__(self, reply: RawReply):
        super().__init__(f"HTTP {reply.status}: {reply.content[:300].decode('utf-8', 'replace')}")
        self.status_code = reply.status


class _Message(BaseModel):
    content: str


class _Choice(BaseModel):
    message: _Message


class _Completion(BaseModel):
    choices: list[_Choice] = Field(min_length=1)


def _content(reply: bytes) -> str:
    """Return the text of a `chat.completion` object. Raises InvalidReply if there is none."""
    content = typed(_Completion, parse(reply)).choices[0].message.content.strip()
    if not content:
        raise InvalidReply(f"returned no message in {reply[:200]!r}")
    return content
