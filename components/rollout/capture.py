"""An engine wrapper that records the responses to one episode of a custom agent.

The agent uses an OpenAI-compatible endpoint, which forwards every call to this wrapper. Sampled tokens are recorded in
any number of conversations: a call whose prompt extends a recorded history continues it; any other call begins a new
history (a sub-agent, a compacted context, a second response to the same prompt). Named agents (`ChatRequest.agent`)
have separate histories.

The collector's sampling parameters replace the agent's, because training uses the distribution that was sampled from.
The seed of a call is derived from the episode's seed and the call's content, so concurrent calls may arrive in any
order. Histories that begin concurrently are sorted by content.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from components.errors import CallLimitReached, ContextOverflow, EngineError, ResourceError, SpecError
from components.inference.protocol import FREE, MAIN, ChatCompletion, ChatRequest, Engine, Sampling, gather_completions
from components.rollout.usage import ReportedUsage
from components.trajectories.recorder import Recorder
from components.trajectories.schema import History
from components.trajectories.truncation import CALLS, CONTEXT


class Capture:
    """Recorder of the responses of `engine`. most_calls: maximum number of calls; further calls are rejected."""

    def __init__(self, engine: Engine, sampling: Sampling, seed: int, most_calls: int):
        self.recorder = Recorder()
        self.calls = self.answers = self.sampled = self.truncated = self.constrained = 0
        self.usage = ReportedUsage()
        self.limit: str | None = None
        """Limit that refused the last call (`components.trajectories.truncation`); None after a response."""
        self.failed: Exception | None = None
        """Exception of the engine at the last call; None after a response. ContextOverflow is a limit instead."""
        self.sampled_arguments: set[str] = set()
        """Arguments of the policy's tool calls. The agent returns them unchanged, even if they are invalid JSON."""
        self.count_tokens = getattr(engine, "count_tokens", None)
        """Number of tokens of a request's prompt; None if the engine cannot count them."""
        self._engine = engine
        self._sampling = sampling
        self._seed = seed
        self._most = most_calls
        self._asked: defaultdict[str, set[int]] = defaultdict(set)
        self._running: dict[asyncio.Task[Any], asyncio.AbstractEventLoop] = {}
        self._idle_starts = 0
        """Number of calls that began while no other call was running."""
        self._began: dict[int, int] = {}
        """Value of `_idle_starts` when a history began, by identity of the history."""
        self._offered: dict[int, list[dict[str, Any]]] = {}
        """Tools of the first call with tools, by identity of the history."""
        self._name = uuid.uuid4().hex
        self._closed = False
        self._lock = threading.Lock()

    @property
    def histories(self) -> list[History]:
        """Histories in the order in which they began; concurrent ones sorted by agent and content."""

        def place(history: History) -> tuple[Any, ...]:
            content = [(message.role, message.content) for message in history.messages]
            return self._began[id(history)], history.agent, len(content), history.token_ids, content

        return sorted(self.recorder.histories, key=place)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Tools of the first history with tools."""
        return next((tools for history in self.histories if (tools := self._offered.get(id(history)))), [])

    @property
    def policy(self) -> str:
        return self._engine.policy

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        """Return the response to one request, as `chat_all`."""
        return (await self.chat_all([request]))[0]

    async def chat_all(self, requests: Sequence[ChatRequest]) -> list[ChatCompletion]:
        """Return and record the responses to all requests. If one fails or the call is cancelled, none is recorded.
        Raises CallLimitReached after the end of the episode, or if fewer calls remain than requested."""
        with self._lock:
            if self._closed:
                raise CallLimitReached("the episode is over")
            if self.calls + len(requests) > self._most:
                self.limit = CALLS
                remaining = self._most - self.calls
                shortage = (
                    f"; this request is for {len(requests)} answers, and {remaining} are left" if remaining else ""
                )
                raise CallLimitReached(f"the episode has made its {self._most} calls (agent.max_turns){shortage}")
            self.calls += len(requests)
            numbers = [self._number(request) for request in requests]
            self._idle_starts += not self._running
            began = self._idle_starts
            task = asyncio.current_task()
            assert task is not None
            self._running[task] = asyncio.get_running_loop()
        delivered = False
        try:
            seeded = [self._with_seed(request, *number) for request, number in zip(requests, numbers, strict=True)]
            completions = await gather_completions(self._engine.chat, seeded)
            with self._lock:
                if self._closed:
                    raise CallLimitReached("the episode is over")
                delivered = True
                for request, completion in zip(requests, completions, strict=True):
                    self._record(request, completion, began)
        except ContextOverflow:
            self.limit = CONTEXT
            raise
        except CallLimitReached:
            raise
        except (EngineError, ResourceError, SpecError) as error:
            self.failed = error
            raise
        finally:
            self._running.pop(task, None)
            if not delivered:
                with self._lock:
                    for content, number in numbers:
                        self._asked[content].remove(number)
        self.failed = self.limit = None
        return completions

    def _number(self, request: ChatRequest) -> tuple[str, int]:
        """Return the digest of the request's content and its lowest free draw number. Repeating a cancelled request
        reuses its number and so gets the same response."""
        content: list[Any] = [request.messages, request.tools] + ([] if request.agent == MAIN else [request.agent])
        if request.form != FREE:
            content.append(asdict(request.form))
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        taken = self._asked[digest]
        number = next(number for number in range(len(taken) + 1) if number not in taken)
        taken.add(number)
        return digest, number

    def _with_seed(self, request: ChatRequest, content: str, number: int) -> ChatRequest:
        """Return the request with the collector's policy, sampling parameters, seed and episode."""
        digest = hashlib.sha256(f"{self._seed}/{content}/{number}".encode()).digest()
        limit = min(request.sampling.max_tokens, self._sampling.max_tokens)
        return replace(
            request,
            policy=self._engine.policy,
            sampling=replace(self._sampling, max_tokens=limit),
            seed=int.from_bytes(digest[:6], "big"),
            episode=self._name,
        )

    def _record(self, request: ChatRequest, completion: ChatCompletion, began: int) -> None:
        history = self.recorder.record(request.messages, completion, request.agent)
        self._began.setdefault(id(history), began)
        if request.tools:
            self._offered.setdefault(id(history), list(request.tools))
        self.sampled_arguments |= {call["function"]["arguments"] for call in completion.message.get("tool_calls") or []}
        self.answers += 1
        self.sampled += completion.sampled_tokens
        self.truncated += completion.finish_reason == "length"
        self.constrained += completion.altered
        self.usage.add(completion)

    def close(self) -> None:
        """Stop recording and cancel running calls."""
        with self._lock:
            self._closed = True
        for task, loop in list(self._running.items()):
            loop.call_soon_threadsafe(task.cancel)
