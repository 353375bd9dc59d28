"""Checks of one environment: each plays or compares episodes and returns a result.

A check that the environment does not allow, such as the solver's without a solver, is skipped with the reason.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from components.data.fingerprints import SimilarTexts
from components.environments.protocol import Environment, Restorable, Solver
from components.evaluation.checks import PropertyCheck, check_result, skipped_check
from components.evaluation.proportions import wilson
from components.rewards.judge import RewardCaller
from components.trajectories.schema import Scenario
from flows.qualification.exploits import chance, exploits
from flows.qualification.recording import Recording, TestedInstance, first_difference, play, play_solution

MOST_CHANCE = 0.25
"""Success rate of chance that the lower end of its 95 % interval must not exceed."""
MOST_EXPLOIT = 0.05
"""The same for an exploit, unless chance succeeds more often."""
EXAMPLES = 2
"""Maximum number of example episodes of a check."""
MOST_MEMORIZED = 0.25
"""Share of held-out scenarios that training solutions solve; the lower end of its 95 % interval must not exceed it."""
SECONDS = 30.0
"""Time limit for reading prompts; the figures then cover the scenarios so far."""
PLAYED = 64
"""Maximum number of held-out scenarios in which another scenario's solution is played."""
SLOTS = 2**18


@dataclass
class Qualification:
    """The environment under test, with the episodes that the checks share."""

    make: Callable[[], Environment]
    world: TestedInstance
    scenarios: dict[str, list[Scenario]]
    """All scenarios by split."""
    chosen: list[Scenario]
    """Scenarios that are played."""
    turns: int
    """Maximum number of actions of chance and of exploits."""
    reward: RewardCaller | None = None
    """Reward of the experiment; None: that of the environment."""
    solved: list[Recording] = field(default_factory=list)
    random: list[Recording] = field(default_factory=list)
    exploited: list[Recording] = field(default_factory=list)
    worth: float = 0.0
    """Mean reward of the solutions; 0 without any."""

    @property
    def has_solver(self) -> bool:
        """True if the environment solves its own tasks."""
        return isinstance(self.world.environment, Solver)

    async def rewards(self, recordings: Sequence[Recording], failures: list[str]) -> list[float]:
        """Return the rewards of the episodes that the reward scores. If it scores none, add the reason to `failures`.
        A reward of groups scores each episode beside a copy."""
        if self.reward is None:
            return [recording.reward for recording in recordings]
        rewards: list[float] = []
        reasons: list[str] = []
        for recording in recordings:
            episode = recording.trajectory()
            group = [episode, replace(episode, id=f"{episode.id}/1", sample=1)] if self.reward.grouped else [episode]
            score = (await self.reward.call_group_async(group))[0]
            if score.reward is not None:
                rewards.append(score.reward)
            elif score.failure is not None:
                reasons.append(f"{score.failure.kind}: {score.failure.message}")
        if reasons and not rewards:
            failures.append(f"reward: it scores no episode; the first: {reasons[0]}")
        return rewards

    async def fresh(self, use: Callable[[TestedInstance], Awaitable[Any]]) -> Any:
        """Call a function with a new instance, and close the instance."""
        world = TestedInstance(self.make())
        try:
            return await use(world)
        finally:
            await world.close()


def result(
    name: str, failures: Sequence[str], figures: dict[str, Any], episodes: Sequence[Recording] = ()
) -> PropertyCheck:
    """Return a check that fails with the first of the failures, or passes. episodes: those that show it."""
    examples = [recording.trajectory() for recording in episodes[:EXAMPLES]]
    return check_result(name, failures, figures, examples=examples)


async def check_solver(tested: Qualification) -> PropertyCheck:
    """Check that the environment's own solutions succeed."""
    if not tested.has_solver:
        return skipped_check("solver", "the environment has no solve(scenario)")
    tested.solved = [await play_solution(tested.world, scenario) for scenario in tested.chosen]
    unsolved = [recording for recording in tested.solved if not recording.success]
    failures = [
        f"{recording.scenario.id}: the solution ends with {recording.steps[-1].info if recording.steps else {}!r:.200}"
        for recording in unsolved
    ]
    figures = {"episodes": len(tested.solved), "success": 1 - len(unsolved) / len(tested.solved)}
    tested.worth = _mean(await tested.rewards(tested.solved, failures))
    figures["reward"] = tested.worth
    return result("solver", failures, figures, unsolved or tested.solved)


