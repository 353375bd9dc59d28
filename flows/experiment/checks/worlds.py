"""Checks of an environment: its protocol, the number of scenarios per split, and its solutions for demonstrations."""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from components.data.spec import DataSpec
from components.environments.protocol import Environment
from components.errors import Problem, ResourceError, SpecError
from components.evaluation.spec import EvaluateSpec
from components.exceptions import described
from components.rollout.collect_spec import CollectSpec
from components.rollout.collector import choose_scenarios
from components.rollout.spec import AgentSpec
from components.specs import Target
from components.trajectories.groups import misnamed
from components.trajectories.schema import Scenario
from flows.experiment.checks.importing import demonstrated
from flows.experiment.flow import FlowTarget
from flows.experiment.sections import RewardModelPartSpec, WarmupSpec

TRAIN = "train"
"""Name of the split from which training episodes are collected."""


def environment(
    environment: Target,
    evaluate: EvaluateSpec,
    collect: CollectSpec,
    rounds: int,
    warmup: WarmupSpec | None,
    reward_model: RewardModelPartSpec | None,
    data: DataSpec,
    flow: FlowTarget,
) -> Iterator[Problem]:
    """Check the methods of the environment, its scenarios, and their number against what the run needs."""
    warmup = demonstrated(warmup, data, flow)
    factory = environment.factory()
    methods = [name for name in vars(Environment) if not name.startswith("_") and callable(getattr(Environment, name))]
    missing = [name for name in methods if name not in dir(factory)]
    if missing:
        message = f"{environment.target} is not an environment: it has no {', '.join(missing)}"
        yield Problem("environment._target_", f"{message} (see components.environments.protocol)")
        return
    if warmup is not None and warmup.teacher is None and "solve" not in dir(factory):
        yield Problem(
            "warmup",
            f"{environment.target} has no method `solve`, which produces the demonstrations; expected warmup=none or "
            "warmup=teacher",
        )
    try:
        built = environment.build()
        try:
            train, heldout = (_scenarios(built, split) for split in (TRAIN, evaluate.split))
        finally:
            _result(built.close())
    except ResourceError as error:
        path, _, text = str(error).partition(": ")
        yield Problem(path, text) if re.fullmatch(r"environment[\w.]*", path) else Problem("environment", str(error))
        return
    except SpecError as error:
        for problem in error.problems:
            yield problem if problem.path.startswith("environment") else replace(problem, path="environment")
        return
    except Exception as error:  # noqa: BLE001  user code may raise anything
        yield Problem("environment", f"{environment.target}.scenarios() raised {described(error)}")
        return
    both = functools.partial(itertools.chain, train, heldout)
    if invalid := [scenario for scenario in both() if not isinstance(scenario, Scenario)]:
        message = f"{environment.target}.scenarios() returned {invalid[0]!r:.80} ({type(invalid[0]).__name__})"
        yield Problem("environment", f"{message}; expected components.trajectories.schema.Scenario")
        return
    if (naming_problem := misnamed(both())) is not None:
        yield Problem("environment", f"{environment.target} {naming_problem}")
    if flow.generates:
        if train or heldout:
            text = f"{environment.target} has scenarios of its own, and flow={flow.name} writes them"
            yield Problem("environment", f"{text}; expected environment=mcp with environment.scenarios=null")
        return
    if environment.arguments.get("scenarios", ...) is None and not heldout:
        text = "null: no tasks; expected a JSON file of tasks, or flow=mcp_rl, which writes them"
        yield Problem("environment.scenarios", text)
        return
    if not heldout:
        yield Problem(
            "evaluate.split", f"{environment.target} has no scenarios in split {evaluate.split!r} to evaluate on"
        )
    elif evaluate.scenarios is not None and evaluate.scenarios > len(heldout):
        expected = f"expected at most {len(heldout)}, the number of scenarios in split {evaluate.split!r}"
        yield Problem("evaluate.scenarios", f"{evaluate.scenarios}: {expected}")
    elif evaluate.stop == "decided" and evaluate.batch >= (count := evaluate.scenarios or len(heldout)):
        yield Problem(
            "evaluate.batch",
            f"{evaluate.batch}: an evaluation has {count} scenarios, so its first look is at its end and "
            f"evaluate.stop=decided saves none; expected less than {count}, or evaluate.stop=never",
        )
    if rounds == 0 and warmup is None and reward_model is None:
        return
    if not train:
        yield Problem("environment", f"{environment.target} has no scenarios in split {TRAIN!r} to train on")
        return
    if rounds and collect.scenarios > len(train):
        yield Problem(
            "collect.scenarios",
            f"{collect.scenarios}: expected at most {len(train)}, the number of scenarios in split {TRAIN!r}",
        )
    elif rounds and collect.scenarios * (1 + collect.refills) > len(train):
        yield Problem(
            "collect.refills",
            f"{collect.refills}: a round may need {collect.scenarios * (1 + collect.refills)} scenarios "
            f"({collect.scenarios}, and as many for each refill), but split {TRAIN!r} has {len(train)}; expected at "
            f"most {len(train) // collect.scenarios - 1}",
        )
    if warmup is not None and warmup.demonstrations > len(train):
        yield Problem(
            "warmup.demonstrations",
            f"{warmup.demonstrations}: expected at most {len(train)}, the number of scenarios in split {TRAIN!r}",
        )
    if reward_model is not None and not reward_model.data.is_set and reward_model.scenarios > len(train):
        yield Problem(
            "reward_model.scenarios",
            f"{reward_model.scenarios}: expected at most {len(train)}, the number of scenarios in split {TRAIN!r}",
        )
    ids = [scenario.id for scenario in train]
    heldout_ids = [scenario.id for scenario in heldout]
    shared = set(ids) & set(heldout_ids)
    if evaluate.split == TRAIN:
        yield Problem(
            "evaluate.split", f"{TRAIN!r} is the training split; expected a split that shares no scenario with it"
        )
    elif shared:
        splits = f"both split {TRAIN!r} and split {evaluate.split!r}"
        yield Problem("environment", f"{len(shared)} scenarios are in {splits}, such as {min(shared)!r}")
    if len(set(ids)) < len(ids) or len(set(heldout_ids)) < len(heldout_ids):
        yield Problem("environment", f"{environment.target} has several scenarios with the same id")


