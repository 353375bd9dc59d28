"""An engine that records what it says to one episode of somebody's agent.

The agent talks to an OpenAI-compatible endpoint; every call comes here. What is sampled is recorded as it was sampled,
however many conversations the agent leads: a call whose prompt extends what was said before goes on in that history,
any other begins one (a sub-agent, a compacted context, a second answer to the same question). Agents that give
themselves names (`ChatRequest.agent`) never go on in each other's.

The distribution that is sampled from is the collector's, whatever the agent asks for: else what is trained on would
not be what was sampled. The seed of a call follows from the episode's and from what is asked, so that calls at the same
time may come in any order; histories that begin at the same time are put in the order of what they say.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from components.errors import CallsUsedUp, ContextOverflow, EngineError, ResourceError, SpecError
from components.inference.protocol import MAIN, ChatCompletion, ChatRequest, Engine, Sampling, all_answers
from components.rollout.recorder import Recorder
from components.trajectories.schema import History


class Capture:
    """Answers as `engine` does, under its policy. most_calls: after so many it refuses, and `exhausted` is true."""

    def __init__(self, engine: Engine, sampling: Sampling, seed: int, most_calls: int):
        self.recorder = Recorder()
        self.calls = self.answers = self.sampled = self.truncated = 0
        self.exhausted = False
        self.failed: Exception | None = None
        """What the engine raised at the last call; None where it answered. A conversation that is too long is the
        agent's own affair."""
        self.spoken: set[str] = set()
        """Arguments of the calls that the policy wrote. The agent hands them back as they are, readable or not."""
        self._engine = engine
        self._sampling = sampling
        self._seed = seed
        self._most = most_calls
        self._asked: defaultdict[str, set[int]] = defaultdict(set)
        self._running: dict[asyncio.Task[Any], asyncio.AbstractEventLoop] = {}
        self._quiet = 0
        """Calls that were made while no other was under way."""
        self._began: dict[int, int] = {}
        """By identity of a history: that count when it began."""
        self._offered: dict[int, list[dict[str, Any]]] = {}
        """By identity of a history: the tools of its first call that had any."""
        self._name = uuid.uuid4().hex
        self._closed = False
        self._lock = threading.Lock()

    @property
    def histories(self) -> list[History]:
        """In the order in which they began; those that began while others were under way by who spoke and what."""

        def place(one: History) -> tuple[Any, ...]:
            said = [(message.role, message.content) for message in one.messages]
            return self._began[id(one)], one.agent, len(said), one.token_ids, said

        return sorted(self.recorder.histories, key=place)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Those of the first history that had any."""
        return next((found for one in self.histories if (found := self._offered.get(id(one)))), [])

    @property
    def policy(self) -> str:
        return self._engine.policy

    def load_policy(self, version: str, folder: str | None) -> None:
        raise EngineError("an agent does not choose the policy")

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        """As `chat_all`, for one."""
        return (await self.chat_all([request]))[0]

    async def chat_all(self, requests: Sequence[ChatRequest]) -> list[ChatCompletion]:
        """Answers all or none: what nobody hears is not recorded, whether one of them failed or the call was given up.
        Raises CallsUsedUp after the end of the episode, and where it has not so many calls left."""
        with self._lock:
            if self._closed:
                raise CallsUsedUp("the episode is over")
            if self.calls + len(requests) > self._most:
                self.exhausted = True
                left = self._most - self.calls
                some = f"; this request is for {len(requests)} answers, and {left} are left" if left else ""
                raise CallsUsedUp(f"the episode has made its {self._most} calls (agent.max_turns){some}")
            self.calls += len(requests)
            numbers = [self._number(request) for request in requests]
            self._quiet += not self._running
            began = self._quiet
            task = asyncio.current_task()
            assert task is not None
            self._running[task] = asyncio.get_running_loop()
        heard = False
        try:
            drawn = [self._drawn(request, *number) for request, number in zip(requests, numbers, strict=True)]
            found = await all_answers(self._engine.chat, drawn)
            with self._lock:
                if self._closed:
                    raise CallsUsedUp("the episode is over")
                heard = True
                for request, completion in zip(requests, found, strict=True):
                    self._record(request, completion, began)
        except (ContextOverflow, CallsUsedUp):
            raise
        except (EngineError, ResourceError, SpecError) as error:
            self.failed = error
            raise
        finally:
            self._running.pop(task, None)
            if not heard:
                with self._lock:
                    for asked, number in numbers:
                        self._asked[asked].remove(number)
        self.failed = None
        return found

    def _number(self, request: ChatRequest) -> tuple[str, int]:
        """What is asked, and the lowest number of a draw that nobody has heard or waits for: who asks again for what
        was given up is told the same."""
        what = [request.messages, request.tools] + ([] if request.agent == MAIN else [request.agent])
        asked = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
        taken = self._asked[asked]
        number = next(number for number in range(len(taken) + 1) if number not in taken)
        taken.add(number)
        return asked, number

    def _drawn(self, request: ChatRequest, asked: str, number: int) -> ChatRequest:
        """The request as the collector makes it."""
        digest = hashlib.sha256(f"{self._seed}/{asked}/{number}".encode()).digest()
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
        self.spoken |= {call["function"]["arguments"] for call in completion.message.get("tool_calls") or []}
        self.answers += 1
        self.sampled += len(completion.token_ids)
        self.truncated += completion.finish_reason == "length"

    def close(self) -> None:
        """Nothing is recorded any more, and calls under way are given up."""
        with self._lock:
            self._closed = True
        for task, loop in list(self._running.items()):
            loop.call_soon_threadsafe(task.cancel)
