"""Language models that environments call: a customer, a judge, an author of tasks.

Any server of OpenAI's chat completions works. Every request carries a seed; transient failures are retried.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
from typing import ClassVar

import httpx
from pydantic import Field

from components.environments.protocol import Messages
from components.errors import EnvironmentFailed, EnvironmentUnavailable, ResourceError
from components.exceptions import passes, status_of
from components.json_client import AGAIN, FailedAttempt
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
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        backoff = Backoff(retries=RETRIES, first=PAUSE)
        async with httpx.AsyncClient(headers=headers, timeout=self.timeout, verify=_tls()) as client:
            while True:
                try:
                    response = await client.post(f"{self.url}/chat/completions", json=body)
                    response.raise_for_status()
                    return _content(response)
                except (httpx.HTTPError, FailedAttempt) as error:
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
    if isinstance(error, httpx.HTTPStatusError):
        text = f"HTTP {error.response.status_code}: {error.response.text[:300]}"
    else:
        text = str(error) if isinstance(error, FailedAttempt) else f"{type(error).__name__}: {error}"
    return text.replace(key, "***") if key else text


@functools.cache
def _tls() -> ssl.SSLContext:
    """Return the TLS context, created once: it loads all certificates, and each request has its own client."""
    return httpx.create_ssl_context()


def _content(response: httpx.Response) -> str:
    """Return the text of a `chat.completion` response. Raises FailedAttempt if there is none."""
    try:
        content = response.json()["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        content = None
    if not isinstance(content, str) or not content.strip():
        raise FailedAttempt(f"no message in {response.text[:200]!r}")
    return content.strip()
