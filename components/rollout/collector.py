"""The concurrent collector: many episodes at once, none lost.

Every scenario is played `group_size` times. Episodes that finished in an earlier try are taken as they are. A failed
episode is a trajectory with a failure; when more fail than allowed, the collector stops and says why the first ones
did. Cancellation stops everything at once and counts as nobody's failure.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Callable, Mapping, Sequence

from components.environments.protocol import Environment, Solver
from components.errors import SpecError, Problem, TooManyFailures
from components.inference.protocol import Engine, Sampling
from components.rollout.agent import play
from components.trajectories.convert import to_message
from components.trajectories.schema import Failure, History, Scenario, Trajectory


def choose_scenarios(available: Sequence[Scenario], count: int, round_: int, seed: int) -> list[Scenario]:
    """The scenarios of a round: `count` of them in an order that the seed fixes, continued where the round before
    ended; after the last one, a new order begins. No scenario comes twice in a round."""
    if count > len(available):
        raise SpecError([Problem("collect.scenarios", f"is {count}, but the split has {len(available)} scenarios")])
    chosen: list[Scenario] = []
    position = round_ * count
    while len(chosen) < count:
        turn, start = divmod(position, len(available))
        order = list(available)
        random.Random(f"{seed}-{turn}").shuffle(order)
        taken = {scenario.id for scenario in chosen}
        part = [scenario for scenario in order[start:] if scenario.id not in taken][: count - len(chosen)]
        chosen += part
        position = (turn + 1) * len(available)
    return chosen


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
    finished: Mapping[str, Trajectory] | None = None,
    on_episode: Callable[[Trajectory, float], None] | None = None,
) -> list[Trajectory]:
    """Plays all episodes; returns them in order of scenario and sample.

    timeout: seconds that one episode may take. max_failures: below 1 a share of the episodes, from 1 on a count.
    on_episode is called with each new episode and the seconds it took. Raises TooManyFailures.
    """
    return asyncio.run(
        _run(
            engine,
            make_environment,
            [(scenario, sample) for scenario in scenarios for sample in range(group_size)],
            sampling,
            max_turns,
            concurrency,
            timeout,
            max_failures,
            seed,
            finished or {},
            on_episode,
        )
    )


async def _run(
    engine, make_environment, jobs, sampling, max_turns, concurrency, timeout, max_failures, seed, finished, on_episode
) -> list[Trajectory]:
    done: dict[str, Trajectory] = {}
    allowed = max_failures * len(jobs) if max_failures < 1 else max_failures
    failures: list[Trajectory] = []
    idle: list[Environment] = []
    queue = iter(jobs)

    async def worker() -> None:
        environment = make_environment()
        idle.append(environment)
        for scenario, sample in queue:
            name = f"{scenario.id}/{sample}"
            if name in finished:
                done[name] = finished[name]
                continue
            started = time.monotonic()
            episode_seed = episode_number(seed, name)
            try:
                async with asyncio.timeout(timeout):
                    trajectory = await play(
                        engine,
                        environment,
                        scenario,
                        sample=sample,
                        sampling=sampling,
                        max_turns=max_turns,
                        seed=episode_seed,
                    )
            except TimeoutError:
                trajectory = _timed_out(scenario, sample, engine.policy, timeout)
            done[name] = trajectory
            if trajectory.failure:
                failures.append(trajectory)
            if on_episode:
                on_episode(trajectory, time.monotonic() - started)
            if len(failures) > allowed:
                shown = "; ".join(f"{one.id}: {one.failure.kind}: {one.failure.message}" for one in failures[:3])
                raise TooManyFailures(
                    f"{len(failures)} of {len(jobs)} episodes failed, {max_failures:g} allowed (collect.max_failures). {shown}"
                )

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(jobs))):
                group.create_task(worker())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        for environment in idle:
            environment.close()
    return [done[f"{scenario.id}/{sample}"] for scenario, sample in jobs]


def episode_number(seed: int, name: str) -> int:
    """The seed of one episode: a function of the stage's seed and the episode's name, not of when it is played."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:6], "big")


def demonstrate(make_environment: Callable[[], Environment], scenarios: Sequence[Scenario]) -> list[Trajectory]:
    """Plays the environment's own solution of each scenario; raises SpecError where it has none."""
    environment = make_environment()
    if not isinstance(environment, Solver):
        raise SpecError(
            [Problem("environment", f"{type(environment).__name__} has no solve(scenario), needed for demonstrations")]
        )
    shown = []
    for scenario in scenarios:
        messages = list(environment.reset(scenario))
        rewards, outcome = [], {}
        answers = environment.solve(scenario)
        for answer in answers:
            messages.append(answer)
            step = environment.step(answer)
            rewards.append(float(step.reward))
            outcome = step.info
            messages.extend(step.observation)
            if step.done:
                break
        shown.append(
            Trajectory(
                id=f"{scenario.id}/0",
                scenario=scenario,
                sample=0,
                histories=[History([to_message(message) for message in messages])],
                tools=environment.tools(),
                step_rewards=rewards,
                outcome=outcome,
                metrics={"turns": float(len(answers))},
                policy="solver",
            )
        )
    environment.close()
    return shown


def _timed_out(scenario: Scenario, sample: int, policy: str, timeout: float) -> Trajectory:
    return Trajectory(
        id=f"{scenario.id}/{sample}",
        scenario=scenario,
        sample=sample,
        histories=[],
        failure=Failure("environment", "WaitTimeout", f"the episode took longer than {timeout:g} s (collect.timeout)"),
        policy=policy,
    )
