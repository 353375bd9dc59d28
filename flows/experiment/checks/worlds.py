"""What is asked of an environment: the protocol, enough scenarios in the right splits, solutions to show."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from components.environments.protocol import Environment
from components.errors import Problem, ResourceError, SpecError
from components.evaluation.spec import EvaluateSpec
from components.rollout.collector import choose_scenarios
from components.rollout.spec import CollectSpec
from components.specs import Target
from components.trajectories.groups import misnamed
from components.trajectories.schema import Scenario
from flows.experiment.sections import RewardModelPartSpec, WarmupSpec

TRAIN = "train"
"""Split from which episodes for training are collected."""


def environment(
    environment: Target,
    evaluate: EvaluateSpec,
    collect: CollectSpec,
    rounds: int,
    warmup: WarmupSpec | None,
    reward_model: RewardModelPartSpec | None,
) -> Iterator[Problem]:
    thing = environment.factory()
    methods = [name for name in vars(Environment) if not name.startswith("_") and callable(getattr(Environment, name))]
    lacking = [name for name in methods if name not in dir(thing)]
    if lacking:
        what = f"{environment.target} is no environment; it lacks {', '.join(lacking)}"
        yield Problem("environment._target_", f"{what} (see components.environments.protocol)")
        return
    if warmup is not None and warmup.teacher is None and "solve" not in dir(thing):
        yield Problem(
            "warmup",
            f"{environment.target} has no method `solve` to take demonstrations from; write warmup=none, or "
            "warmup=teacher",
        )
    try:
        built = environment.build()
        try:
            train, heldout = (list(_result(built.scenarios(split))) for split in (TRAIN, evaluate.split))
        finally:
            _result(built.close())
    except ResourceError as error:
        path, _, text = str(error).partition(": ")
        yield Problem(path, text) if re.fullmatch(r"environment[\w.]*", path) else Problem("environment", str(error))
        return
    except SpecError as error:
        yield from (
            one if one.path.startswith("environment") else replace(one, path="environment") for one in error.problems
        )
        return
    except Exception as error:  # noqa: BLE001  code of the user: whatever it raises is the answer
        yield Problem(
            "environment", f"{environment.target} cannot state its scenarios: {type(error).__name__}: {error}"
        )
        return
    if other := [one for one in (*train, *heldout) if not isinstance(one, Scenario)]:
        what = f"{environment.target} gives {other[0]!r:.80} ({type(other[0]).__name__}) for a scenario"
        yield Problem("environment", f"{what}; expected components.trajectories.schema.Scenario")
        return
    if (wrong := misnamed((*train, *heldout))) is not None:
        yield Problem("environment", f"{environment.target} {wrong}")
    if not heldout:
        yield Problem(
            "evaluate.split", f"{environment.target} has no scenarios in split {evaluate.split!r} to evaluate on"
        )
    elif evaluate.scenarios is not None and evaluate.scenarios > len(heldout):
        most = f"expected at most the {len(heldout)} scenarios of split {evaluate.split!r}"
        yield Problem("evaluate.scenarios", f"{evaluate.scenarios}: {most}")
    if rounds == 0 and warmup is None and reward_model is None:
        return
    if not train:
        yield Problem("environment", f"{environment.target} has no scenarios in split {TRAIN!r} to train on")
        return
    if rounds and collect.scenarios > len(train):
        yield Problem(
            "collect.scenarios", f"{collect.scenarios}: one round can draw at most the {len(train)} of {TRAIN!r}"
        )
    elif rounds and collect.scenarios * (1 + collect.refills) > len(train):
        yield Problem(
            "collect.refills",
            f"{collect.refills}: a round may need {collect.scenarios} scenarios and as many for each refill, and split "
            f"{TRAIN!r} has {len(train)}; expected fewer",
        )
    if warmup is not None and warmup.demonstrations > len(train):
        yield Problem("warmup.demonstrations", f"{warmup.demonstrations}: split {TRAIN!r} has {len(train)} scenarios")
    if reward_model is not None and reward_model.scenarios > len(train):
        yield Problem("reward_model.scenarios", f"{reward_model.scenarios}: split {TRAIN!r} has {len(train)} scenarios")
    ids = [scenario.id for scenario in train]
    shared = set(ids) & {scenario.id for scenario in heldout}
    if evaluate.split == TRAIN:
        yield Problem("evaluate.split", f"{TRAIN!r} is trained on; expected a split that shares no scenario with it")
    elif shared:
        both = f"both {TRAIN!r} and {evaluate.split!r}"
        yield Problem("environment", f"{len(shared)} of its scenarios are in {both}, such as {min(shared)!r}")
    if len(set(ids)) < len(ids) or len({s.id for s in heldout}) < len(heldout):
        yield Problem("environment", f"{environment.target} gives the same id to several scenarios")


def stated(environment: Target, splits: Sequence[str]) -> list[Scenario]:
    """Return the scenarios of the splits; none where the environment cannot state them, which `environment` says."""
    try:
        built = environment.build()
        try:
            found = [one for split in splits for one in _result(built.scenarios(split))]
        finally:
            _result(built.close())
    except Exception:  # noqa: BLE001  code of the user
        return []
    return [one for one in found if isinstance(one, Scenario)]


def demonstrations(environment: Target, warmup: WarmupSpec | None, seed: int) -> Iterator[Problem]:
    """Whether the scenarios that the warmup draws have a solution, where an environment can say so."""
    if warmup is None or warmup.teacher is not None or "check_solutions" not in dir(environment.factory()):
        return
    try:
        built = environment.build()
        train = list(_result(built.scenarios(TRAIN)))
    except Exception:  # noqa: BLE001  `environment` says so
        return
    try:
        if warmup.demonstrations <= len(train):
            built.check_solutions(choose_scenarios(train, warmup.demonstrations, 0, seed))
    except SpecError as error:
        yield from error.problems
    finally:
        _result(built.close())


def _result(value: Any) -> Any:
    """What a method of an environment gave; it may be plain or async."""
    return asyncio.run(value) if inspect.iscoroutine(value) else value
