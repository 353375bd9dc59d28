"""Teachers that are policies of earlier runs: `teacher.source=run`."""

from __future__ import annotations

from components.artifacts import Store
from components.errors import Problem, SpecError
from components.models.spec import TeacherSpec
from flows.experiment.spec import ExperimentSpec
from flows.history.records import Records, RunRecord

EXPORT = "deploy"
"""Label of the stage that exports the policy of a run."""
FORMAT = "merged"


def resolve(spec: ExperimentSpec, store: Store) -> ExperimentSpec:
    """Return the experiment with the folder of the exported policy in place of each teacher of `source: run`.

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
    return spec


def _exported(teacher: TeacherSpec, spec: ExperimentSpec, store: Store, path: str) -> TeacherSpec:
    """Return the teacher as the folder of the exported policy of its run."""
    runs = [run for run in Records(spec.root).all() if run.status == "FINISHED" and _named(run, teacher.name)]
    if not runs:
        raise SpecError(
            [
                Problem(
                    f"{path}.name",
                    f"{teacher.name!r} is no finished run below {spec.root}, and {path}.source=run needs one; run it "
                    f"first: python -m flows.run +experiment={teacher.name}, or set {path}.source=hub for a folder",
                )
            ]
        )
    keys = [stage.key for stage in runs[0].stages if stage.label == EXPORT]
    artifact = store.find(keys[-1]) if keys else None
    folder = artifact.path / FORMAT if artifact is not None else None
    if folder is None or not folder.is_dir():
        raise SpecError(
            [
                Problem(
                    f"{path}.name",
                    f"run {runs[0].short} ({runs[0].name}) has no exported model below {spec.root}; run it again with "
                    f"deploy=export and deploy.formats=[{FORMAT}]",
                )
            ]
        )
    return teacher.model_copy(update={"name": str(folder), "source": "hub"})


def _named(run: RunRecord, name: str) -> bool:
    return name in (run.name, run.id) or (len(name) >= 8 and run.id.startswith(name))
