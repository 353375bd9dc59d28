"""Messages on the course of a planned run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from components.errors import ResourceError
from components.rewards.llm.spec import asked_by
from flows.experiment.guards import RULES
from flows.experiment.spec import ExperimentSpec
from flows.release import deployment
from flows.stages import PLACED

WHOLE = ("evaluate[start]", "evaluate[sft]", "evaluate[feedback]")
"""Evaluations that always play all scenarios, because later ones are compared with them."""


def resolved_values(spec: ExperimentSpec) -> Iterator[str]:
    """Yield a message for each automatic value of the configuration, with its resolved value and the reason, and on the
    age of the rounds' episodes."""
    if (excess := spec.collect.excess_overlap(spec.rounds)) is not None:
        yield excess
    elif spec.rounds and (spec.collect.overlap or spec.collect.partial):
        oldest = min(spec.collect.staleness(spec.agent.max_turns), spec.rounds - 1)
        yield (
            f"collect.overlap={spec.collect.overlap}: round r is collected by the policy after round "
            f"r - {1 + spec.collect.overlap}; its tokens are at most {oldest} policy versions old when they are "
            "trained on"
        )
    if spec.model.dtype == "auto" and (spec.model.source == "hub" or spec.inference.short_adapters):
        dtypes = {stage: spec.resolve_dtypes(spec.model, stage).dtype for stage in PLACED}
        by_dtype = {dtype: [stage for stage in PLACED if dtypes[stage] == dtype] for dtype in dtypes.values()}
        values = (dtype if len(by_dtype) == 1 else f"{dtype} ({', '.join(by_dtype[dtype])})" for dtype in by_dtype)
        yield f"model.dtype=auto resolves to {' and '.join(values)}"
    yield from spec.inference.notes()
    yield from place_notes(spec)
    yield from _local_judges(spec)
    if spec.rounds and (reason := spec.truncation_reason()) is not None:
        yield f"algorithm.correction=auto resolves to truncate: {reason}"


def place_notes(spec: ExperimentSpec) -> Iterator[str]:
    """Yield the messages of the places where stages run."""
    for name, place in spec.compute.places_in_use.items():
        yield from (f"compute.places.{name}.{note}" for note in place.notes())


def _local_judges(spec: ExperimentSpec) -> Iterator[str]:
    """Yield a message if the judge stage loads a model on this machine while other stages run on remote ones."""
    compute = spec.compute
    loaded = [judge.label for judge in asked_by(spec.reward) if judge.asks_policy or judge.frozen_model is not None]
    loaded += ["reward models"] if spec.reward_model is not None else []
    machines = [compute.placement(stage) for stage in ("collect", "train") if compute.place(stage).remote]
    if loaded and machines and not compute.place("judge").remote:
        yield (
            f"judge loads {', '.join(loaded)} on this machine, while other stages run on {machines[0]}; to judge "
            f"there: compute.stages.judge={machines[0]}"
        )


def process_starts(estimates: Iterable[tuple[str, bool, bool]]) -> Iterator[str]:
    """Yield a message on estimates that include the start of a process, and on those that lack it.

    estimates: stage, whether the earlier stage ran in a process of its own, and whether the planned one does."""
    rows = list(estimates)
    if included := list(dict.fromkeys(stage for stage, earlier, _ in rows if earlier)):
        yield (
            f"the times of {', '.join(included)} include loading packages and model where a process was new: "
            "the earlier stages ran in other processes than the flow"
        )
    if excluded := list(dict.fromkeys(stage for stage, earlier, planned in rows if planned and not earlier)):
        yield (
            f"the times of {', '.join(excluded)} exclude the start of their processes: the earlier stages ran in the "
            "process of the flow"
        )


def deployment_problems(spec: ExperimentSpec) -> Iterator[str]:
    """Yield a message if a prerequisite of `deploy.target` is missing."""
    if spec.deploy.target is not None:
        try:
            deployment.check(spec)
        except ResourceError as error:
            yield str(error)


def pending_decisions(spec: ExperimentSpec, pending: Mapping[str, str], decided: set[str]) -> dict[str, str]:
    """Return messages on decisions that only the run can take, by kind: `refills`, `end`, `stop`, `best`.

    pending: stages that run, by label. decided: kinds of the decisions that the plan has taken."""
    messages: dict[str, str] = {}
    if spec.collect.refills and "filter" in pending.values():
        messages["refills"] = (
            f"the plan excludes up to {spec.collect.refills} refills of each round, each collected, judged and "
            "filtered: the filter of the round decides on them"
        )
    rules = []
    evaluations = [label for label, stage in pending.items() if stage == "evaluate" and label != "evaluate[final]"]
    if spec.early_stopping is not None and "early_stopping" not in decided and evaluations:
        rules.append("early stopping")
    for name, stages in RULES.items():
        if getattr(spec.guards, name) == "stop" and set(stages) & set(pending.values()):
            rules.append(f"guards.{name}")
    if rules:
        messages["end"] = f"this is an upper bound: {' or '.join(rules)} may end the run earlier"
    stopping = [label for label, stage in pending.items() if stage == "evaluate" and label not in WHOLE]
    if spec.evaluate.stop == "decided" and stopping:
        messages["stop"] = (
            "evaluations in and after the rounds play at most the episodes of the plan: each ends when its difference "
            "to the start of the rounds is decided (evaluate.stop=decided)"
        )
    if spec.rounds and spec.deploy.policy == "best" and "best" not in decided:
        messages["best"] = "the plan takes the last policy as the best; the run chooses it after all evaluations"
    return messages
