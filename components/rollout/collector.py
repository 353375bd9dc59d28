"""The concurrent collector: many episodes at once, none lost.

Every scenario is played `group_size` times. Episodes that finished in an earlier try are taken as they are. A failed
episode is a trajectory with a failure; when more fail than allowed, the collector stops and says why the first ones
did. Cancellation stops everything at once and counts as nobody's failure.

An episode has an instance of the environment to itself (`pool`). Where the environment was away for a moment, the
episode is played again from its start, with the same seed. An instance that cannot be built is the environment's
failure like any other; only a user's mistake (SpecError, ResourceError) ends the collection.
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
from components.rollout.pool import Pool, close
from components.rollout.tool_schemas import as_tools
from components.sandbox import Limits
from components.trajectories.convert import to_message
from components.trajectories.failures import failure_kinds
from components.trajectories.groups import by_scenario, misnamed
from components.trajectories.parts import SOLVER
from components.trajectories.schema import Failure, History, Scenario, Trajectory

logger = logging.getLogger(__name__)

YOUNG = 20_000
"""Objects that come to be between two looks for garbage, while episodes are played."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds before an episode is played again: the first time, and at most."""


def choose_scenarios(available: Sequence[Scenario], count: int, round_: int, seed: int) -> list[Scenario]:
    """The scenarios of a round: `count` of them in an order that the seed fixes, continued where the round before
    ended; after the last one, a new order begins. No scenario comes twice in a round, and none comes again before all
    have come. In each stretch of the order, every type and difficulty comes as often as its share says, give or take
    one, so that no round leaves one out by chance."""
    if count > len(available):
        raise SpecError([Problem("collect.scenarios", f"is {count}, but the split has {len(available)} scenarios")])
    drawn: list[Scenario] = []
    turn = 0
    while len(drawn) < (round_ + 1) * count:
        order = _mixed(available, random.Random(f"{seed}-{turn}"))
        # The round that this order has to complete holds some scenarios already: they come later in it.
        held = {scenario.id for scenario in drawn[len(drawn) - len(drawn) % count :]}
        new = [scenario for scenario in order if scenario.id not in held][: count - len(held)] if held else []
        first = {scenario.id for scenario in new}
        drawn += new + [scenario for scenario in order if scenario.id not in first]
        turn += 1
    return drawn[round_ * count : (round_ + 1) * count]


def choose_further(
    available: Sequence[Scenario], count: int, round_: int, seed: int, *, begin: int, more: int
) -> list[Scenario]:
    """`more` scenarios that are not among the `count` of a round, in an order of that round's own, after the first
    `begin` of them; fewer where there are no more."""
    drawn = {scenario.id for scenario in choose_scenarios(available, count, round_, seed)}
    others = [scenario for scenario in available if scenario.id not in drawn]
    return _mixed(others, random.Random(f"{seed}-further-{round_}"))[begin : begin + more]


def _mixed(scenarios: Sequence[Scenario], rng: random.Random) -> list[Scenario]:
    """In random order, with the n scenarios of one type and difficulty spread evenly (systematic sampling)."""
    kinds: dict[tuple[str, int], list[Scenario]] = defaultdict(list)
    for scenario in scenarios:
        kinds[scenario.type, scenario.difficulty].append(scenario)
    placed = []
    for kind in sorted(kinds):
        members, offset = kinds[kind], rng.random()
        rng.shuffle(members)
        placed += [((place + offset) / len(members), scenario) for place, scenario in enumerate(members)]
    return [scenario for _, scenario in sorted(placed, key=lambda one: one[0])]


