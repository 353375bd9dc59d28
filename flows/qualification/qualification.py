"""Qualification of an experiment's environment: all checks, one after the other, on a few scenarios of each split."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from components.environments.protocol import Environment
from components.errors import BoundaryError
from components.evaluation.qualification_page import FAILED, QualificationCheck
from components.rewards.judge import RewardCaller
from components.rewards.protocol import ModelReward
from components.trajectories.schema import Scenario
from flows.qualification import checks, length, splits
from flows.qualification.recording import TestedInstance

if TYPE_CHECKING:
    from flows.qualification.settings import QualifiedSettings

TURNS = 30
"""Maximum number of actions of chance and of exploits, if `agent.max_turns` is larger."""
Check = Callable[[checks.Qualification], Awaitable[QualificationCheck]]
CHECKS: dict[str, Check] = {
    "solver": checks.check_solver,
    "chance": checks.check_chance,
    "replay": checks.check_replay,
    "isolation": checks.check_isolation,
    "restore": checks.check_restore,
    "splits": splits.check_splits,
    "exploits": checks.check_exploits,
    "agreement": checks.check_agreement,
}
"""Checks in their order; `length` follows."""


def qualify(spec: QualifiedSettings, count: int, cache: Path) -> list[QualificationCheck]:
    """Return the result of each check. count: number of scenarios to play. cache: folder of prepared models."""
    environment: Environment = spec.required_environment.build()
    results, chosen = asyncio.run(_play(spec, environment, count))
    return [*results, length.check_length(spec, cache, environment, chosen)]


async def _play(
    spec: QualifiedSettings, environment: Environment, count: int
) -> tuple[list[QualificationCheck], list[Scenario]]:
    world = TestedInstance(environment)
    try:
        scenarios = {split: await world.scenarios(split) for split in ("train", "heldout")}
        chosen = [*_draw(scenarios["heldout"], (count + 1) // 2), *_draw(scenarios["train"], count // 2)]
        turns = min(TURNS, spec.agent.max_turns)
        tested = checks.Qualification(spec.required_environment.build, world, scenarios, chosen, turns, _reward(spec))
        results = []
        for name, check in CHECKS.items():
            if not chosen:
                results.append(QualificationCheck(name, FAILED, "the environment has no scenarios"))
                continue
            results.append(await _checked(name, check, tested, spec.evaluate.timeout))
        return results, chosen
    finally:
        await world.close()


def _reward(spec: QualifiedSettings) -> RewardCaller | None:
    """Return the reward of the experiment; None if it asks a model, or depends on a whole collection."""
    reward = spec.reward.build()
    return None if isinstance(reward, ModelReward) or getattr(reward, "settles", False) else RewardCaller(reward)


async def _checked(name: str, check: Check, tested: checks.Qualification, timeout: float) -> QualificationCheck:
    """Run a check. An error of the environment, or a check that takes too long, is a failed check."""
    try:
        async with asyncio.timeout(timeout):
            return await check(tested)
    except BoundaryError as error:
        return QualificationCheck(name, FAILED, str(error)[:500])
    except TimeoutError:
        return QualificationCheck(name, FAILED, f"took longer than evaluate.timeout = {timeout:g} s")


def _draw(scenarios: list[Scenario], count: int) -> list[Scenario]:
    """Return `count` scenarios, drawn with a fixed seed: types and difficulties often alternate at equal distances."""
    return random.Random(0).sample(scenarios, min(count, len(scenarios)))