def no_environment(
    environment: Target | None, flow: FlowTarget, warmup: WarmupSpec | None, certify: bool
) -> Iterator[Problem]:
    """Check that nothing plays an environment if there is none."""
    if environment is not None:
        return
    if not flow.offline:
        text = f"null: flow={flow.name} plays episodes; expected an environment, or flow=offline with data.path=FILE"
        yield Problem("environment", text)
    elif warmup is not None:
        text = "set, but its demonstrations are episodes of an environment, and environment=none"
        yield Problem("warmup", f"{text}; expected warmup=none, or environment=NAME")
    elif certify:
        text = "true: the certificate reads the prompts of an environment, and environment=none"
        yield Problem("certify", f"{text}; expected false, or environment=NAME")


def input_fields(environment: Target, splits: Sequence[str]) -> set[str] | None:
    """Return the fields of the scenarios' inputs; None without scenarios, or if the environment raises, which the check
    `environment` reports."""
    fields: set[str] | None = None

    def visit(scenario: Scenario) -> None:
        nonlocal fields
        fields = (fields or set()) | set(scenario.input)

    return fields if _visit_scenarios(environment, splits, visit) else None


def scenario_kinds(environment: Target, split: str) -> dict[str, set[Any]]:
    """Return the types and the difficulties of the scenarios of a split, by `type` and `difficulty`; empty if the
    environment raises."""
    types: set[Any] = set()
    difficulties: set[Any] = set()

    def visit(scenario: Scenario) -> None:
        types.add(scenario.type)
        difficulties.add(scenario.difficulty)

    return {"type": types, "difficulty": difficulties} if _visit_scenarios(environment, [split], visit) else {}


def offered_tools(environment: Target) -> list[dict[str, Any]]:
    """Return the tools that the environment offers; empty if they are unknown before an episode."""
    try:
        built = environment.build()
        try:
            return list(_result(built.tools()))
        finally:
            _result(built.close())
    except Exception:  # noqa: BLE001  user code may raise anything
        return []


def _visit_scenarios(environment: Target, splits: Sequence[str], visit: Callable[[Scenario], None]) -> bool:
    """Call a function with each scenario, one at a time. Return False if the environment raises."""
    try:
        built = environment.build()
        try:
            for scenario in itertools.chain.from_iterable(_result(built.scenarios(split)) for split in splits):
                if isinstance(scenario, Scenario):
                    visit(scenario)
        finally:
            _result(built.close())
    except Exception:  # noqa: BLE001  user code may raise anything
        return False
    return True


def demonstrations(
    environment: Target, warmup: WarmupSpec | None, seed: int, data: DataSpec, flow: FlowTarget
) -> Iterator[Problem]:
    """Check that the scenarios of the warmup have a solution, if the environment has a method `check_solutions`."""
    warmup = demonstrated(warmup, data, flow)
    if warmup is None or warmup.teacher is not None:
        return
    count = warmup.demonstrations

    def chosen(train: Sequence[Scenario]) -> Sequence[Scenario]:
        return choose_scenarios(train, count, 0, seed) if count <= len(train) else []

    yield from _refusals(environment, "check_solutions", [TRAIN], chosen)


def program(environment: Target, agent: AgentSpec, evaluate: EvaluateSpec) -> Iterator[Problem]:
    """Check that a program can do the tasks, if the environment has a method `check_program`."""
    if agent.command is not None:
        yield from _refusals(environment, "check_program", [TRAIN, evaluate.split], list)


def _refusals(
    environment: Target,
    method: str,
    splits: Sequence[str],
    chosen: Callable[[Sequence[Scenario]], Sequence[Scenario]],
) -> Iterator[Problem]:
    """Yield the problems that an optional method of the environment raises for the chosen scenarios of splits."""
    if method not in dir(environment.factory()):
        return
    try:
        built = environment.build()
        scenarios = [scenario for split in splits for scenario in _scenarios(built, split)]
    except Exception:  # noqa: BLE001  the check `environment` reports it
        return
    try:
        getattr(built, method)(chosen(scenarios))
    except SpecError as error:
        yield from error.problems
    finally:
        _result(built.close())


def _scenarios(environment: Environment, split: str) -> Sequence[Scenario]:
    """Return the scenarios of a split, which may be more than fit into memory."""
    scenarios = _result(environment.scenarios(split))
    return scenarios if isinstance(scenarios, Sequence) else list(scenarios)


def _result(value: Any) -> Any:
    """Return the result of a sync or async method of an environment."""
    return asyncio.run(value) if inspect.iscoroutine(value) else value