def run_episodes(
    engine: Engine,
    environments: Pool | Callable[[], Environment],
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
    """Plays all episodes; returns them in order of scenario and sample, those that follow from others (`player`) after
    the group of these.

    environments: where they are played, or what builds one. timeout: seconds that one episode may take, waiting for an
    instance not counted. max_failures: below 1 a share of the episodes, from 1 on a count. player: who plays; None: the
    agent loop, once. temperature_step: sample k of a scenario is drawn at k times this above the temperature.
    step_timeout: seconds that the environment may take each time the agent loop asks it. retries: how often an episode
    is played again whose environment was away. on_begin is told the name of each episode that begins, and gives the
    engine that it and what follows from it are played with; on_episode is called with each new episode and the seconds
    it took, on_retry with why one is played again. Raises TooManyFailures, and SpecError where two scenarios have the
    same id.
    """
    if len({scenario.id for scenario in scenarios}) < len(scenarios):
        raise SpecError([Problem("environment", "gives the same id to several scenarios; ids must be unique")])
    if (wrong := misnamed(scenarios)) is not None:
        raise SpecError([Problem("environment", wrong)])
    jobs = [(scenario, sample) for scenario in scenarios for sample in range(group_size)]
    allowed = failures_allowed(max_failures, len(jobs))
    pool = environments if isinstance(environments, Pool) else Pool(environments)
    own_agent = player if isinstance(player, OwnAgent) else None
    plays: Player = Once(player.play) if isinstance(player, OwnAgent) else player or Once(play)
    done: dict[str, Trajectory] = {}
    following: dict[str, list[str]] = {}
    failed: list[Trajectory] = []
    rest = iter(jobs)

    def take(belonging: Sequence[Trajectory]) -> None:
        """An episode with those that follow from it; together they fail once."""
        for one in belonging:
            done[one.id] = one
        following[belonging[0].id] = [one.id for one in belonging]
        failed.extend([one for one in belonging if one.failure][:1])
        if len(failed) > allowed:
            kinds = failure_kinds((one.id, one.failure) for one in failed if one.failure)
            raise TooManyFailures(
                f"{len(failed)} of {len(jobs)} episodes failed, more than the {allowed} that "
                f"max_failures={max_failures:g} of this stage allows. {'. '.join(map(str, kinds))}"
            )

    def heard(name: str) -> Engine:
        return on_begin(name, engine) if on_begin else engine

    async def played(scenario: Scenario, sample: int, again: bool) -> tuple[list[Trajectory], float]:
        name = f"{scenario.id}/{sample}"
        how: dict[str, Any] = {
            "sample": sample,
            "sampling": replace(sampling, temperature=sampling.temperature + sample * temperature_step),
            "max_turns": max_turns,
            "seed": episode_number(seed, name),
            "timeout": timeout,
            "again": again,
        }
        if own_agent is None:
            how["step_timeout"] = step_timeout
        if own_agent is not None and not own_agent.wants_environment:
            started = time.monotonic()
            return [await own_agent.play(heard(name), None, scenario, **how)], time.monotonic() - started
        async with AsyncExitStack() as stack:
            try:
                lent = await stack.enter_async_context(pool.lent())
            except EnvironmentFailed as error:
                if again and isinstance(error, EnvironmentAway):
                    raise
                return [_not_played(engine.policy, scenario, error, **how)], 0.0
            started = time.monotonic()
            found = await plays.play(heard(name), lent.environment, scenario, **how)
            failures = [one.failure for one in found if one.failure is not None]
            if own_agent is not None:
                lent.whole = not failures
                lent.left = any(one.kind == "WaitTimeout" for one in failures)  # its thread may still be in it
            else:
                lent.whole = all(failure.boundary != EnvironmentFailed.boundary for failure in failures)
            return found, time.monotonic() - started

    async def episode(scenario: Scenario, sample: int) -> tuple[list[Trajectory], float]:
        pause = FIRST_PAUSE
        for left in range(retries, 0, -1):
            try:
                return await played(scenario, sample, again=True)
            except EnvironmentAway as error:
                wait = random.uniform(0.5, 1.0) * pause
                logger.info(
                    "%s/%d is played again in %.1f s, %d tries left: %s", scenario.id, sample, wait, left, error
                )
                if on_retry:
                    on_retry(error)
            await asyncio.sleep(wait)
            pause = min(2 * pause, LONGEST_PAUSE)
        return await played(scenario, sample, again=False)

    async def work() -> None:
        for scenario, sample in rest:
            name = f"{scenario.id}/{sample}"
            if finished and name in finished:
                names = [name, *plays.following(finished[name])]
                if all(one in finished for one in names):
                    take([finished[one] for one in names])
                    continue
            found, seconds = await episode(scenario, sample)
            if on_episode:
                for trajectory in found:
                    on_episode(trajectory, seconds)
            take(found)

    async def work_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(jobs))):
                    group.create_task(work())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            await pool.rest()

    try:
        with rarely_collected():
            run(work_all())
    finally:
        if pool is not environments:
            pool.close()
    ordered = [done[one] for scenario, sample in jobs for one in following[f"{scenario.id}/{sample}"]]
    return [one for group in by_scenario(ordered).values() for one in sorted(group, key=lambda one: one.sample)]


def _not_played(
    policy: str, scenario: Scenario, error: EnvironmentFailed, *, sample: int, sampling: Sampling, seed: int, **_: Any
) -> Trajectory:
    """The episode whose environment could not be built."""
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
def rarely_collected() -> Iterator[None]:
    """Python looks for cycles of garbage whenever a few hundred objects have come to be that still live. While
    thousands of episodes wait, that is a third of the time; within the block it looks seldom."""
    first, *others = gc.get_threshold()
    gc.set_threshold(first and max(first, YOUNG), *others)  # 0 is never
    try:
        yield
    finally:
        gc.set_threshold(first, *others)


def failures_allowed(max_failures: float, episodes: int) -> int:
    """How many of so many episodes may fail: below 1 a share of them, from 1 on a count. A share that is met exactly
    is allowed, however it is rounded: 0.29 of 100 are 29."""
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
    """Plays the environment's own solution of each scenario, written in a format. limits: of code.

    Raises SpecError where it has none, EnvironmentFailed where the environment breaks.
    """
    environment = make_environment()
    if not isinstance(environment, Solver):
        raise SpecError(
            [Problem("environment", f"{type(environment).__name__} has no solve(scenario), needed for demonstrations")]
        )

    async def show_all() -> list[Trajectory]:
        try:
            return [
                await _demonstration(environment, environment, scenario, formats.make(format, limits), max_observation)
                for scenario in scenarios
            ]
        finally:
            await close(environment)

    return run(show_all())


async def _demonstration(
    environment: Environment, solver: Solver, scenario: Scenario, shown: formats.Format, most: int
) -> Trajectory:
    tools = as_tools(await ask(environment.tools))
    first, _ = cleaned(as_messages(await ask(environment.reset, scenario), "reset"), most)
    messages, tools = shown.opening(list(first), tools)
    rewards: list[float] = []
    outcome: dict[str, Any] = {}

    async def take(action: dict[str, Any]) -> Step:
        nonlocal outcome
        step = as_step(await ask(environment.step, action))
        outcome = step.info
        step.observation, _ = cleaned(step.observation, most)
        return step

    for answer in as_messages(await ask(solver.solve, scenario), "solve"):
        messages.append(shown.write(answer))
        try:
            step = await shown.act(messages[-1], take)
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
