"""Client of OpenAI's chat completions for a language model behind a URL: an engine, a judge, a deployment.

Models that an environment calls have a client without a lifetime of its own (`components.environments.language_model`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from components.bounded_reply import LIMITS, ReplyLimits
from components.errors import ContextOverflow, ResourceError
from components.json_client import Answer, Client, RefusalCheck
from components.json_reply import FailedAttempt, Reply

NO_CREDIT_CODES = ("insufficient_quota", "billing_hard_limit_reached", "billing_not_active")
"""Error codes for which a retry is pointless: the account has no credit."""


class ChatClient(Client):
    """Client of one server with chat completions."""

    async def complete(
        self,
        body: dict[str, Any],
        read: Callable[[dict[str, Any]], Answer],
        refused: RefusalCheck = lambda *_: None,
        limits: ReplyLimits = LIMITS,
    ) -> Answer:
        """Send a request and return `read(completion)`, which may raise FailedAttempt for an invalid answer.

        refused: maps errors of this use, other than a prompt that is too long or no credit, to exceptions; None leaves
        the error to the client. Raises ContextOverflow for
        a prompt that the model does not take, ResourceError if the model does not exist or the account has no credit,
        and the exceptions of `Client.post`.
        """

        def refused_completion(reply: Reply, text: str) -> Exception | None:
            error = self._refused_prompt(reply, text) or refused(reply, text)
            return error or self._missing(reply, text, body["model"])

        return await self.post(
            "/chat/completions", body, lambda reply: read(reply.json()), refused_completion, limits=limits
        )

    def _refused_prompt(self, reply: Reply, text: str) -> Exception | None:
        code, message = reply.error()
        if code == "context_length_exceeded" or (reply.status == 400 and "maximum context length" in message):
            return ContextOverflow(text)
        if reply.status == 402 or code in NO_CREDIT_CODES:
            return ResourceError(f"the account at {self.url} has no credit left ({text})")
        return None

    def _missing(self, reply: Reply, text: str, model: str) -> Exception | None:
        if reply.status == 404:
            return ResourceError(f"{self.url} has no /chat/completions or no model {model} ({text})")
        return None


@contextmanager
def fail_on_invalid_answer() -> Iterator[None]:
    """Raise FailedAttempt for an answer that lacks a part or has a part of another type."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise FailedAttempt(f"an invalid answer ({type(error).__name__}: {error})", empty=True) from None


def empty_answer() -> FailedAttempt:
    """Return the failure of an answer without content, which is retried."""
    return FailedAttempt("an empty answer", empty=True)