async def check_chance(tested: Qualification) -> PropertyCheck:
    """Check that random actions rarely succeed."""
    tested.random = [await play(tested.world, scenario, "chance", chance, tested.turns) for scenario in tested.chosen]
    lucky = [recording for recording in tested.random if recording.success]
    rate, low = len(lucky) / len(tested.random), wilson(len(lucky), len(tested.random))[0]
    failures = [f"random actions succeed in {rate:.0%} of the episodes"] if low > MOST_CHANCE else []
    figures = {"episodes": len(tested.random), "success": rate, "success_low": low}
    figures["reward"] = _mean(await tested.rewards(tested.random, failures))
    return result("chance", failures, figures, lucky or tested.random)


async def check_replay(tested: Qualification) -> PropertyCheck:
    """Check that equal actions after a reset give equal results in the same instance."""
    failures, episodes = [], _played(tested)
    for recording in episodes:
        if difference := first_difference(recording, await tested.world.replay(recording)):
            failures.append(f"{recording.scenario.id} ({recording.player}): {difference}")
    return result("replay", failures, {"episodes": len(episodes), "different": len(failures)})


async def check_isolation(tested: Qualification) -> PropertyCheck:
    """Check that two instances whose episodes alternate step by step give the results of each alone."""
    episodes = _played(tested)
    pairs = list(zip(episodes[::2], episodes[1::2], strict=False))
    failures: list[str] = []

    async def alternate(other: TestedInstance) -> None:
        for pair in pairs:
            worlds = (tested.world, other)
            replays = [await world.reset(item.scenario, item.player) for world, item in zip(worlds, pair, strict=True)]
            for step in range(max(len(item.actions) for item in pair)):
                for world, item, replay in zip(worlds, pair, replays, strict=True):
                    if step < len(item.actions):
                        await world.step(replay, item.actions[step])
            for item, replay in zip(pair, replays, strict=True):
                if difference := first_difference(item, replay):
                    failures.append(f"{item.scenario.id} beside another episode: {difference}")

    await tested.fresh(alternate)
    return result("isolation", failures, {"pairs": len(pairs), "different": len(failures)})


async def check_agreement(tested: Qualification) -> PropertyCheck:
    """Check that the recorded actions give the same success in a new instance."""
    episodes = [*_played(tested), *tested.exploited]
    failures: list[str] = []

    async def again(world: TestedInstance) -> None:
        for recording in episodes:
            replay = await world.replay(recording)
            if replay.success != recording.success:
                failures.append(
                    f"{recording.scenario.id} ({recording.player}): success={replay.success} in a new instance, "
                    f"{recording.success} before"
                )

    await tested.fresh(again)
    return result("agreement", failures, {"episodes": len(episodes), "different": len(failures)})


async def check_restore(tested: Qualification) -> PropertyCheck:
    """Check that a state saved halfway continues in a new instance as the episode did."""
    if not isinstance(tested.world.environment, Restorable):
        return skipped_check("restore", "the environment has no save() and restore(scenario, state)")
    episodes = _played(tested)[:8]
    failures: list[str] = []

    async def resume(other: TestedInstance) -> None:
        for recording in episodes:
            half = len(recording.actions) // 2
            start = await tested.world.reset(recording.scenario, recording.player)
            for action in recording.actions[:half]:
                await tested.world.step(start, action)
            await other.restore(recording.scenario, await tested.world.save())
            for action in recording.actions[half:]:
                await other.step(start, action)
            if difference := first_difference(recording, start):
                failures.append(f"{recording.scenario.id} after restore: {difference}")

    await tested.fresh(resume)
    return result("restore", failures, {"episodes": len(episodes), "different": len(failures)})


async def check_exploits(tested: Qualification) -> PropertyCheck:
    """Check that cheap exploits succeed no more often than chance, and earn less reward than solutions."""
    played: dict[tuple[str, str], list[Recording]] = {}
    for number, scenario in enumerate(tested.chosen):
        for name, variants in exploits(number).items():
            for variant, policy in variants.items():
                recording = await play(tested.world, scenario, f"{name}: {variant}", policy, tested.turns)
                played.setdefault((name, variant), []).append(recording)
    limit = max(MOST_EXPLOIT, _rate(tested.random))
    failures: list[str] = []
    figures: dict[str, float] = {}
    examples: list[Recording] = []
    for (name, variant), recordings in played.items():
        successes = [recording for recording in recordings if recording.success]
        rate, earned = len(successes) / len(recordings), _mean(await tested.rewards(recordings, []))
        figures[name] = max(figures.get(name, 0.0), rate)
        if wilson(len(successes), len(recordings))[0] > limit:
            failures.append(f"{name} ({variant}) succeeds in {rate:.0%} of the episodes")
            examples += successes[:1]
        elif tested.worth > 0 and earned >= tested.worth:
            failures.append(f"{name} ({variant}) earns a reward of {earned:.3g}, solutions {tested.worth:.3g}")
            examples += recordings[:1]
        tested.exploited += (successes or recordings)[:1]
    return result("exploits", failures, figures, examples)


