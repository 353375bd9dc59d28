"""Checks of model names, of local model folders and adapters, and of what is exported and deployed of a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from components.algorithms.spec import AlgorithmSpec
from components.deployment.spec import DeploySpec
from components.errors import ArtifactError, Problem
from components.models.spec import ModelSpec
from components.rewards.llm.spec import asked_by
from components.rollout.collect_spec import CollectSpec
from components.specs import Target
from flows.experiment.sections import WarmupSpec


def local_model(model: ModelSpec) -> Iterator[Problem]:
    """Check that a model name that reads like a local path is a folder."""
    if model.source != "hub" or Path(model.name).is_dir():
        return
    if model.name.startswith(("/", ".", "~")) or model.name.count("/") > 1:
        yield Problem(
            "model.name",
            f"folder {model.name!r} does not exist; expected a folder, or a name on the Hugging Face hub",
        )


def frozen(
    algorithm: AlgorithmSpec, warmup: WarmupSpec | None, collect: CollectSpec, reward: Target
) -> Iterator[Problem]:
    """Check the models, adapters and engines of all teachers, and the models of the judges of the reward."""
    models = {"algorithm.teacher": algorithm.teacher_model} if algorithm.teacher_model is not None else {}
    playing = {"warmup.teacher": warmup.teacher if warmup else None, "collect.teacher": collect.teacher}
    for path, teacher in playing.items():
        if teacher is None:
            continue
        if path == "warmup.teacher" and teacher.samples > 1 and teacher.temperature == 0:
            yield Problem(
                f"{path}.samples",
                f"{teacher.samples}: with {path}.temperature=0 all samples of a scenario are identical; expected 1, "
                "or a temperature above 0",
            )
        if teacher.inference.needs_model and teacher.model is None:
            yield Problem(
                f"{path}.model", f"null, but inference.name={teacher.inference.name} needs a model; expected its name"
            )
        elif teacher.model is not None and not teacher.inference.needs_model:
            yield Problem(f"{path}.model", "set, but a server generates; expected null, or inference.name=embedded")
        elif teacher.model is not None:
            models[f"{path}.model"] = teacher.model
    judges = [("reward.model.model", judge.frozen_model) for judge in asked_by(reward)]
    for path, model in [*models.items(), *judges]:
        if model is None:
            continue
        try:
            model.adapter_dir()
        except ArtifactError as error:
            yield Problem(f"{path}.adapter", str(error))
        if model.source == "run":
            if model.adapter is not None:
                yield Problem(f"{path}.adapter", "set, but the policy of a run is complete; expected null")
            continue  # which run it is depends on the root: `flows.experiment.run_models`
        for problem in local_model(model.model(max_length=16)):
            yield Problem(f"{path}.{problem.path.removeprefix('model.')}", problem.message)


def formats(deploy: DeploySpec, model: ModelSpec) -> Iterator[Problem]:
    """Check that the exported formats exist for the model and suit the target."""
    if deploy.mode == "none" and deploy.target is not None:
        yield Problem("deploy.target", f"{deploy.target.name}: deploy.mode=none exports nothing; expected export")
    if deploy.target is not None and not deploy.registers(model):
        reason = "null: a model for tests is not registered, and" if deploy.register_model is None else "false:"
        text = f"{reason} only a champion is deployed; expected true or deploy.target=null"
        yield Problem("deploy.register_model", text)
    if "adapter" in deploy.formats and model.lora is None and deploy.mode != "none":
        yield Problem(
            "deploy.formats", "adapter: model.lora=null trains all weights, without an adapter; expected merged"
        )
    if deploy.target is not None and "merged" not in deploy.formats:
        yield Problem(
            "deploy.formats",
            f"{', '.join(deploy.formats)}: deploy.target deploys the merged model; add merged to the formats",
        )
