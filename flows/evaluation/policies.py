"""Policies that `flows.evaluate` compares: names on the command line, resolved and checked before any work."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import yaml

from components.artifacts import Artifact, Store
from components.errors import Problem, ResourceError, SpecError
from components.inference.engines.litellm import LiteLLMSpec
from components.models.spec import OF_MACHINE, ModelSpec
from components.specs import validate
from components.specs.access import accesses
from flows.experiment.spec import ExperimentSpec
from flows.history.records import Records, RunRecord, checkpoints
from flows.history.trust import admit

if TYPE_CHECKING:
    from components.trajectories.schema import Scenario

KEY, SAMPLES = "policies", "samples"
BASE, RANDOM, SOLVER = "base", "random", "solver"
EXAMPLE = f"{KEY}=[base,RUN,RUN@STEP,random,solver,openai/gpt-5-mini]"
_RUN = re.compile(r"([A-Za-z0-9_.-]+)(?:@(\d+))?")


@dataclass(frozen=True)
class NamedPolicy:
    """A policy to evaluate."""

    name: str
    description: str
    spec: ExperimentSpec
    """Experiment, with the model and the engine that the policy plays with."""
    actor: Literal["policy", "solver", "random"] = "policy"
    checkpoint: Artifact | None = None
    """Trained policy; None for an untrained model and for an actor without one."""

    @property
    def needs_weights(self) -> bool:
        """True if this machine needs the weights of the model."""
        return self.actor == "policy" and self.spec.inference.needs_model


PolicyName = str | dict[str, Any]
"""Name of a policy, or the settings of a prompted model."""


def own_keys(overrides: Sequence[str]) -> tuple[list[PolicyName], int, list[str]]:
    """Return the policies, the samples, and the overrides of the experiment. Raises SpecError."""
    own = {key: text for key, _, text in (line.partition("=") for line in overrides) if key in (KEY, SAMPLES)}
    remaining = [line for line in overrides if line.partition("=")[0] not in (KEY, SAMPLES)]
    problems = []
    names = _items(own.get(KEY, ""))
    if names is None:
        problems.append(Problem(KEY, f"is {own[KEY]!r:.200}, which is no list; expected one such as {EXAMPLE}"))
    elif not names:
        problems.append(Problem(KEY, f"is empty; expected the policies to compare, such as {EXAMPLE}"))
    text = own.get(SAMPLES, "1")
    samples = int(text) if re.fullmatch(r"[0-9]{1,4}", text) else 0
    if samples < 1:
        problems.append(Problem(SAMPLES, f"is {text!r}; expected a whole number from 1 to 9999, episodes per scenario"))
    if problems:
        raise SpecError(problems)
    return names or [], samples, remaining


def _items(text: str) -> list[PolicyName] | None:
    """Return the items of a list, with or without brackets; None for anything else. Ids of digits stay text."""
    text = text.strip()
    listed = text if text.startswith("[") else f"[{text}]"
    try:
        texts, values = (yaml.load(listed, loader) for loader in (yaml.BaseLoader, yaml.SafeLoader))
    except yaml.YAMLError:
        return None
    items = [value if isinstance(value, dict) else name for name, value in zip(texts, values, strict=True)]
    return items if all(isinstance(item, str | dict) for item in items) else None


def resolve(names: Sequence[PolicyName], spec: ExperimentSpec, store: Store, trust: bool = False) -> list[NamedPolicy]:
    """Return the policies that the names refer to. trust: read the models that runs name.

    Raises SpecError for a name without meaning, a repeated name, and a step that its run does not have, ResourceError
    for an unknown run and for a checkpoint that is no longer in the store.
    """
    policies = [
        _prompted(name, spec) if isinstance(name, dict) or "/" in name else _resolved(name, spec, store, trust)
        for name in names
    ]
    resolved = [policy.name for policy in policies]
    if repeated := sorted({name for name in resolved if resolved.count(name) > 1}):
        raise SpecError([Problem(KEY, f"names {name} twice") for name in repeated])
    return policies


def _resolved(name: str, spec: ExperimentSpec, store: Store, trust: bool) -> NamedPolicy:
    if name == BASE:
        return NamedPolicy(name, f"{spec.model.name}, untrained", spec)
    if name == RANDOM:
        return NamedPolicy(name, "actions drawn at random", spec, actor="random")
    if name == SOLVER:
        return NamedPolicy(name, "solutions of the environment", spec, actor="solver")
    match = _RUN.fullmatch(name)
    if match is None:
        raise SpecError(
            [Problem(KEY, f"{name!r:.99} is no policy; expected base, random, solver, RUN, RUN@STEP, PROVIDER/MODEL")]
        )
    return _trained(name, match[1], match[2], spec, store, trust)


def _prompted(name: PolicyName, spec: ExperimentSpec) -> NamedPolicy:
    """Return a model of a provider. name: `PROVIDER/MODEL`, or a mapping with the settings of inference=litellm."""
    settings = name if isinstance(name, dict) else {"model": name}
    try:
        engine = validate(LiteLLMSpec, {**settings, "name": "litellm"})
    except SpecError as error:
        raise SpecError([Problem(KEY, f"{name}: {problem}") for problem in error.problems]) from None
    return NamedPolicy(engine.model, "prompted model, through LiteLLM", spec.model_copy(update={"inference": engine}))


def _trained(
    name: str, run_name: str, step: str | None, spec: ExperimentSpec, store: Store, trust: bool
) -> NamedPolicy:
    """Return a checkpoint of a run; without a step, of its final policy."""
    run = Records(spec.root).get(run_name)
    keys = checkpoints(run)
    if not keys:
        raise SpecError([Problem(KEY, f"{name}: run {run.short} has no checkpoint yet")])
    number = _final_step(run, keys) if step is None else int(step)
    if number not in keys:
        steps = ", ".join(map(str, sorted(keys)))
        raise SpecError(
            [Problem(KEY, f"{name}: run {run.short} has no checkpoint of step {number}; expected one of {steps}")]
        )
    if not spec.inference.loads_policies:
        problem = f"{name}: inference.name={spec.inference.name} cannot load a trained policy; expected another engine"
        raise SpecError([Problem(KEY, problem)])
    checkpoint = store.find(keys[number])
    if checkpoint is None:
        raise ResourceError(
            f"{KEY}={name}: the checkpoint of step {number} of run {run.short} is no longer in {store.root}; run it "
            "again"
        )
    own = {name: getattr(spec.model, name) for name in OF_MACHINE}
    model = validate(ModelSpec, run.spec["model"], path="model").model_copy(update=own)
    if (model.name, model.source) != (spec.model.name, spec.model.source):  # else the command names it itself
        admit(map(str, accesses(model, "model")), f"run {run.short}", trust)
    description = f"run {run.short} ({run.name}, seed {run.seed}) after step {number}"
    return NamedPolicy(name, description, spec.model_copy(update={"model": model}), checkpoint=checkpoint)


def _final_step(run: RunRecord, keys: dict[int, str]) -> int:
    """Return the step of a run's final policy: the chosen one if the run chose the best, else the last."""
    chosen = [notice.step for notice in run.notices if notice.kind == "best" and notice.step in keys]
    return chosen[-1] if chosen else max(keys)


def check(policies: Sequence[NamedPolicy], scenarios: Sequence[Scenario]) -> None:
    """Raise SpecError if the environment has no solver, or no random actions, for a policy that needs them."""
    from flows.evaluation.calibration import has_solutions

    for policy in policies:
        environment = policy.spec.required_environment
        if policy.actor == "solver" and not has_solutions(environment, scenarios):
            raise SpecError(
                [Problem(KEY, f"solver: {environment.target} has no solver for these scenarios; leave it out")]
            )
        if policy.actor == "random":
            _check_random(policy, scenarios[0])


def _check_random(policy: NamedPolicy, scenario: Scenario) -> None:
    from components.rollout.random_agent import check_random

    async def checked() -> None:
        environment = policy.spec.required_environment.build()
        try:
            await check_random(environment, scenario)
        finally:
            result: Any = environment.close()
            if inspect.isawaitable(result):
                await result

    try:
        asyncio.run(checked())
    except SpecError as error:
        raise SpecError([Problem(KEY, f"random: {problem.message}") for problem in error.problems]) from None
