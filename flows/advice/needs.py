"""Needs and costs of a composed experiment, from the declarations of its algorithm, reward models and stages."""

from __future__ import annotations

from components.algorithms.spec import AlgorithmSpec
from components.artifacts import Artifact
from components.rewards.llm.spec import asked_by
from flows.experiment.spec import ExperimentSpec
from flows.recipes.rehearsal import placeholder
from flows.recipes.run import Run
from flows.stages import DISTRIBUTED, STAGES
from flows.stages.base import Request


def algorithm_needs(algorithm: AlgorithmSpec) -> dict[str, str | None]:
    """Return what an algorithm needs besides the policy: None for what it does not need."""
    reference = "start" if algorithm.reference_is_start else "base"
    return {
        "reference policy": reference if algorithm.reads_reference else None,
        "pairs": "better and worse episodes of a scenario" if "choices" in algorithm.feedback_kinds else None,
        "critic": "trained with the policy" if algorithm.has_critic else None,
        "teacher": algorithm.teacher_model.name if algorithm.teacher_model is not None else None,
    }


def passes(algorithm: AlgorithmSpec) -> tuple[int, int]:
    """Return the passes over each trained token: forward and backward, and forward only."""
    return 1 + algorithm.has_critic, algorithm.reads_reference + (algorithm.teacher_model is not None)


def requirements(spec: ExperimentSpec) -> tuple[dict[str, str | None], dict[str, int]]:
    """Return needs and costs. Costs: maximum number of episodes, without evaluations; trainings; passes over
    each token that trains the policy. A run that starts from another one has neither of the first two."""
    requests: list[Request] = []

    def call(label: str, step: int, request: Request) -> Artifact:
        requests.append(request)
        return placeholder(label, request.stage)

    costs = {}
    if spec.fork is None and spec.feedback is None:
        model = spec.model.model_copy(update={"dtype": "float32"})  # auto would read the weights, perhaps of the hub
        Run(spec.model_copy(update={"model": model}), call).execute()
        costs["episodes"] = sum(STAGES[request.stage].episodes(request) or 0 for request in requests)
        costs["trainings"] = sum(request.stage in DISTRIBUTED for request in requests)
    trains = costs.get("trainings") != 0
    needs = {
        "reward model": None if spec.reward_model is None else spec.reward_model.algorithm.name,
        "judge": ", ".join(judge.label for judge in asked_by(spec.reward)) or None,
        **(algorithm_needs(spec.algorithm) if trains else {}),
    }
    if trains:
        costs["gradient passes"], costs["forward passes"] = passes(spec.algorithm)
    return needs, costs
