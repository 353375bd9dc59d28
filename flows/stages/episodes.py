"""Rollouts in a stage: the engine stays loaded between stages, and finished episodes survive if the stage dies."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.artifacts import Artifact
from components.errors import (
    BoundaryError,
    EnvironmentFailed,
    EnvironmentUnavailable,
    Problem,
    SpecError,
    TooManyFailures,
)
from components.exceptions import described, is_foreign, log_traceback, passes
from components.inference.protocol import BASE_POLICY, Engine, ModelEngine
from components.inference.spec import EmbeddedSpec, InferenceSpec
from components.models.spec import ModelSpec
from components.rollout.agent import AgentLoop
from components.rollout.collect_spec import CollectSpec
from components.rollout.collector import EpisodeListener
from components.rollout.players.player import Agent, SecondModel
from components.rollout.players.roles import PlannerAndWorkers
from components.rollout.request import EpisodeRequest
from components.rollout.spec import AgentSpec, EpisodeLimits
from components.specs import Target
from components.trajectories.schema import Scenario, Trajectory
from flows.stages.base import Context
from flows.stages.episode_figures import figures
from flows.stages.finished import FinishedEpisodes, StoredEpisodes

if TYPE_CHECKING:
    from components.rollout.live_view import LiveProgress


def scenarios_of(environment: Target, split: str, context: Context) -> Sequence[Scenario]:
    """Return all scenarios of a split. Raises SpecError if there are none, EnvironmentUnavailable if the environment is
    unreachable, and EnvironmentFailed if `scenarios` raises."""

    def build() -> Sequence[Scenario]:
        try:
            instance = environment.build()
            scenarios = _result(instance.scenarios(split))
            scenarios = scenarios if isinstance(scenarios, Sequence) else list(scenarios)
            _result(instance.close())
            return scenarios
        except BaseException as error:
            if not is_foreign(error, BoundaryError):
                raise
            log_traceback(error)
            text = f"{environment.target}.scenarios() raised {described(error)}"
            raise (EnvironmentUnavailable if passes(error) else EnvironmentFailed)(text) from error

    scenarios: Sequence[Scenario] = context.warm.get(f"scenarios/{split}", _recipe(environment), build)
    if not scenarios:
        raise SpecError([Problem("environment", f"{environment.target} has no scenarios in the split '{split}'")])
    return scenarios


def _recipe(environment: Target) -> list[Any]:
    """Return what instances of an environment are built from: its arguments, and the content of files that it reads."""
    return [environment.model_dump(), environment.resolved()]


def _result(value: Any) -> Any:
    """Return the result of a sync or async method."""

    async def awaited() -> Any:
        return await value

    return asyncio.run(awaited()) if inspect.isawaitable(value) else value


@dataclass(frozen=True)
class Actor:
    """Model that plays, and how it generates."""

    model: ModelSpec
    inference: InferenceSpec
    policy: Artifact | None = None
    """Checkpoint that the model plays with; None: the base model."""
    adapter: Path | None = None
    """PEFT folder of a policy that is not an artifact."""
    random: bool = False
    """True: actions are drawn at random, without a model."""

    def engine(self, context: Context, kind: str = "engine") -> ModelEngine:
        """Return the loaded engine. kind: name in the cache of loaded engines."""
        if self.random:
            from components.rollout.random_agent import RandomEngine

            return RandomEngine()
        return warm_engine(self.model, self.policy, context, self.inference, self.adapter, kind)


class _StageListener(EpisodeListener):
    """Receiver of the events of a stage's collection. requested: ids of the episodes that are not derived from
    others."""

    def __init__(self, episodes: FinishedEpisodes, live: LiveProgress, requested: set[str], context: Context):
        self.retries = 0
        self._on_episode = context.on_episode or (lambda trajectory: None)
        self._episodes = episodes
        self._live = live
        self._requested = requested

    def begin(self, name: str, engine: Engine) -> Engine:
        return self._live.begins(name, engine)

    def end(self, trajectory: Trajectory, seconds: float) -> None:
        self._episodes.add(trajectory, seconds)
        if trajectory.id in self._requested:
            self._live.ended(trajectory)
        else:
            self._live.follows(trajectory)
        self._on_episode(trajectory)

    def retry(self, error: EnvironmentUnavailable) -> None:
        self.retries += 1


def play(
    actor: Actor,
    environment: Target,
    agent: AgentSpec,
    requests: Sequence[EpisodeRequest],
    limits: EpisodeLimits,
    context: Context,
    *,
    description: Mapping[str, Any],
    collect: CollectSpec | None = None,
) -> tuple[StoredEpisodes, dict[str, float], dict[str, float]]:
    """Play the episodes of a stage. Finished ones are on disk, and only there.

    description: stage and text for live views (`flows.history.live_view`). collect: selects the player;
    None: one attempt per episode.

    Return the trajectories in order, the wall-clock seconds of each by id, and throughput metrics. Raises
    TooManyFailures.
    """
    from components.rollout.collector import play_episodes
    from components.rollout.live_view import FILE, LiveProgress
    from components.rollout.pool import EnvironmentPool

    assert context.scratch is not None
    plain, collect = collect is None, collect or CollectSpec()
    episodes = FinishedEpisodes(context.scratch)
    requested = {request.id for request in requests}
    finished = episodes.finished
    resumed = episodes.read([name for name in finished if name in requested])
    if plain and len(resumed) == len(requested):  # only their judgement is missing: no engine is loaded
        context.progress(len(resumed), len(requested))
        if context.on_episode is not None:
            for trajectory in resumed:
                context.on_episode(trajectory)
        names = [request.id for request in requests]
        speed = {"seconds": 0.0, "tokens_per_s": 0.0, "resumed": float(len(names)), "retried": 0.0}
        return episodes.read(names), {name: round(episodes.seconds[name], 4) for name in names}, speed
    context.progress(len(resumed), len(requested), {"loading": 1.0})
    engine = actor.engine(context)
    second = _second_engine(collect.player.second_model(actor.model, actor.inference), context)
    pool = context.warm.get("environments", _recipe(environment), lambda: EnvironmentPool(environment.build))
    start = time.monotonic()
    live = LiveProgress(description, len(requested), context.progress, context.scratch / FILE, resumed, context.watch)
    listener = _StageListener(episodes, live, requested, context)
    if context.on_episode is not None:
        for trajectory in resumed:
            context.on_episode(trajectory)
    try:
        with _agent(agent, engine, limits.timeout, random=actor.random) as performer:
            player = collect.player.build(performer, engine, second, collect.group_size)
            names = play_episodes(engine, pool, requests, limits, player=player, finished=finished, listener=listener)
    except TooManyFailures as error:
        remedy = (
            f"The same command retries the failed episodes; {description['stage']}.max_failures sets how many may fail"
        )
        raise TooManyFailures(f"{description['what']}: {error}. {remedy}") from None
    finally:
        episodes.flush()
        live.close()
        for used in (engine, second):
            if used is not None:
                used.release()  # the trainer needs the memory, and the KV cache is useless for the next policy
    elapsed = time.monotonic() - start
    trajectories = episodes.read(names)
    new = episodes.read([name for name in names if name not in finished])
    sampled = sum(count for name, count in figures(new).items() if name.endswith("sampled_tokens"))
    speed = {"seconds": elapsed, "tokens_per_s": sampled / elapsed, "resumed": float(len(finished))}
    speed["retried"] = float(listener.retries)
    return trajectories, {name: round(value, 4) for name, value in episodes.seconds.items()}, speed


def _second_engine(model: SecondModel | None, context: Context) -> ModelEngine | None:
    if model is None:
        return None
    return Actor(model.model, model.inference, adapter=model.adapter).engine(context, model.kind)


@contextmanager
def _agent(spec: AgentSpec, engine: Any, timeout: float, *, random: bool) -> Iterator[Agent]:
    """Provide the agent of a stage; that of `agent.function` and `agent.command` with its endpoint."""
    if random:
        from components.rollout.random_agent import RandomAgent

        yield RandomAgent(spec.max_observation)
    elif spec.own is not None:
        from components.inference.app import AppOptions
        from components.inference.server import ModelServer
        from components.rollout.command_agent import CommandAgent
        from components.rollout.own_agent import MODEL, OwnAgent

        function = spec.function.build() if spec.function is not None else CommandAgent(spec.command or [])
        engines: dict[str, Any] = {}
        options = AppOptions(engines=engines, timeout=timeout, default_max_tokens=spec.max_tokens)
        with ModelServer(engine, MODEL, options) as server:
            yield OwnAgent(function, server.url, engines)
    elif spec.roles is not None:
        yield PlannerAndWorkers(spec.presentation(), spec.roles)
    else:
        yield AgentLoop(spec.presentation())


def write_times(path: Path, seconds: dict[str, float]) -> None:
    """Write the wall-clock seconds of each episode by id, in a separate file so that equal episodes stay equal data."""
    path.write_text(json.dumps(seconds, indent=0, sort_keys=True) + "\n")


def warm_engine(
    model: ModelSpec,
    policy: Artifact | None,
    context: Context,
    inference: InferenceSpec | None = None,
    adapter: Path | None = None,
    kind: str = "engine",
) -> ModelEngine:
    """Return the engine with the policy loaded (None: the base model, or `adapter` on it). inference: None means
    embedded. kind: name in the cache of loaded engines; each engine holds one policy. A policy with an adapter for each
    role has an engine that reads the `agent` of each request."""
    from components.algorithms.train import policy_digest
    from components.models import trained_weights

    engine_spec = inference or EmbeddedSpec()
    folder = None if policy is None else trained_weights.folder_of(policy.path)
    roles = [] if folder is None else list(trained_weights.role_folders(folder))

    def build() -> ModelEngine:
        return engine_spec.build_roles(model, context, roles) if roles else engine_spec.build(model, context)

    recipe = (model.base(), model.content(), engine_spec.model_dump(), roles)
    engine: ModelEngine = context.warm.get(kind, recipe, build)
    if adapter is not None:
        engine.load_policy(trained_weights.digest(adapter), str(adapter))
    elif policy is None:
        engine.load_policy(BASE_POLICY, None)
    else:
        engine.load_policy(policy_digest(policy.path), str(folder))
    return engine
