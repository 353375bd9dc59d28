"""Rewards on the command line of `flows.explain rejudge`: `reward=NAME` begins one; overrides of its keys follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.errors import Problem, SpecError
from components.specs import Target, validate
from flows.experiment.spec import ExperimentSpec

OWN = "own"
"""Name of the run's own reward."""
EXAMPLE = "reward=length reward.target=20 reward=outcome"


@dataclass(frozen=True)
class NamedReward:
    """A reward to compare."""

    name: str
    """Its overrides without `reward=`, or `own`."""
    target: Target


def split(overrides: Sequence[str]) -> tuple[list[list[str]], list[Problem]]:
    """Return the overrides of each reward, and the problems of overrides that belong to none."""
    rewards: list[list[str]] = []
    problems = []
    for override in overrides:
        key, equals, _ = override.lstrip("+~").partition("=")
        if override.startswith("reward=") and equals:
            rewards.append([override])
        elif not key.startswith("reward."):
            problems.append(Problem(key, f"is not a key of a reward; expected RUN {EXAMPLE}"))
        elif not rewards:
            problems.append(Problem(key, f"belongs to no reward; expected reward=NAME before it: RUN {EXAMPLE}"))
        else:
            rewards[-1].append(override)
    if not rewards and not problems:
        problems.append(Problem("reward", f"no reward to compare with the run's own; expected RUN {EXAMPLE}"))
    return rewards, problems


def _name(overrides: Sequence[str]) -> str:
    """Return overrides such as `reward=length reward.target=9` as `length target=9`."""
    first, *others = overrides
    name = " ".join([first.removeprefix("reward="), *(text.replace("reward.", "", 1) for text in others)])
    return first if name == OWN else name


def compose(
    overrides: Sequence[str], run: ExperimentSpec, data: dict[str, Any], config_dir: str | Path | None
) -> list[NamedReward]:
    """Return the rewards, composed as in an experiment and checked with the other settings of the run.

    data: the run's configuration. Raises SpecError with the problems of all rewards, and for a repeated one."""
    from flows.experiment.compose import compose as composed
    from flows.terminal.overrides import mask_overrides, refuse_secrets

    refuse_secrets(overrides)
    rewards: list[NamedReward] = []
    parts, problems = split(overrides)
    allow = [f"allow=[{','.join(run.allow)}]"] if run.allow else []
    for own in parts:
        shown = mask_overrides(own)
        name = _name(shown)
        try:
            target = composed([*own, *allow], config_dir=config_dir).reward
            settings = {**data, "reward": target.model_dump(mode="json", by_alias=True), "reward_model": None}
            validate(ExperimentSpec, settings)
        except SpecError as error:
            problems += [problem for problem in error.problems if problem not in problems]
            continue
        if name in [reward.name for reward in rewards]:
            problems.append(Problem("reward", f"{name} is given twice"))
        rewards.append(NamedReward(name, target))
    if problems:
        raise SpecError(problems)
    return rewards