def _played(tested: Qualification) -> list[Recording]:
    """Return the episodes of the solver and of chance, alternating."""
    if not tested.solved:
        return tested.random
    return [recording for pair in zip(tested.solved, tested.random, strict=False) for recording in pair]


def _mean(rewards: Sequence[float]) -> float:
    return fmean(rewards) if rewards else 0.0


def _rate(recordings: Sequence[Recording]) -> float:
    return sum(recording.success for recording in recordings) / len(recordings) if recordings else 0.0


async def check_splits(tested: Qualification) -> PropertyCheck:
    """Check ids, inputs, and whether solutions of similar training scenarios solve held-out scenarios.

    Equal inputs under different ids are one task. Nearly equal prompts alone are none: a game whose prompt states only
    its rules has the same prompt in every scenario. Therefore the solution of the training scenario with the most
    similar prompt is played in the held-out scenario. If it succeeds, a policy that memorizes solves the held-out
    scenario."""
    train, heldout = tested.scenarios["train"], tested.scenarios["heldout"]
    if not train or not heldout:
        empty = "train" if not train else "heldout"
        return result("splits", [f"the split {empty} has no scenarios"], {"train": len(train), "heldout": len(heldout)})
    ids = [scenario.id for scenario in [*train, *heldout]]
    failures = [f"{len(ids) - len(set(ids))} scenarios repeat an id"] if len(set(ids)) < len(ids) else []
    inputs = {_content(scenario): scenario.id for scenario in train}
    equal = [scenario for scenario in heldout if _content(scenario) in inputs]
    failures += [f"{scenario.id} is the same task as {inputs[_content(scenario)]}" for scenario in equal]
    texts = await _prompts(tested.world, train, heldout)
    similar = _similar(train, heldout, texts)
    figures: dict[str, float] = {"train": len(train), "heldout": len(heldout), "equal": len(equal)}
    figures["compared"] = len(texts)
    figures["similar_prompts"] = len(similar)
    examples: list[Recording] = []
    if tested.has_solver and similar:
        attempts = [await _memorized(tested.world, known, scenario) for scenario, known in _draw(similar)]
        examples = [attempt for attempt in attempts if attempt.success]
        compared = sum(scenario.id in texts for scenario in heldout)
        reached = len(similar) / compared
        figures["memorized"] = share = len(examples) / len(attempts) * reached
        if wilson(len(examples), len(attempts))[0] * reached > MOST_MEMORIZED:
            failures.append(
                f"solutions of training scenarios solve {share:.0%} of the held-out scenarios with nearly equal prompts"
            )
    return result("splits", failures, figures, examples)


def _content(scenario: Scenario) -> str:
    return json.dumps([scenario.type, scenario.input], sort_keys=True, default=str)


async def _prompts(world: TestedInstance, train: list[Scenario], heldout: list[Scenario]) -> dict[str, str]:
    """Return the user's part of the prompts by scenario id, held-out ones first."""
    texts, end = {}, time.monotonic() + SECONDS
    for scenario in [*heldout, *train]:
        first = (await world.reset(scenario, "prompt")).first
        texts[scenario.id] = "\n".join(str(message["content"]) for message in first if message["role"] != "system")
        if time.monotonic() > end:
            break
    return texts


def _similar(train: list[Scenario], heldout: list[Scenario], texts: dict[str, str]) -> list[tuple[Scenario, Scenario]]:
    """Return the held-out scenarios that have a training scenario with a nearly equal prompt, each with it."""
    memory = SimilarTexts(SLOTS)
    exact: dict[str, int] = {}
    for number, scenario in enumerate(train):
        if scenario.id in texts:
            memory.add(texts[scenario.id], number)
            exact.setdefault(texts[scenario.id], number)
    pairs = []
    for scenario in heldout:
        text = texts.get(scenario.id)
        if text is None:
            continue
        similar = exact.get(text, memory.add(text, len(train)))
        if similar is not None and similar < len(train):
            pairs.append((scenario, train[similar]))
    return pairs


def _draw(pairs: list[tuple[Scenario, Scenario]]) -> list[tuple[Scenario, Scenario]]:
    return random.Random(0).sample(pairs, min(PLAYED, len(pairs)))


async def _memorized(world: TestedInstance, known: Scenario, scenario: Scenario) -> Recording:
    """Play the solution of a training scenario in another scenario."""
    await world.reset(known, "solver")
    actions = await world.solve(known)
    recording = await world.reset(scenario, f"solution of {known.id}")
    for action in actions:
        if (await world.step(recording, action)).done:
            break
    return recording
