"""The concurrent collector of episodes.

Each request is one episode. Episodes that finished in an earlier attempt of the stage are reused. A failed
episode is a trajectory with a failure. If more episodes fail than allowed, the collector stops and reports the first
causes. Cancellation stops all episodes at once and counts as no failure.

Each episode has exclusive use of an environment instance (`pool`). If the environment is temporarily unreachable, the
episode is retried from its start with the same seed. An instance that cannot be built is an environment failure; only a
user error (SpecError, ResourceError) ends the collection.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

from components.aio import run
from components.environments.protocol import Environment, Solver, Step
from components.errors import (
    EnvironmentFailed,
    EnvironmentUnavailable,
    Problem,
    SpecError,
    TooManyFailures,
    WaitTimeout,
)
from components.inference.protocol import Engine
from components.retry import Backoff
from components.rollout import formats
from components.rollout.agent import AgentLoop, as_messages, as_step, ask
from components.rollout.formats import Presentation
from components.rollout.observations import cleaned
from components.rollout.players.player import Player
from components.rollout.players.roles import demonstrate_roles
from components.rollout.pool import EnvironmentPool, close
from components.rollout.request import EpisodeRequest
from components.rollout.spec import EpisodeLimits, RolesSpec
from components.rollout.tool_schemas import as_tools
from components.trajectories.convert import to_message
from components.trajectories.failures import failure_kinds
from components.trajectories.groups import misnamed
from components.trajectories.parts import SOLVER
from components.trajectories.schema import Failure, History, Scenario, Trajectory


class EpisodeListener:
    """Receiver of the events of a collection. This one ignores them."""

    def begin(self, name: str, engine: Engine) -> Engine:
        """Receive the start or retry of an episode. Return the engine for it and the episodes derived from it."""
        return engine

    def end(self, trajectory: Trajectory, seconds: float) -> None:
        """Receive a new trajectory and its duration, without the time spent waiting for an environment."""

    def retry(self, error: EnvironmentUnavailable) -> None:
        """Receive the cause of a retry."""


logger = logging.getLogger(__name__)

GC_THRESHOLD = 20_000
"""Generation 0 threshold of the garbage collector while episodes run."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Delay in seconds before an episode is retried: initial and maximum."""


def choose_scenarios(available: Sequence[Scenario], count: int, round_: int, seed: int) -> list[Scenario]:
    """Return the `count` scenarios of a round.

    The seed determines an order of all scenarios. Each round continues where the previous one ended; a new order begins
    after the last scenario. A round has no scenario twice, and no scenario repeats before all have been drawn. Every
    segment of the order contains each type and difficulty in proportion to its share, within one. Raises SpecError if
    there are fewer than `count` scenarios.
    """
    if count > len(available):
        raise SpecError([Problem("collect.scenarios", f"is {count}, but the split has {len(available)} scenarios")])
    kinds = _kinds(available)
    drawn: list[int] = []
    epoch = 0
    while len(drawn) < (round_ + 1) * count:
        order = _mixed(kinds, random.Random(f"{seed}-{epoch}"))
        # The current round already has some scenarios: they move to later places of this order.
        present = set(drawn[len(drawn) - len(drawn) % count :])
        new = [index for index in order if index not in present][: count - len(present)] if present else []
        first = set(new)
        drawn += new + [index for index in order if index not in first]
        epoch += 1
    return [available[index] for index in drawn[round_ * count : (round_ + 1) * count]]


def choose_further(
    available: Sequence[Scenario], count: int, round_: int, seed: int, *, begin: int, more: int
) -> list[Scenario]:
    """Return up to `more` scenarios that are not among the `count` of a round, in an order specific to that round,
    starting at position `begin`."""
    drawn = {scenario.id for scenario in choose_scenarios(available, count, round_, seed)}
    order = _mixed(_kinds(available, drawn), random.Random(f"{seed}-further-{round_}"))
    return [available[index] for index in order[begin : begin + more]]


def _kinds(scenarios: Iterable[Scenario], excluded: Container[str] = ()) -> dict[tuple[str, int], list[int]]:
    """Return the indices of the scenarios by type and difficulty, without those of the excluded ids. Scenarios may be
    more than fit into memory."""
    kinds: dict[tuple[str, int], list[int]] = defaultdict(list)
    for index, scenario in enumerate(scenarios):
        if scenario.id not in excluded:
            kinds[scenario.type, scenario.difficulty].append(index)
    return kinds


def _mixed(kinds: Mapping[tuple[str, int], Sequence[int]], rng: random.Random) -> list[int]:
    """Return the indices in random order, those of each type and difficulty evenly spaced (systematic sampling)."""
    placed = []
    for kind in sorted(kinds):
        members, offset = list(kinds[kind]), rng.random()
        rng.shuffle(members)
        placed += [((place + offset) / len(members), index) for place, index in enumerate(members)]
    return [index for _, index in sorted(placed, key=lambda pair: pair[0])]


