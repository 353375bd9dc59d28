"""A teacher or judge of `source: run` is the exported policy of an earlier run."""

from __future__ import annotations

import pytest

from components.artifacts import Store
from components.errors import SpecError
from components.rewards.llm.spec import asked_by
from flows.experiment.compose import compose
from flows.experiment.run_models import resolve
from flows.influence.rejudging import compose_rewards
from flows.runs.revise import _composed
from tests.flows.pretend import pretend, spec_of

PATHS = {
    "algorithm.teacher": ["algorithm=distill", "filter=everything"],
    "warmup.teacher.model": ["warmup=teacher"],
    "collect.teacher.model": ["collect=taught", "algorithm=sft", "filter=successful"],
    "reward.model.model": ["reward=ruler", "judge_model@reward.model=embedded"],
}
"""Overrides that give an experiment a model at a path."""
MODELS = {
    "algorithm.teacher": lambda spec: spec.algorithm.teacher_model,
    "warmup.teacher.model": lambda spec: spec.warmup.teacher.model,
    "collect.teacher.model": lambda spec: spec.collect.teacher.model,
    "reward.model.model": lambda spec: asked_by(spec.reward)[0].frozen_model,
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
    for path, model_of in MODELS.items():
        spec = student(path, tmp_path)
        model = model_of(resolve(spec, store))
        assert model.source == "hub"
        assert model.name == str(store.find(latest.stage("deploy").key).path / "merged")
        assert model_of(spec).source == "run"
        for name in (latest.id, "latest"):
            assert model_of(resolve(student(path, tmp_path, name), store)) == model


def test_rewards_that_judge_a_finished_run_again_may_name_it(tmp_path):
    run = pretend(tmp_path, files={"deploy": export})
    judge = [*PATHS["reward.model.model"][1:], "reward.model.model.name=test", "reward.model.model.source=run"]
    (rejudging,) = compose_rewards(["reward=ruler", *judge], spec_of(tmp_path), run.spec, None)
    merged = Store(tmp_path / "artifacts").find(run.stage("deploy").key).path / "merged"
    for reward in (rejudging.target, _composed(judge, spec_of(tmp_path), tmp_path)):
        assert asked_by(reward)[0].frozen_model.name == str(merged)


def test_a_run_that_does_not_exist_is_named_with_the_command_that_makes_it(tmp_path):
    for path in PATHS:
        spec = student(path, tmp_path, "self_evolve")
        with pytest.raises(SpecError, match=r"python -m flows.run \+experiment=NAME name=self_evolve") as caught:
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
    for path in ("algorithm.teacher", "reward.model.model"):
        with pytest.raises(SpecError, match="expected null") as caught:
            student(path, tmp_path, "test", f"{path}.adapter={tmp_path}")
        assert f"{path}.adapter" in {problem.path for problem in caught.value.problems}
