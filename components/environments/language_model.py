"""A language model that an environment asks: a customer, a judge, an author of tasks.

It is any server of OpenAI's chat completions. Every request states its seed, and what fails for a while is asked again.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
from typing import ClassVar

import httpx
from pydantic import Field

from components.environments.protocol import Messages
from components.errors import EnvironmentAway, EnvironmentFailed, ResourceError
from components.exceptions import PASSING, passes
from components.specs.served import Served

TRIES, PAUSE = 4, 0.5
"""Requests before the episode has failed; seconds before the second, then twice as many."""


class ServedModel(Served):
    """A model behind a URL that speaks OpenAI's chat completions."""

    role: ClassVar[str] = "model"
    """What it is to the environment, for messages."""
    key_path: ClassVar[str] = "environment.model"

    timeout: float = Field(60.0, gt=0, le=600)
    """Seconds that one answer may take."""

    async def ask(self, messages: Messages, *, seed: int, max_tokens: int, temperature: float = 0.0) -> str:
        """What the model says to a conversation. Raises EnvironmentFailed where the server gives no answer,
        EnvironmentAway where it is only away, ResourceError where it would give none to anybody."""
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
            for number in range(TRIES):
                if number:
                    await asyncio.sleep(PAUSE * 2 ** (number - 1))
                try:
                    response = await client.post(f"{self.url}/chat/completions", json=body)
                except httpx.HTTPError as error:
                    problem, away = f"{type(error).__name__}: {error}", passes(error)
                    continue
                away = response.status_code in PASSING
                problem = f"HTTP {response.status_code}: {response.text[:300]}"
                if response.status_code in (401, 403, 404):
                    shown = problem.replace(key, "***") if key else problem
                    raise ResourceError(
                        f"{self.key_path}: {self.url} refuses model {self.model!r} or its key ({shown}); mend "
                        f"{self.key_path}.model, url or key_variable"
                    )
                if response.status_code == 200:
                    reply = _content_of(response)
                    if reply:
                        return reply
                    problem = f"no message in {response.text[:200]!r}"
                elif response.status_code not in (408, 409, 425, 429) and response.status_code < 500:
                    break
        shown = problem.replace(key, "***") if key else problem
        kind = EnvironmentAway if away else EnvironmentFailed
        raise kind(f"the {self.role} at {self.url} gave no answer: {shown}")


@functools.cache
def _tls() -> ssl.SSLContext:
    """Made once: it reads all certificates, and there is a client for each answer."""
    return httpx.create_ssl_context()


def _content_of(response: httpx.Response) -> str:
    """The text of a `chat.completion`; empty where there is none."""
    try:
        said = response.json()["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return ""
    return said.strip() if isinstance(said, str) else ""