def play_episodes(
    engine: Engine,
    environments: EnvironmentPool | Callable[[], Environment],
    requests: Sequence[EpisodeRequest],
    limits: EpisodeLimits,
    *,
    player: Player | None = None,
    finished: Mapping[str, Trajectory] | None = None,
    listener: EpisodeListener | None = None,
) -> list[str]:
    """Play all episodes and return their ids. The listener receives each finished episode; none of them is held here.

    They have the order of the requests; episodes derived from others (`player`) come after the group of these. Raises
    TooManyFailures, and SpecError if two scenarios have the same id.

    environments: pool of instances, or a factory of one. requests: episodes; the time limits in `limits` replace
    theirs. player: way of playing an episode; None: the agent loop, once. finished: trajectories of earlier attempts of
    the stage by id, which are not played again.
    """
    if len({request.id for request in requests}) < len(requests):
        raise SpecError([Problem("environment", "gives the same id to several scenarios; ids must be unique")])
    if (problem := misnamed(request.scenario for request in requests)) is not None:
        raise SpecError([Problem("environment", problem)])
    pool = environments if isinstance(environments, EnvironmentPool) else EnvironmentPool(environments)
    pool.most = limits.environments
    collection = _Collection(
        engine, pool, requests, limits, player or Player(AgentLoop()), finished or {}, listener or EpisodeListener()
    )
    try:
        with raised_gc_threshold():
            run(collection.play_all())
    finally:
        if pool is not environments:
            pool.close()
    groups: dict[str, list[_Played]] = {}
    for played in collection.played():
        groups.setdefault(played.group, []).append(played)
    return [played.id for group in groups.values() for played in sorted(group, key=lambda member: member.sample)]


class _Played(NamedTuple):
    """A finished episode."""

    id: str
    group: str
    sample: int


