"""A teacher of `source: run` is the exported policy of an earlier run."""

from __future__ import annotations

import pytest

from components.artifacts import Store
from components.errors import SpecError
from flows.experiment.compose import compose
from flows.experiment.teachers import resolve
from tests.flows.pretend import pretend

PATHS = {
    "algorithm.teacher": ["algorithm=distill", "filter=everything"],
    "warmup.teacher.model": ["warmup=teacher"],
    "collect.teacher.model": ["collect=taught", "algorithm=sft", "filter=successful"],
}
"""Overrides that give an experiment a teacher at a path."""
TEACHERS = {
    "algorithm.teacher": lambda spec: spec.algorithm.teacher_model,
    "warmup.teacher.model": lambda spec: spec.warmup.teacher.model,
    "collect.teacher.model": lambda spec: spec.collect.teacher.model,
}


def export(folder):
    (folder / "merged").mkdir()
    (folder / "merged" / "config.json").write_text("{}")


def student(path, root, name="test", *more):
    lines = [*PATHS[path], f"{path}.name={name}", f"{path}.source=run", f"root={root}", *more]
    return compose(["+task=tic_tac_toe", "name=student", *lines])


def test_it_is_the_export_of_the_latest_finished_run(tmp_path):
    pretend(tmp_path, files={"deploy": export}, seed=3)
    latest = pretend(tmp_path, files={"deploy": export}, seed=4)
    pretend(tmp_path, stop_at="deploy", seed=5)
    store = Store(tmp_path / "artifacts")
    for path, teacher_of in TEACHERS.items():
        spec = student(path, tmp_path)
        teacher = teacher_of(resolve(spec, store))
        assert teacher.source == "hub"
        assert teacher.name == str(store.find(latest.stage("deploy").key).path / "merged")
        assert teacher_of(spec).source == "run"
        assert teacher_of(resolve(student(path, tmp_path, latest.id), store)) == teacher


def test_a_run_that_does_not_exist_is_named_with_the_command_that_makes_it(tmp_path):
    for path in PATHS:
        spec = student(path, tmp_path, "self_evolve")
        with pytest.raises(SpecError, match=r"python -m flows.run \+experiment=self_evolve") as caught:
            resolve(spec, Store(tmp_path / "artifacts"))
        assert caught.value.problems[0].path == f"{path}.name"


def test_a_run_without_an_export_is_refused(tmp_path):
    pretend(tmp_path)
    with pytest.raises(SpecError, match="deploy=export"):
        resolve(student("algorithm.teacher", tmp_path), Store(tmp_path / "artifacts"))


def test_other_teachers_stay(tmp_path):
    spec = compose(["+experiment=on_policy_distill", "size=tiny", f"root={tmp_path}"])
    assert resolve(spec, Store(tmp_path / "artifacts")) == spec


def test_an_adapter_on_the_policy_of_a_run_is_refused(tmp_path):
    with pytest.raises(SpecError, match="expected null") as caught:
        student("algorithm.teacher", tmp_path, "test", "algorithm.teacher.adapter=somewhere")
    assert "algorithm.teacher.adapter" in {problem.path for problem in caught.value.problems}
