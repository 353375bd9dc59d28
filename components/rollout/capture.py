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
from collections import Counter
from dataclasses import replace
from typing import Any

from components.errors import ContextOverflow, EngineError, ResourceError, SpecError
from components.inference.protocol import MAIN, ChatCompletion, ChatRequest, Engine, Sampling
from components.rollout.recorder import Recorder
from components.trajectories.schema import History


class Capture:
    """Answers as `engine` does, under its policy. most_calls: after so many it refuses, and `exhausted` is true."""

    def __init__(self, engine: Engine, sampling: Sampling, seed: int, most_calls: int):
        self.recorder = Recorder()
        self.calls = self.sampled = self.truncated = 0
        self.exhausted = False
        self.failed: Exception | None = None
        """What the engine raised at the last call; None where it answered. A conversation that is too long is the
        agent's own affair."""
        self.tools: list[dict[str, Any]] = []
        """Those of the first call that had any."""
        self._engine = engine
        self._sampling = sampling
        self._seed = seed
        self._most = most_calls
        self._asked: Counter[str] = Counter()
        self._running: dict[asyncio.Task[Any], asyncio.AbstractEventLoop] = {}
        self._quiet = 0
        """Calls that were made while no other was under way."""
        self._began: dict[int, int] = {}
        """By identity of a history: that count when it began."""
        self._closed = False
        self._lock = threading.Lock()

    @property
    def histories(self) -> list[History]:
        """In the order in which they began."""
        said = {id(one): [(each.role, each.content) for each in one.messages] for one in self.recorder.histories}
        return sorted(
            self.recorder.histories,
            key=lambda one: (self._began[id(one)], one.agent, one.token_ids, said[id(one)]),
        )

    @property
    def policy(self) -> str:
        return self._engine.policy

    def load_policy(self, version: str, folder: str | None) -> None:
        raise EngineError("an agent does not choose the policy")

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        """Raises EngineError after the end of the episode and after the last call that it may make."""
        with self._lock:
            if self._closed:
                raise EngineError("the episode is over")
            if self.calls >= self._most:
                self.exhausted = True
                raise EngineError(f"the episode has made its {self._most} calls (agent.max_turns)")
            self.calls += 1
            what = [request.messages, request.tools] + ([] if request.agent == MAIN else [request.agent])
            asked = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
            number = self._asked[asked]
            self._asked[asked] += 1
            self._quiet += not self._running
            began = self._quiet
            task = asyncio.current_task()
            assert task is not None
            self._running[task] = asyncio.get_running_loop()
        digest = hashlib.sha256(f"{self._seed}/{asked}/{number}".encode()).digest()
        limit = min(request.sampling.max_tokens, self._sampling.max_tokens)
        try:
            completion = await self._engine.chat(
                replace(
                    request,
                    policy=self._engine.policy,
                    sampling=replace(self._sampling, max_tokens=limit),
                    seed=int.from_bytes(digest[:6], "big"),
                )
            )
        except ContextOverflow:
            raise
        except (EngineError, ResourceError, SpecError) as error:
            self.failed = error
            raise
        finally:
            self._running.pop(task, None)
        self.failed = None
        with self._lock:
            if self._closed:
                raise EngineError("the episode is over")
            self.tools = self.tools or list(request.tools)
            history = self.recorder.record(request.messages, completion, request.agent)
            self._began.setdefault(id(history), began)
            self.sampled += len(completion.token_ids)
            self.truncated += completion.finish_reason == "length"
        return completion

    def close(self) -> None:
        """Nothing is recorded any more, and calls under way are given up."""
        with self._lock:
            self._closed = True
        for task, loop in list(self._running.items()):
            loop.call_soon_threadsafe(task.cancel)
