"""Models of other runs: a teacher or a judge with `source: run` is the exported policy of an earlier run."""

from __future__ import annotations

from components.artifacts import Store
from components.errors import SpecError
from components.models.spec import FrozenModelSpec
from components.rewards.llm.spec import with_models
from flows.experiment.spec import ExperimentSpec
from flows.history.records import LATEST, Records, RunRecord

EXPORT = "deploy"
"""Label of the stage that exports the policy of a run."""
FORMAT = "merged"


def resolve(spec: ExperimentSpec, store: Store) -> ExperimentSpec:
    """Return the experiment with the folder of the exported policy in place of each model of `source: run`.

    Raises SpecError for a run that does not exist, has not finished or has no export in the store."""
    teacher = spec.algorithm.teacher_model
    if teacher is not None and teacher.source == "run":
        exported = _exported(teacher, spec, store, "algorithm.teacher")
        spec = spec.model_copy(update={"algorithm": spec.algorithm.model_copy(update={"teacher": exported})})
    for name, section in (("warmup", spec.warmup), ("collect", spec.collect)):
        playing = section.teacher if section is not None else None
        if section is None or playing is None or playing.model is None or playing.model.source != "run":
            continue
        exported = _exported(playing.model, spec, store, f"{name}.teacher.model")
        changed = section.model_copy(update={"teacher": playing.model_copy(update={"model": exported})})
        spec = spec.model_copy(update={name: changed})

    def judge(model: FrozenModelSpec) -> FrozenModelSpec:
        return _exported(model, spec, store, "reward.model.model") if model.source == "run" else model

    rewards = {name: with_models(getattr(spec, name), judge) for name in ("reward", "flow")}
    sections = {
        name: section.model_copy(update={key: with_models(getattr(section, key), judge)})
        for name, section, key in (("evaluate", spec.evaluate, "reward"), ("calibrate", spec.calibrate, "truth"))
    }
    return spec.model_copy(update={**rewards, **sections})


def _exported(model: FrozenModelSpec, spec: ExperimentSpec, store: Store, path: str) -> FrozenModelSpec:
    """Return the model as the folder of the exported policy of its run. path: of its settings, for messages."""
    runs = [run for run in Records(spec.root).all() if run.status == "FINISHED" and _named(run, model.name)]
    if not runs:
        run = "+experiment=NAME" + ("" if model.name == LATEST else f" name={model.name}")
        raise SpecError.at(
            f"{path}.name",
            f"{model.name!r} is no finished run below {spec.root}, and {path}.source=run needs one; run it "
            f"first: python -m flows.run {run}, or set {path}.source=hub for a folder",
        )
    keys = [stage.key for stage in runs[0].stages if stage.label == EXPORT]
    artifact = store.find(keys[-1]) if keys else None
    folder = artifact.path / FORMAT if artifact is not None else None
    if folder is None or not folder.is_dir():
        raise SpecError.at(
            f"{path}.name",
            f"run {runs[0].short} ({runs[0].name}) has no exported model below {spec.root}; run it again with "
            f"deploy=export and deploy.formats=[{FORMAT}]",
        )
    return model.model_copy(update={"name": str(folder), "source": "hub"})


def _named(run: RunRecord, name: str) -> bool:
    return name in (LATEST, run.name, run.id) or (len(name) >= 8 and run.id.startswith(name))
