"""Environments and engines that do what a test asks for. The engines speak the real protocol."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from components.environments.protocol import Environment, Step
from components.inference.protocol import BASE_POLICY, ChatCompletion, ChatRequest, Engine, Sampling
from components.rollout.agent import AgentLoop
from components.rollout.collector import EpisodeListener, play_episodes
from components.rollout.formats import Presentation
from components.rollout.players.player import Player
from components.rollout.pool import EnvironmentPool
from components.rollout.request import EpisodeRequest, episode_requests
from components.rollout.spec import EpisodeLimits
from components.trajectories.schema import Scenario, Trajectory

if TYPE_CHECKING:
    from components.rollout.own_agent import OwnAgent

TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]


def discard_litellm_clients() -> None:
    """Drop the clients that LiteLLM keeps of ended event loops and never closes, under the filters of this test."""
    import litellm

    litellm.in_memory_llm_clients_cache.flush_cache()
    gc.collect()


def scenarios(count: int) -> list[Scenario]:
    return [Scenario(f"s{index}", {"number": index}, "train") for index in range(count)]


class Echo:
    """Two turns: asks, hears, and is content. `break_at` maps a place to what happens there."""

    made: list[Echo] = []

    def __init__(self, **break_at: Callable[[], Any]):
        self.break_at = break_at
        self.closed = False
        self.said: list[str] = []
        Echo.made.append(self)

    def _at(self, place: str, answer: Any) -> Any:
        return self.break_at[place]() if place in self.break_at else answer

    def scenarios(self, split: str) -> list[Scenario]:
        return scenarios(4) if split == "train" else []

    def tools(self) -> list[dict[str, Any]]:
        return self._at("tools", TOOLS)

    def reset(self, scenario: Scenario) -> list[dict[str, Any]]:
        self.scenario = scenario
        self.said = []
        return self._at("reset", [{"role": "user", "content": f"Say {scenario.input['number']}."}])

    def step(self, action: dict[str, Any]) -> Step:
        self.said.append(action["content"])
        done = len(self.said) == 2
        observation = [] if done else [{"role": "user", "content": "Again."}]
        return self._at("step", Step(observation, 0.5, done, {"success": done, "said": list(self.said)}))

    def close(self) -> None:
        self.closed = True
        self._at("close", None)


class AsyncEcho(Echo):
    """The same with awaited methods, as an environment behind a network has."""

    async def tools(self):
        await asyncio.sleep(0)
        return super().tools()

    async def reset(self, scenario):
        await asyncio.sleep(0.001)
        return super().reset(scenario)

    async def step(self, action):
        await asyncio.sleep(0.001)
        return super().step(action)

    async def close(self):
        await asyncio.sleep(0.001)
        super().close()

    async def solve(self, scenario):
        await asyncio.sleep(0)
        return [{"role": "assistant", "content": "one"}, {"role": "assistant", "content": "two"}]


class Parrot:
    """Says the seed of the request. A token is a character; a turn extends the tokens of the turn before."""

    policy = BASE_POLICY

    def __init__(self, *, seconds: float = 0.0, fail: Callable[[ChatRequest], Any] | None = None):
        self.seconds = seconds
        self.fail = fail
        self.requests: list[ChatRequest] = []

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        self.requests.append(request)
        await asyncio.sleep(self.seconds)
        if self.fail is not None:
            self.fail(request)
        prompt = [ord(letter) for message in request.messages for letter in message["content"]]
        said = str(request.seed)
        ids = [ord(letter) for letter in said]
        message = {"role": "assistant", "content": said}
        return ChatCompletion(message, "stop", prompt, ids, [-0.25] * len(ids), self.policy)

    def load_policy(self, version: str, adapter_dir: str | None) -> None:
        self.policy = version

    def close(self) -> None:
        pass


class Listener(EpisodeListener):
    """Holds the trajectories by id, and passes events on to functions."""

    def __init__(self, held=None, on_begin=None, on_episode=None, on_retry=None):
        self.held: dict[str, Trajectory] = dict(held or {})
        self.on_begin, self.on_episode, self.on_retry = on_begin, on_episode, on_retry

    def begin(self, name, engine):
        return self.on_begin(name, engine) if self.on_begin else engine

    def end(self, trajectory, seconds):
        self.held[trajectory.id] = trajectory
        if self.on_episode:
            self.on_episode(trajectory, seconds)

    def retry(self, error):
        if self.on_retry:
            self.on_retry(error)


def run_episodes(
    engine: Engine,
    environments: EnvironmentPool | Callable[[], Environment],
    requests: Sequence[EpisodeRequest],
    limits: EpisodeLimits,
    *,
    player: Player | None = None,
    finished: Mapping[str, Trajectory] | None = None,
    **events: Callable[..., Any],
) -> list[Trajectory]:
    """Play all episodes and return their trajectories, in the order of `play_episodes`. events: of `Listener`."""
    listener = Listener(finished, **events)
    names = play_episodes(engine, environments, requests, limits, player=player, finished=finished, listener=listener)
    return [listener.held[name] for name in names]


REQUEST = ("sampling", "max_turns", "seed", "temperature_step")


def collect(engine: Any, make: Any, jobs: list[Scenario], group_size: int = 2, **options: Any) -> list[Trajectory]:
    """Play episodes with the options of `episode_requests`, `EpisodeLimits` and `run_episodes`."""
    options = {"sampling": Sampling(max_tokens=8), "max_turns": 4, "seed": 0} | options
    requests = episode_requests(jobs, group_size, **{name: options.pop(name) for name in REQUEST if name in options})
    limits = {name: options.pop(name) for name in EpisodeLimits.model_fields if name in options}
    limits = EpisodeLimits(**{"concurrency": 3, "max_failures": 1000, "retries": 0} | limits)
    return run_episodes(engine, make, requests, limits, **options)


async def play(
    engine: Any,
    environment: Any,
    scenario: Scenario,
    *,
    presentation: Presentation | None = None,
    **options: Any,
) -> Trajectory:
    """Play one episode of the agent loop with the options of `EpisodeRequest`."""
    request = EpisodeRequest(scenario=scenario, **{"sample": 0, "seed": 0, "sampling": Sampling()} | options)
    return await AgentLoop(presentation).play(engine, environment, request)


@contextmanager
def endpoint(engine: Any, function: Callable[..., Any]) -> Iterator[tuple[OwnAgent, str, dict[str, Any]]]:
    """Provide an agent of one's own, its URL, and the engines by key."""
    from components.inference.app import AppOptions
    from components.inference.server import ModelServer
    from components.rollout.own_agent import MODEL, OwnAgent

    engines: dict[str, Any] = {}
    with ModelServer(engine, MODEL, AppOptions(engines=engines, timeout=600)) as server:
        yield OwnAgent(function, server.url, engines), server.url, engines
