"""The concurrent collector: many episodes at once, none lost.

Every scenario is played `group_size` times. Episodes that finished in an earlier try are taken as they are. A failed
episode is a trajectory with a failure; when more fail than allowed, the collector stops and says why the first ones
did. Cancellation stops everything at once and counts as nobody's failure.

Each of the workers plays one episode at a time in an environment of its own, and takes a new environment after one
that failed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import queue
import random
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from components.environments.protocol import Environment, Solver
from components.errors import EnvironmentFailed, Problem, SpecError, TooManyFailures
from components.inference.protocol import Engine, Sampling
from components.rollout import formats
from components.rollout.agent import MAX_OBSERVATION, as_json, as_messages, as_step, ask, play
from components.rollout.observations import cleaned
from components.rollout.own_agent import OwnAgent
from components.rollout.player import Once, Player, episode_number
from components.trajectories.convert import to_message
from components.trajectories.groups import by_scenario
from components.trajectories.schema import History, Scenario, Trajectory

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT = 10.0
"""Seconds that an environment may take to close."""
Result = TypeVar("Result")


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
    make_environment: Callable[[], Environment],
    scenarios: Sequence[Scenario],
    *,
    group_size: int,
    sampling: Sampling,
    max_turns: int,
    concurrency: int,
    timeout: float,
    max_failures: float,
    seed: int,
    format: formats.Name = "native",
    max_observation: int = MAX_OBSERVATION,
    own_agent: OwnAgent | None = None,
    player: Player | None = None,
    temperature_step: float = 0.0,
    finished: Mapping[str, Trajectory] | None = None,
    on_episode: Callable[[Trajectory, float], None] | None = None,
) -> list[Trajectory]:
    """Plays all episodes; returns them in order of scenario and sample, those that follow from others (`player`) after
    the group of these.

    timeout: seconds that one episode may take. max_failures: below 1 a share of the episodes, from 1 on a count.
    own_agent, player: play in place of the agent loop. temperature_step: sample k of a scenario is drawn at k times
    this above the temperature. on_episode is called with each new episode and the seconds it took. Raises
    TooManyFailures, and SpecError where two scenarios have the same id.
    """
    if len({scenario.id for scenario in scenarios}) < len(scenarios):
        raise SpecError([Problem("environment", "gives the same id to several scenarios; ids must be unique")])
    jobs = [(scenario, sample) for scenario in scenarios for sample in range(group_size)]
    allowed = int(max_failures * len(jobs) if max_failures < 1 else max_failures)
    done: dict[str, Trajectory] = {}
    following: dict[str, list[str]] = {}
    rest = iter(jobs)
    if player is None:
        shown: dict[str, Any] = {"format": format, "max_observation": max_observation}
        player = Once(own_agent.play if own_agent is not None else partial(play, **shown))

    def take(trajectory: Trajectory) -> None:
        if trajectory.id in done:
            text = f"has a scenario whose id is that of episodes which follow from others: {trajectory.group}"
            raise SpecError([Problem("environment", f"{text}; expected another")])
        done[trajectory.id] = trajectory
        failed = [one for one in done.values() if one.failure] if trajectory.failure else []
        if len(failed) > allowed:
            shown = "; ".join(
                f"{one.id}: {one.failure.kind}: {one.failure.message}" for one in failed[:3] if one.failure
            )
            raise TooManyFailures(
                f"{len(failed)} of {len(jobs)} episodes failed, more than the {allowed} that "
                f"max_failures={max_failures:g} of this stage allows. {shown}"
            )

    async def work() -> None:
        environment = None
        try:
            for scenario, sample in rest:
                name = f"{scenario.id}/{sample}"
                if finished and name in finished:
                    names = [name, *player.following(finished[name])]
                    if all(one in finished for one in names):
                        following[name] = names
                        for one in names:
                            take(finished[one])
                        continue
                started = time.monotonic()
                if environment is None:
                    environment = make_environment()
                how: dict[str, Any] = {
                    "sample": sample,
                    "sampling": replace(sampling, temperature=sampling.temperature + sample * temperature_step),
                    "max_turns": max_turns,
                    "seed": episode_number(seed, name),
                    "timeout": timeout,
                }
                played = await player.play(engine, environment, scenario, **how)
                following[name] = [one.id for one in played]
                seconds = time.monotonic() - started
                for trajectory in played:
                    if on_episode:
                        on_episode(trajectory, seconds)
                    take(trajectory)
                failed = [one.failure for one in played if one.failure is not None]
                if failed and own_agent is not None:
                    environment = None  # a thread that ran out of time may still be in it: it is left to that
                elif any(failure.boundary == EnvironmentFailed.boundary for failure in failed):
                    broken, environment = environment, None
                    await _close(broken)
        finally:
            if environment is not None:
                await _close(environment)

    async def work_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(jobs))):
                    group.create_task(work())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    _run(work_all())
    ordered = [done[one] for scenario, sample in jobs for one in following[f"{scenario.id}/{sample}"]]
    return [one for group in by_scenario(ordered).values() for one in sorted(group, key=lambda one: one.sample)]


def demonstrate(
    make_environment: Callable[[], Environment],
    scenarios: Sequence[Scenario],
    format: formats.Name = "native",
    max_observation: int = MAX_OBSERVATION,
) -> list[Trajectory]:
    """Plays the environment's own solution of each scenario, written in a format.

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
                await _demonstration(environment, environment, scenario, formats.make(format), max_observation)
                for scenario in scenarios
            ]
        finally:
            await _close(environment)

    return _run(show_all())


async def _demonstration(
    environment: Environment, solver: Solver, scenario: Scenario, shown: formats.Format, most: int
) -> Trajectory:
    tools = as_json(await ask(environment.tools), "tools")
    first, _ = cleaned(as_messages(await ask(environment.reset, scenario), "reset"), most)
    messages, tools = shown.opening(list(first), tools)
    rewards: list[float] = []
    outcome: dict[str, Any] = {}
    for answer in as_messages(await ask(solver.solve, scenario), "solve"):
        messages.append(shown.write(answer))
        step = as_step(await ask(environment.step, answer))
        rewards.append(step.reward)
        outcome = step.info
        messages += shown.show(cleaned(step.observation, most)[0])
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
        policy="solver",
    )


async def _close(environment: Environment) -> None:
    """Closes an environment; one that fails at it costs a warning, not the episodes."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT):
            await ask(environment.close)
    except EnvironmentFailed as error:
        logger.warning("an environment did not close: %s", error)
    except TimeoutError:
        logger.warning("an environment did not close within %g s", CLOSE_TIMEOUT)


def _run(work: Coroutine[Any, Any, Result]) -> Result:
    """Runs to its end, on a loop of its own; in a thread where this one has a loop already, as a notebook has."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    started: queue.SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Task]] = queue.SimpleQueue()

    async def told() -> Result:
        task = asyncio.current_task()
        assert task is not None
        started.put((task.get_loop(), task))
        return await work

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        result = pool.submit(asyncio.run, told())
        loop, task = started.get()
        try:
            return result.result()
        except KeyboardInterrupt:
            loop.call_soon_threadsafe(task.cancel)
            raise
