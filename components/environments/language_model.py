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
from components.exceptions import PASSING, passes
from components.specs.served import ModelEndpoint

TRIES, PAUSE = 4, 0.5
"""Maximum number of requests; delay before the second request in seconds, doubled before each further one."""


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
        problem, away = "", False
        async with httpx.AsyncClient(headers=headers, timeout=self.timeout, verify=_tls()) as client:
            for attempt in range(TRIES):
                if attempt:
                    await asyncio.sleep(PAUSE * 2 ** (attempt - 1))
                try:
                    response = await client.post(f"{self.url}/chat/completions", json=body)
                except httpx.HTTPError as error:
                    problem, away = f"{type(error).__name__}: {error}", passes(error)
                    continue
                away = response.status_code in PASSING
                problem = f"HTTP {response.status_code}: {response.text[:300]}"
                if response.status_code in (401, 403, 404):
                    redacted = problem.replace(key, "***") if key else problem
                    raise ResourceError(
                        f"{self.key_path}: {self.url} rejects model {self.model!r} or its key ({redacted}); correct "
                        f"{self.key_path}.model, url or key_variable"
                    )
                if response.status_code == 200:
                    reply = _content(response)
                    if reply:
                        return reply
                    problem = f"no message in {response.text[:200]!r}"
                elif response.status_code not in (408, 409, 425, 429) and response.status_code < 500:
                    break
        redacted = problem.replace(key, "***") if key else problem
        kind = EnvironmentUnavailable if away else EnvironmentFailed
        raise kind(f"the {self.role} at {self.url} returned no reply: {redacted}")


@functools.cache
def _tls() -> ssl.SSLContext:
    """Return the TLS context, created once: it loads all certificates, and each request has its own client."""
    return httpx.create_ssl_context()


def _content(response: httpx.Response) -> str:
    """Return the text of a `chat.completion` response; empty if there is none."""
    try:
        content = response.json()["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return ""
    return content.strip() if isinstance(content, str) else ""
