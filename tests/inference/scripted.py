"""An engine that answers with given parts, one after another, and waits in between when a test says so; and clients of
served engines."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import openai

from components.inference.app import AppOptions
from components.inference.protocol import (
    BASE_POLICY,
    CallDelta,
    ChatCompletion,
    ChatRequest,
    Increment,
    TextCompletion,
    TextIncrement,
    TextRequest,
)
from components.inference.server import ModelServer

CALL = {
    "id": "call_0",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "San Francisco"}'},
}


def decode(ids: list[int]) -> str:
    """The text of tokens that are characters."""
    return "".join(map(chr, ids))


@contextlib.contextmanager
def served(engine: Any, name: str = "m", key: str = "k", **options: Any) -> Iterator[openai.OpenAI]:
    """A client of a server of an engine. options: of the application."""
    with (
        ModelServer(engine, name, AppOptions(**{"decode": decode} | options)) as server,
        openai.OpenAI(base_url=server.url, api_key=key, timeout=600, max_retries=0) as client,
    ):
        yield client


class ScriptedEngine:
    """Reports `parts`, a token per character, then `call_parts`, the arguments of the first call, and completes them
    with `rest` and `calls`. With `error`, it fails after the parts. With `hold`, it waits for `go_on` after the
    parts."""

    policy = BASE_POLICY

    def __init__(
        self,
        parts: Sequence[str] = (),
        rest: str = "",
        calls: Sequence[dict[str, Any]] = (),
        *,
        call_parts: Sequence[str] = (),
        error: Exception | None = None,
        hold: bool = False,
    ):
        self.call_parts = call_parts
        self.parts, self.rest, self.calls, self.error = parts, rest, list(calls), error
        self.go_on = threading.Event()
        self.cancelled = threading.Event()
        if not hold:
            self.go_on.set()

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        prompt = [1, 2, 3]
        for part in self.parts:
            if request.listener is not None:
                tokens = [ord(letter) for letter in part]
                request.listener(Increment(part, tokens, [-0.5] * len(tokens), prompt, self.policy))
            await asyncio.sleep(0)
        for part in self.call_parts if request.listener is not None else ():
            delta = CallDelta("call_0", "weather", part)
            request.listener(Increment("", [7], [-0.5], prompt, self.policy, calls=[delta]))
            await asyncio.sleep(0)
        await self._held()
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.parts) + self.rest}
        if self.calls:
            message["tool_calls"] = self.calls
        ids = [ord(letter) for letter in message["content"]] + [0]
        reason = "tool_calls" if self.calls else "stop"
        return ChatCompletion(message, reason, prompt, ids, [-0.5] * len(ids), self.policy)

    async def complete(self, request: TextRequest) -> TextCompletion:
        prompt = [1, 2, 3]
        for part in self.parts:
            if request.listener is not None:
                tokens = [ord(letter) for letter in part]
                known = ([-0.5] * len(tokens), prompt, self.policy, [[] for _ in tokens])
                request.listener(TextIncrement(part, tokens, *known))
            await asyncio.sleep(0)
        await self._held()
        text = "".join(self.parts) + self.rest
        ids = [ord(letter) for letter in text]
        return TextCompletion(text, "stop", prompt, ids, [-0.5] * len(ids), self.policy, [[] for _ in ids])

    async def _held(self) -> None:
        """Wait for `go_on`, and raise the error."""
        try:
            while not self.go_on.is_set():
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if self.error is not None:
            raise self.error

    def load_policy(self, version: str, folder: str | None) -> None:
        raise AssertionError

    def close(self) -> None:
        pass
