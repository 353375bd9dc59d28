"""Offline training: checks and imports data of one's own, and trains on it."""

from __future__ import annotations

from components.errors import Problem, SpecError
from flows.experiment.flow import recipe
from flows.experiment.spec import ExperimentSpec
from flows.recipes.run import Run
from flows.recipes.stage_calls import PolicyVersion

NEEDED = {
    "choices": "preference pairs or ranked answers (two answers to one prompt, of which one is better)",
    "scores": "answers with a score, a thumb, or an accepted completion",
    "corrections": "accepted completions",
}
"""Data that an algorithm learns from, by `AlgorithmSpec.feedback_kinds`."""


@recipe("warmup", "fork", "data")
def offline(run: Run, spec: ExperimentSpec) -> PolicyVersion:
    """Train `algorithm` on the data of `data`: from the base model, the policy of `fork`, or that after a `warmup` on
    demonstrations. Evaluate before and after. Raises SpecError if the algorithm learns nothing from the data."""
    policy, _ = run.warm_up(run.begin(pretrains=True), source=run.demonstrations)
    policy = run.train([run.import_data()], "data", algorithm=spec.algorithm, start=policy)
    if policy.checkpoint is not None and policy.checkpoint.metrics.get("skipped"):
        needed = " or ".join(NEEDED[kind] for kind in spec.algorithm.feedback_kinds)
        text = f"algorithm={spec.algorithm.name} learns nothing from this data; it needs {needed}"
        raise SpecError([Problem("data", text)])
    return policy
