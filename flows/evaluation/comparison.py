"""Evaluation of policies with the ordinary stages, and the comparison of their results."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from components.evaluation.metrics import interval_of
from components.json_text import read_json
from components.rollout.usage import PROVIDER_COST
from flows.evaluation.policies import NamedPolicy
from flows.experiment.requests import Requests

if TYPE_CHECKING:
    from components.artifacts import Artifact
    from components.evaluation.policies import PoliciesComparison, PolicyResult
    from flows.execution.executor import Execution
    from flows.experiment.spec import ExperimentSpec


def sampled_spec(spec: ExperimentSpec, samples: int) -> ExperimentSpec:
    """Return the experiment as it is evaluated. Several greedy samples of a scenario would be identical, so they use
    `collect.temperature` if `evaluate.temperature` is 0."""
    if samples == 1 or spec.evaluate.temperature > 0:
        return spec
    evaluate = spec.evaluate.model_copy(update={"temperature": spec.collect.temperature})
    return spec.model_copy(update={"evaluate": evaluate})


def evaluate(execution: Execution, policies: Sequence[NamedPolicy], samples: int) -> dict[str, tuple[Artifact, str]]:
    """Evaluate the policies one after the other; return the artifact and `ran` or `cached` by name. Raises the errors
    of the stages."""
    results = {}
    for policy in policies:
        request = Requests(policy.spec).evaluate(policy.checkpoint, actor=policy.actor, samples=samples)
        done = execution.stage(f"evaluate[{policy.name}]", 0, request)
        results[policy.name] = (done.artifact, done.status)
    return results


def comparison(
    spec: ExperimentSpec,
    policies: Sequence[NamedPolicy],
    artifacts: Sequence[Artifact],
    samples: int,
    overrides: Sequence[str],
) -> PoliciesComparison:
    """Return the comparison of the evaluated policies. artifacts: their evaluations, in the same order."""
    from components.evaluation.policies import PoliciesComparison, differences

    results = [_result(policy, artifact, samples) for policy, artifact in zip(policies, artifacts, strict=True)]
    success, reward = differences(results)
    return PoliciesComparison(
        experiment=spec.name,
        split=spec.evaluate.split,
        samples=samples,
        temperature=spec.evaluate.temperature,
        policies=results,
        success=success,
        reward=reward,
        created=time.strftime("%Y-%m-%d %H:%M:%S"),
        overrides=overrides,
    )


def _result(policy: NamedPolicy, artifact: Artifact, samples: int) -> PolicyResult:
    from components.evaluation.policies import PlayedEpisodes, measure_policy
    from components.trajectories.stored import StoredTrajectories

    episodes = StoredTrajectories(artifact.path)
    return measure_policy(
        policy.name,
        policy.description,
        artifact.key,
        PlayedEpisodes(episodes, episodes.scores, read_json(artifact.path / "times.json")),
        cost=_cost(policy, artifact),
        samples=samples,
    )


def _cost(policy: NamedPolicy, artifact: Artifact) -> float | None:
    """Return the cost of an episode: what the provider charged, or the time of the machine at its price; None if there
    is no price."""
    metrics = artifact.metrics
    episodes = metrics["episodes"]
    if policy.actor != "policy" or not episodes:
        return None
    if not policy.spec.inference.loads_policies:
        return metrics[PROVIDER_COST] / episodes if PROVIDER_COST in metrics else None
    price = policy.spec.compute.hourly_price("evaluate")
    return price * metrics["seconds"] / 3600 / episodes if price else None


def figures(comparison: PoliciesComparison, statuses: dict[str, str]) -> dict[str, Any]:
    """Return the comparison as JSON data. statuses: `ran` or `cached`, by policy."""
    return {
        "experiment": comparison.experiment,
        "split": comparison.split,
        "samples": comparison.samples,
        "temperature": comparison.temperature,
        "scenarios": max(policy.summary["scenarios"] for policy in comparison.policies),
        "baseline": comparison.baseline,
        "policies": {
            policy.name: _policy_figures(policy, comparison.samples) | {"status": statuses[policy.name]}
            for policy in comparison.policies
        },
        "differences": {
            name: {"success": _difference(comparison.success[name]), "reward": _difference(comparison.reward[name])}
            for name in comparison.success
        },
    }


def _policy_figures(policy: PolicyResult, samples: int) -> dict[str, Any]:
    summary = policy.summary
    values: dict[str, Any] = {"description": policy.description, "key": policy.key}
    measures = {name: summary[name] for name in ("success", "reward", "turns")}
    measures |= {"tokens": policy.tokens, "seconds": policy.seconds}
    if samples > 1:
        measures |= {name: policy.passes[name] for name in ("pass_at_k", "pass_hat_k")}
    for name, measure in measures.items():
        values |= {name: measure["mean"], f"{name}_interval": interval_of(measure)}
    return values | {
        "cost": policy.cost,
        "episodes": summary["episodes"],
        "failed": summary["failures"]["count"],
        "unscored": summary["unscored"],
        "by_type": _by_kind(summary["by_type"]),
        "by_difficulty": _by_kind(summary["by_difficulty"]),
        "errors": {error.name: len(error.places) for error in policy.errors},
    }


def _by_kind(measures: dict[str, Any]) -> dict[str, Any]:
    return {
        kind: {"success": part["success"]["mean"], "reward": part["reward"]["mean"], "episodes": part["episodes"]}
        for kind, part in measures.items()
    }


def _difference(paired: Any) -> dict[str, Any] | None:
    if paired is None:
        return None
    return {"difference": paired["difference"], "interval": interval_of(paired), "scenarios": paired["n"]}
