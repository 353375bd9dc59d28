"""Deploy: the policy as a model that anything can load, and, if asked, proof that a server answers as it does."""

from __future__ import annotations

import functools
import json
from typing import Any

from components.artifacts import Draft
from components.deployment.card import model_card, placeless
from components.deployment.spec import DeploySpec
from components.errors import Problem, SpecError
from components.models.spec import ModelSpec
from components.rollout.spec import AgentSpec
from components.trajectories.schema import Trajectory
from flows.stages.base import Context, Inputs, Stage, StageSpec

EVALUATIONS = ("start", "sft", "feedback", "final")
"""Evaluations in order of training; as inputs they are named `evaluation_start` and so on."""


class DeployStage(StageSpec):
    name: str
    """Name of the model."""
    model: ModelSpec
    agent: AgentSpec
    deploy: DeploySpec
    step: int
    """The round after which the policy stood; 0: the start of the rounds."""
    experiment: dict[str, Any]
    """The composed config, for the model card."""

    def key_part(self) -> dict[str, Any]:
        part: dict[str, Any] = {
            "name": self.name,
            "model": self.model.model_dump(mode="json", exclude={"device"}),
            "mode": self.deploy.mode,
            "step": self.step,
            "experiment": placeless(self.experiment),
        }
        if self.deploy.mode == "serve":
            part |= {"prompts": self.deploy.prompts, "max_tokens": self.agent.max_tokens}
        return part


def deploy(spec: DeployStage, inputs: Inputs, draft: Draft, context: Context) -> dict[str, float]:
    """Writes the merged model with tokenizer and README.md. Inputs: `policy`, a checkpoint; the evaluations.

    With mode `serve` it is started as a server, which must answer held-out prompts exactly as the policy does; else
    EngineError, and nothing is exported.
    """
    from components.deployment.export import export
    from components.evaluation.metrics import paired_difference
    from components.models.learned import folder_of
    from components.models.weights import prepare
    from components.trajectories.store import read_trajectories

    if spec.deploy.mode == "none":
        raise SpecError([Problem("deploy.mode", "'none' deploys nothing; expected export or serve")])
    evaluations = {name: inputs[f"evaluation_{name}"] for name in EVALUATIONS if f"evaluation_{name}" in inputs}
    results = {name: json.loads((a.path / "summary.json").read_text()) for name, a in evaluations.items()}
    episodes = {name: list(read_trajectories(a.path / "trajectories.parquet")) for name, a in evaluations.items()}
    names = list(evaluations)
    card = model_card(
        name=spec.name,
        model=spec.model,
        experiment=spec.experiment,
        step=spec.step,
        stage_key=context.key,
        inputs={name: artifact.digest for name, artifact in inputs.items()},
        results=results,
        differences={
            f"{before} to {names[-1]}": paired_difference(episodes[before], episodes[names[-1]])
            for before in names[:-1]
        },
    )
    context.progress(0, 1)
    policy = inputs["policy"]
    size = export(prepare(spec.model, context.cache), folder_of(policy.path), draft.path, card)
    metrics = {"bytes": float(size)}
    if spec.deploy.mode == "serve":
        metrics |= _check(spec, inputs, draft, context, episodes[names[-1]])
    context.progress(1, 1)
    return metrics


def _check(
    spec: DeployStage, inputs: Inputs, draft: Draft, context: Context, episodes: list[Trajectory]
) -> dict[str, float]:
    from components.deployment.check import check_serving, opening_requests
    from components.inference.server import serve_model
    from flows.stages.episodes import warm_engine

    model = spec.model
    engine = warm_engine(model, inputs["policy"], context)
    requests = opening_requests(episodes, spec.deploy.prompts, policy=engine.policy, max_tokens=spec.agent.max_tokens)
    serve = functools.partial(
        serve_model, name=spec.name, max_length=model.max_length, dtype=model.dtype, device=model.device
    )
    checked = check_serving(draft.path, engine, requests, serve=serve)
    return {f"served/{name}": value for name, value in checked.items()}


STAGE = Stage("deploy", 1, DeployStage, "export", 1, deploy)