@dataclass
class _Collection:
    """A running collection: the ids of its finished episodes, and the failures."""

    engine: Engine
    pool: EnvironmentPool
    requests: Sequence[EpisodeRequest]
    limits: EpisodeLimits
    player: Player
    finished: Mapping[str, Trajectory]
    """Trajectories of earlier attempts of the stage, by id."""
    listener: EpisodeListener

    def __post_init__(self) -> None:
        self.pending = iter(self.requests)
        self.done: dict[str, list[_Played]] = {}
        """Episodes by id, each with those derived from it."""
        self.failed: list[tuple[str, Failure]] = []
        """Ids and failures of failed episodes."""
        self.allowed = failures_allowed(self.limits.max_failures, len(self.requests))
        self.player.begin(self.requests, self.finished)

    def played(self) -> Iterator[_Played]:
        """Yield all episodes in the order of the requests, each followed by those derived from it."""
        return (played for request in self.requests for played in self.done[request.id])

    async def play_all(self) -> None:
        """Play all episodes, `limits.concurrency` at a time."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self.limits.concurrency, len(self.requests))):
                    group.create_task(self._play_pending())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            await self.pool.end_stage()

    async def _play_pending(self) -> None:
        for request in self.pending:
            if (first := self.finished.get(request.id)) is not None:
                names = [first.id, *self.player.following(first)]
                if all(name in self.finished for name in names):
                    self._record([self.finished[name] for name in names])
                    continue
            trajectories, seconds = await self._play_with_retries(request)
            for trajectory in trajectories:
                self.listener.end(trajectory, seconds)
            self._record(trajectories)
            self.player.record(trajectories[0])

    def _record(self, trajectories: list[Trajectory]) -> None:
        """Record an episode and those derived from it. Together they count as at most one failure."""
        self.done[trajectories[0].id] = [_Played(t.id, t.group, t.sample) for t in trajectories]
        failed = self.failed
        failed.extend([(t.id, t.failure) for t in trajectories if t.failure is not None][:1])
        if len(failed) > self.allowed:
            kinds = failure_kinds(failed)
            raise TooManyFailures(
                f"{len(failed)} of {len(self.requests)} episodes failed, more than the {self.allowed} that "
                f"max_failures={self.limits.max_failures:g} of this stage allows. {'. '.join(map(str, kinds))}"
            )

    async def _play_with_retries(self, request: EpisodeRequest) -> tuple[list[Trajectory], float]:
        """Return an episode with those derived from it, and its duration in seconds."""
        limits, backoff = self.limits, Backoff(first=FIRST_PAUSE, longest=LONGEST_PAUSE)
        request = replace(request, timeout=limits.timeout, step_timeout=limits.step_timeout)
        for remaining in range(limits.retries, 0, -1):
            try:
                return await self._play(replace(request, raise_unreachable=True))
            except EnvironmentUnavailable as error:
                wait = backoff.pause()
                assert wait is not None  # without a limit of time
                logger.info("%s is retried in %.1f s, %d retries left: %s", request.id, wait, remaining, error)
                self.listener.retry(error)
            await asyncio.sleep(wait)
        return await self._play(request)

    async def _play(self, request: EpisodeRequest) -> tuple[list[Trajectory], float]:
        agent = self.player.agent
        if not agent.needs_environment:
            unused: Any = None
            return await self._play_in(unused, request)
        async with AsyncExitStack() as stack:
            try:
                lease = await stack.enter_async_context(self.pool.lease())
            except EnvironmentFailed as error:
                if request.raise_unreachable and isinstance(error, EnvironmentUnavailable):
                    raise
                return [_without_environment(request, self.engine.policy, error)], 0.0
            trajectories, seconds = await self._play_in(lease.environment, request)
            failures = [trajectory.failure for trajectory in trajectories if trajectory.failure is not None]
            if agent.holds_environment:
                lease.reusable = not failures
                lease.abandoned = any(failure.kind == WaitTimeout.__name__ for failure in failures)
            else:
                lease.reusable = all(failure.boundary != EnvironmentFailed.boundary for failure in failures)
            return trajectories, seconds

    async def _play_in(self, environment: Environment, request: EpisodeRequest) -> tuple[list[Trajectory], float]:
        started = time.monotonic()
        engine = self.listener.begin(request.id, self.engine)
        return await self.player.play(engine, environment, request), time.monotonic() - started


def _without_environment(request: EpisodeRequest, policy: str, error: EnvironmentFailed) -> Trajectory:
    """Return the failed trajectory of an episode whose environment could not be built."""
    return replace(
        request.trajectory(policy),
        histories=[History([])],
        metrics={"turns": 0.0, "sampled_tokens": 0.0, "truncated": 0.0},
        failure=Failure.of(error, error.boundary),
    )


@contextlib.contextmanager
def raised_gc_threshold() -> Iterator[None]:
    """Raise the garbage collector's generation 0 threshold within the block. With Python's default, cycle collection
    takes a third of the time while thousands of episodes wait."""
    first, *others = gc.get_threshold()
    gc.set_threshold(first and max(first, GC_THRESHOLD), *others)  # 0 disables collection
    try:
        yield
    finally:
        gc.set_threshold(first, *others)


def failures_allowed(max_failures: float, episodes: int) -> int:
    """Return the number of episodes that may fail: `max_failures` is a share below 1 and a count from 1. The share uses
    exact decimal arithmetic: 0.29 of 100 is 29."""
    if max_failures >= 1:
        return min(int(min(max_failures, episodes)), episodes)
    return int(Fraction(repr(max_failures)) * episodes)


def demonstrate(
    make_environment: Callable[[], Environment],
    scenarios: Sequence[Scenario],
    presentation: Presentation,
    roles: RolesSpec | None = None,
) -> list[Trajectory]:
    """Play the environment's own solution of each scenario and return the demonstrations. roles: planner and workers
    play it; None: a single agent. Raises SpecError if the
    environment has no solver or the action format cannot express a solution, EnvironmentFailed if the environment
    fails."""
    environment = make_environment()
    if not isinstance(environment, Solver):
        raise SpecError(
            [Problem("environment", f"{type(environment).__name__} has no solve(scenario), needed for demonstrations")]
        )

    async def demonstration(scenario: Scenario) -> Trajectory:
        if roles is not None:
            return await demonstrate_roles(environment, environment, scenario, presentation, roles)
        return await _demonstration(environment, environment, scenario, presentation)

    async def demonstrate_all() -> list[Trajectory]:
        try:
            return [await demonstration(scenario) for scenario in scenarios]
        finally:
            await close(environment)

    return run(demonstrate_all())


async def _demonstration(
    environment: Environment, solver: Solver, scenario: Scenario, presentation: Presentation
) -> Trajectory:
    shown, max_observation = formats.make(presentation.format, presentation.limits), presentation.max_observation
    first, _ = cleaned(as_messages(await ask(environment.reset, scenario), "reset"), max_observation)
    tools = as_tools(await ask(environment.tools))
    messages, shown_tools = shown.opening(list(first), tools)
    contexts, agent = [messages], presentation.agent(scenario)
    rewards: list[float] = []
    outcome: dict[str, Any] = {}

    async def execute(action: dict[str, Any]) -> Step:
        nonlocal outcome
        step = as_step(await ask(environment.step, action))
        outcome = step.info
        step.observation, _ = cleaned(step.observation, max_observation)
        return step

    for answer in as_messages(await ask(solver.solve, scenario), "solve"):
        messages.append(shown.write(answer))
        try:
            step = await shown.act(messages[-1], execute)
        except formats.UnparsedAction as error:
            text = f"the solution of {scenario.id} cannot be written in this format: {error}; expected another"
            raise SpecError([Problem("agent.format", text)]) from None
        rewards.append(step.reward)
        if step.new_context:
            messages, _ = shown.opening(step.observation, tools)
            contexts.append(messages)
        else:
            messages += step.observation
        if step.done:
            break
    return Trajectory(
        id=f"{scenario.id}/0",
        scenario=scenario,
        sample=0,
        histories=[History([to_message(message) for message in messages], agent=agent) for messages in contexts],
        tools=shown_tools,
        step_rewards=rewards,
        outcome=outcome,
        metrics={"turns": float(len(rewards))},
        policy=SOLVER,
    )
