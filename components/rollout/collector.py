"""The concurrent collector of episodes.

Each scenario is played `group_size` times. Episodes that finished in an earlier attempt of the stage are reused. A
failed episode is a trajectory with a failure. If more episodes fail than allowed, the collector stops and reports the
first causes. Cancellation stops all episodes at once and counts as no failure.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from fractions import Fraction
from typing import Any

from components.aio import run
from components.environments.protocol import Environment, Solver, Step
from components.errors import EnvironmentAway, EnvironmentFailed, Problem, SpecError, TooManyFailures
from components.inference.protocol import Engine, Sampling
from components.rollout import formats
from components.rollout.agent import MAX_OBSERVATION, as_messages, as_step, ask, play
from components.rollout.observations import cleaned
from components.rollout.own_agent import OwnAgent
from components.rollout.players.player import Once, Player, episode_number
from components.rollout.pool import EnvironmentPool, close
from components.rollout.tool_schemas import as_tools
from components.sandbox import Limits
from components.trajectories.convert import to_message
from components.trajectories.failures import failure_kinds
from components.trajectories.groups import by_scenario, misnamed
from components.trajectories.parts import SOLVER
from components.trajectories.schema import Failure, History, Scenario, Trajectory

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
    drawn: list[Scenario] = []
    epoch = 0
    while len(drawn) < (round_ + 1) * count:
        order = _mixed(available, random.Random(f"{seed}-{epoch}"))
        # The current round already has some scenarios: they move to later places of this order.
        present = {scenario.id for scenario in drawn[len(drawn) - len(drawn) % count :]}
        new = [scenario for scenario in order if scenario.id not in present][: count - len(present)] if present else []
        first = {scenario.id for scenario in new}
        drawn += new + [scenario for scenario in order if scenario.id not in first]
        epoch += 1
    return drawn[round_ * count : (round_ + 1) * count]


def choose_further(
    available: Sequence[Scenario], count: int, round_: int, seed: int, *, begin: int, more: int
) -> list[Scenario]:
    """Return up to `more` scenarios that are not among the `count` of a round, in an order specific to that round,
    starting at position `begin`."""
    drawn = {scenario.id for scenario in choose_scenarios(available, count, round_, seed)}
    others = [scenario for scenario in available if scenario.id not in drawn]
    return _mixed(others, random.Random(f"{seed}-further-{round_}"))[begin : begin + more]


def _mixed(scenarios: Sequence[Scenario], rng: random.Random) -> list[Scenario]:
    """Return the scenarios in random order, those of each type and difficulty evenly spaced (systematic sampling)."""
    kinds: dict[tuple[str, int], list[Scenario]] = defaultdict(list)
    for scenario in scenarios:
        kinds[scenario.type, scenario.difficulty].append(scenario)
    placed = []
    for kind in sorted(kinds):
        members, offset = kinds[kind], rng.random()
        rng.shuffle(members)
        placed += [((place + offset) / len(members), scenario) for place, scenario in enumerate(members)]
    return [scenario for _, scenario in sorted(placed, key=lambda pair: pair[0])]


def run_episodes(
    engine: Engine,
    environments: EnvironmentPool | Callable[[], Environment],
    scenarios: Sequence[Scenario],
    *,
    group_size: int,
    sampling: Sampling,
    max_turns: int,
    concurrency: int,
    timeout: float,
    max_failures: float,
    seed: int,
    player: Player | OwnAgent | None = None,
    temperature_step: float = 0.0,
    step_timeout: float | None = None,
    retries: int = 0,
    finished: Mapping[str, Trajectory] | None = None,
    on_begin: Callable[[str, Engine], Engine] | None = None,
    on_episode: Callable[[Trajectory, float], None] | None = None,
    on_retry: Callable[[EnvironmentAway], None] | None = None,
) -> list[Trajectory]:
    """Play all episodes and return their trajectories.

    They are ordered by scenario and sample; episodes derived from others (`player`) come after the group of these.
    Raises TooManyFailures, and SpecError if two scenarios have the same id.

    environments: pool of instances, or a factory of one. timeout: time limit per episode in seconds, without the time
    spent waiting for an instance. max_failures: below 1 a share of the episodes, from 1 a count. player: way of playing
    an episode; None: the agent loop, once. temperature_step: sample k of a scenario uses temperature + k ·
    temperature_step. step_timeout: time limit in seconds of each environment call of the agent loop. retries: maximum
    retries of an episode whose environment is unreachable. on_begin: called with the name of each starting episode;
    returns the engine for it and the episodes derived from it. on_episode: called with each new trajectory and its
    duration in seconds. on_retry: called with the cause of each retry.
    """
    if len({scenario.id for scenario in scenarios}) < len(scenarios):
        raise SpecError([Problem("environment", "gives the same id to several scenarios; ids must be unique")])
    if (problem := misnamed(scenarios)) is not None:
        raise SpecError([Problem("environment", problem)])
    jobs = [(scenario, sample) for scenario in scenarios for sample in range(group_size)]
    allowed = failures_allowed(max_failures, len(jobs))
    pool = environments if isinstance(environments, EnvironmentPool) else EnvironmentPool(environments)
    own_agent = player if isinstance(player, OwnAgent) else None
    episode_player: Player = Once(player.play) if isinstance(player, OwnAgent) else player or Once(play)
    done: dict[str, Trajectory] = {}
    following: dict[str, list[str]] = {}
    failed: list[Trajectory] = []
    pending = iter(jobs)

    def take(trajectories: Sequence[Trajectory]) -> None:
        """Record an episode and those derived from it. Together they count as at most one failure."""
        for trajectory in trajectories:
            done[trajectory.id] = trajectory
        following[trajectories[0].id] = [trajectory.id for trajectory in trajectories]
        failed.extend([trajectory for trajectory in trajectories if trajectory.failure][:1])
        if len(failed) > allowed:
            kinds = failure_kinds((trajectory.id, trajectory.failure) for trajectory in failed if trajectory.failure)
            raise TooManyFailures(
                f"{len(failed)} of {len(jobs)} episodes failed, more than the {allowed} that "
                f"max_failures={max_failures:g} of this stage allows. {'. '.join(map(str, kinds))}"
            )

    def engine_of(name: str) -> Engine:
        return on_begin(name, engine) if on_begin else engine

    async def attempt(scenario: Scenario, sample: int, raise_unreachable: bool) -> tuple[list[Trajectory], float]:
        name = f"{scenario.id}/{sample}"
        options: dict[str, Any] = {
            "sample": sample,
            "sampling": replace(sampling, temperature=sampling.temperature + sample * temperature_step),
            "max_turns": max_turns,
            "seed": episode_number(seed, name),
            "timeout": timeout,
            "raise_unreachable": raise_unreachable,
        }
        if own_agent is None:
            options["step_timeout"] = step_timeout
        if own_agent is not None and not own_agent.wants_environment:
            started = time.monotonic()
            return [await own_agent.play(engine_of(name), None, scenario, **options)], time.monotonic() - started
        async with AsyncExitStack() as stack:
            try:
                lease = await stack.enter_async_context(pool.lease())
            except EnvironmentFailed as error:
                if raise_unreachable and isinstance(error, EnvironmentAway):
                    raise
                return [_without_environment(engine.policy, scenario, error, **options)], 0.0
            started = time.monotonic()
            trajectories = await episode_player.play(engine_of(name), lease.environment, scenario, **options)
            failures = [trajectory.failure for trajectory in trajectories if trajectory.failure is not None]
            if own_agent is not None:
                lease.reusable = not failures
                # The thread of a timed-out agent may still use the instance.
                lease.abandoned = any(failure.kind == "WaitTimeout" for failure in failures)
            else:
                lease.reusable = all(failure.boundary != EnvironmentFailed.boundary for failure in failures)
            return trajectories, time.monotonic() - started

    async def episode(scenario: Scenario, sample: int) -> tuple[list[Trajectory], float]:
        pause = FIRST_PAUSE
        for remaining in range(retries, 0, -1):
            try:
                return await attempt(scenario, sample, raise_unreachable=True)
            except EnvironmentAway as error:
                wait = random.uniform(0.5, 1.0) * pause
                logger.info(
                    "%s/%d is retried in %.1f s, %d retries left: %s", scenario.id, sample, wait, remaining, error
                )
                if on_retry:
                    on_retry(error)
            await asyncio.sleep(wait)
            pause = min(2 * pause, LONGEST_PAUSE)
        return await attempt(scenario, sample, raise_unreachable=False)

    async def work() -> None:
        for scenario, sample in pending:
            name = f"{scenario.id}/{sample}"
            if finished and name in finished:
                names = [name, *episode_player.following(finished[name])]
                if all(name in finished for name in names):
                    take([finished[name] for name in names])
                    continue
            trajectories, seconds = await episode(scenario, sample)
            if on_episode:
                for trajectory in trajectories:
                    on_episode(trajectory, seconds)
            take(trajectories)

    async def work_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(jobs))):
                    group.create_task(work())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            await pool.end_stage()

    try:
        with raised_gc_threshold():
            run(work_all())
    finally:
        if pool is not environments:
            pool.close()
    ordered = [done[name] for scenario, sample in jobs for name in following[f"{scenario.id}/{sample}"]]
    groups = by_scenario(ordered).values()
    return [trajectory for group in groups for trajectory in sorted(group, key=lambda member: member.sample)]


def _without_environment(
    policy: str, scenario: Scenario, error: EnvironmentFailed, *, sample: int, sampling: Sampling, seed: int, **_: Any
) -> Trajectory:
    """Return the failed trajectory of an episode whose environment could not be built."""
    return Trajectory(
        id=f"{scenario.id}/{sample}",
        scenario=scenario,
        sample=sample,
        histories=[History([])],
        metrics={"turns": 0.0, "sampled_tokens": 0.0, "truncated": 0.0},
        failure=Failure(error.boundary, type(error).__name__, str(error)),
        policy=policy,
        sampling={**asdict(sampling), "seed": seed},
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
    format: formats.Name = "native",
    max_observation: int = MAX_OBSERVATION,
    limits: Limits | None = None,
) -> list[Trajectory]:
    """Play the environment's own solution of each scenario, in an action format, and return the demonstrations.

    limits: resource limits of code (format `code`). Raises SpecError if the environment has no solver or the format
    cannot express a solution, EnvironmentFailed if the environment fails.
    """
    environment = make_environment()
    if not isinstance(environment, Solver):
        raise SpecError(
            [Problem("environment", f"{type(environment).__name__} has no solve(scenario), needed for demonstrations")]
        )

    async def demonstrate_all() -> list[Trajectory]:
        try:
            return [
                await _demonstration(environment, environment, scenario, formats.make(format, limits), max_observation)
                for scenario in scenarios
            ]
        finally:
            await close(environment)

    return run(demonstrate_all())


async def _demonstration(
    environment: Environment, solver: Solver, scenario: Scenario, shown: formats.Format, max_observation: int
) -> Trajectory:
    tools = as_tools(await ask(environment.tools))
    first, _ = cleaned(as_messages(await ask(environment.reset, scenario), "reset"), max_observation)
    messages, tools = shown.opening(list(first), tools)
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
        except formats.Unreadable as error:
            text = f"the solution of {scenario.id} cannot be written in this format: {error}; expected another"
            raise SpecError([Problem("agent.format", text)]) from None
        rewards.append(step.reward)
        messages += step.observation
        if step.done:
            break
    return Trajectory(
        id=f"{scenario.id}/0",
        scenario=scenario,
        sample=0,
        histories=[History([to_message(message) for message in messages])],
        tools=tools,
        step_rewards=rewards,
        outcome=outcome,
        metrics={"turns": float(len(rewards))},
        policy=SOLVER,
    )
