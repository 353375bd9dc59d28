"""Continual learning: the environments of a mixture one after the other, and what is forgotten of the earlier ones."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from components.artifacts import Artifact
from components.environments.mixture import Mixture
from components.errors import Problem, SpecError
from components.json_text import read_json
from flows.experiment.flow import recipe
from flows.experiment.spec import ExperimentSpec
from flows.recipes.run import Run
from flows.recipes.stage_calls import PolicyVersion

Rates = Mapping[str, float]
"""Held-out success by environment."""


@recipe("rounds", "warmup", "replay", "ewc")
def continual(run: Run, spec: ExperimentSpec) -> PolicyVersion:
    """Train on each environment of the mixture for an equal share of the rounds, in their order, and evaluate on all of
    them after each. `replay` draws on the environments before only, and `ewc` keeps the policy near the end of the one
    before; with `agent.by_environment`, each environment has a new adapter, and those before are frozen. Report
    `success NAME` of the final policy and `forgetting`. Raises SpecError for an environment that is no mixture, or with
    fewer rounds than environments."""
    run.refuse_overlap()
    run.refuse_stopped_evaluations()
    environments = _environments(spec)
    names = list(environments)
    order = [names[number * len(names) // spec.rounds] for number in range(spec.rounds)]
    policy, _ = run.warm_up(run.begin())
    after: list[Rates] = []
    for round in run.rounds(policy):
        name, upcoming = order[round.number - 1], order[round.number :]
        if name not in order[: round.number - 1]:
            round.consolidate()
        mixture = spec.required_environment.with_arguments(environments={name: environments[name]})
        round.train(round.gather(run.using(environment=mixture)), roles=[name] if spec.agent.by_environment else None)
        if name not in upcoming:
            after.append(success_by_environment(run.evaluate(run.policy, name if upcoming else "final")))
    if len(after) == len(names):  # fewer if a sweep pruned the run
        for name, rate in after[-1].items():
            run.report(f"success {name}", rate)
        run.report("forgetting", forgetting(names, after))
    return run.policy


def forgetting(names: list[str], after: list[Rates]) -> float | None:
    """Return the mean of R_jj - R_Tj over the environments j before the last, T, with R_ij the success on environment j
    after training on environment i: backward transfer (arXiv:1706.08840, eq. 3) with its sign reversed. None if a rate
    is unknown."""
    final = after[-1]
    earlier = list(zip(names[:-1], after, strict=False))
    if any(name not in rates or name not in final for name, rates in earlier):
        return None
    return fmean(rates[name] - final[name] for name, rates in earlier)


def success_by_environment(evaluation: Artifact) -> dict[str, float]:
    """Return the success rate of each environment of a mixture; empty for a pending evaluation."""
    if not evaluation.digest:
        return {}
    counts: dict[str, list[float]] = {}
    for type_, summary in read_json(evaluation.path / "summary.json")["by_type"].items():
        success = summary["success"]
        if success["mean"] is not None:
            solved, episodes = counts.setdefault(type_.partition("/")[0], [0.0, 0.0])
            counts[type_.partition("/")[0]] = [solved + success["mean"] * success["n"], episodes + success["n"]]
    return {name: solved / episodes for name, (solved, episodes) in counts.items()}


def _environments(spec: ExperimentSpec) -> Mapping[str, object]:
    """Return the targets of the mixture's environments by name."""
    if spec.agent.by_environment and spec.replay is not None:
        text = "set, but agent.by_environment freezes the adapters of the environments before; expected null"
        raise SpecError([Problem("replay", text)])
    if spec.required_environment.factory() is not Mixture:
        target = spec.required_environment.target
        raise SpecError([Problem("flow", f"continual: {target} is one environment; expected environment=mixture")])
    environments: Mapping[str, object] = spec.required_environment.arguments["environments"]
    if not 2 <= len(environments) <= spec.rounds:
        numbers = f"{len(environments)} environments in {spec.rounds} rounds"
        raise SpecError([Problem("rounds", f"continual: {numbers}; expected two or more, with a round for each")])
    return environments
