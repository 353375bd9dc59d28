"""A fork begins with the policy that another run had after one of its rounds."""

from __future__ import annotations

import shutil

import pytest

from components.artifacts import Store
from components.errors import ResourceError, SpecError
from flows.experiment.fork import resolve
from flows.history.records import Records
from tests.flows.pretend import pretend, spec_of


def test_it_goes_on_from_any_step_that_was_trained(tmp_path):
    run = pretend(tmp_path, rounds=2)
    new = pretend(tmp_path, rounds=3, fork=f"{run.short}@1", algorithm={"name": "grpo", "learning_rate": 5e-4})
    labels = [one.label for one in new.stages]
    assert labels[:3] == ["evaluate[start]", "collect[2]", "judge[2]"]
    assert "train[3]" in labels
    start = run.stage("train[1]").key
    assert new.stage("evaluate[start]").request["inputs"] == {"policy": start}
    assert new.stage("evaluate[start]").step == 1
    assert new.stage("collect[2]").key == run.stage("collect[2]").key  # the policy, the round and the seed are the same
    assert new.stage("train[2]").request["inputs"]["start"] == start
    assert new.stage("train[2]").key != run.stage("train[2]").key
    assert new.forked == {"0": run.stage("train[sft]").key, "1": start}
    again = pretend(tmp_path, rounds=3, fork=f"{new.short}@1", seed=5)
    assert again.forked == new.forked  # a fork of a fork
    for at, label in {"@0": "train[sft]", "@2": "train[2]", "": "train[2]"}.items():
        fork = resolve(spec_of(tmp_path, rounds=4, fork=f"{run.id}{at}"), Store(tmp_path / "artifacts"))
        assert fork is not None
        assert fork.checkpoint.key == run.stage(label).key
        assert fork.reference is not None
        assert fork.reference.key == run.stage("train[sft]").key


def test_with_nothing_changed_it_finds_all_of_the_run(tmp_path):
    run = pretend(tmp_path, rounds=2, algorithm={"name": "grpo", "reference": "start"})
    new = pretend(tmp_path, rounds=2, algorithm={"name": "grpo", "reference": "start"}, fork=f"{run.short}@1")
    assert [one.label for one in new.stages if one.status == "ran"] == ["evaluate[start]", "deploy"]
    assert new.stage("train[2]").key == run.stage("train[2]").key


@pytest.mark.parametrize("reference", ["latest", "test@2"])
def test_the_same_command_begins_where_it_began_before(tmp_path, reference):
    """Though the run of the first try is now the latest of that name, and has trained further."""
    run = pretend(tmp_path, rounds=2)
    stopped = pretend(tmp_path, rounds=4, fork=reference, stop_at="deploy")
    assert Records(tmp_path).get("latest").id == stopped.id
    again = pretend(tmp_path, rounds=4, fork=reference, compute={"lock_timeout": 5.0})
    assert again.forked == stopped.forked
    assert [one.label for one in again.stages if one.status == "ran"] == ["deploy"]
    finished = pretend(tmp_path, rounds=4, fork=reference)
    assert finished.forked == stopped.forked
    assert {one.status for one in finished.stages} == {"cached"}
    further = pretend(tmp_path, rounds=6, fork=reference.replace("@2", "@4"))  # another command: the latest is meant
    assert max(further.forked, key=int) == "4"
    assert further.forked["2"] == run.stage("train[2]").key


def test_a_run_that_failed_can_be_forked(tmp_path):
    run = pretend(tmp_path, stop_at="judge[2]")
    assert Records(tmp_path).get(run.id).status == "FAILED"
    assert pretend(tmp_path, fork=f"{run.short}@1").forked["1"] == run.stage("train[1]").key


def test_what_cannot_be_forked_is_refused(tmp_path):
    run, store = pretend(tmp_path, rounds=2), Store(tmp_path / "artifacts")
    untrained = pretend(tmp_path, seed=1, stop_at="collect[sft]")
    other = {"name": "tiny", "source": "random", "lora": {"rank": 2}}
    for fork, changes, message in (
        (f"{run.short}@7", {}, rf"fork: run {run.short} has no checkpoint of step 7; expected one of 0, 1, 2"),
        (
            f"{run.short}@2",
            {"rounds": 2},
            rf"step 2 of run {run.short} leaves nothing to do with rounds=2.*rounds=3 or",
        ),
        (f"{run.short}@1", {"model": other}, r"trained another model; set its values: model.lora="),
        (f"{run.short}@x", {}, "fork"),
        (f"{run.short}@-1", {}, "fork"),
        (untrained.short, {}, "has no checkpoint yet"),
    ):
        with pytest.raises(SpecError, match=message):
            resolve(spec_of(tmp_path, **{"rounds": 4, **changes}, fork=fork), store)
    with pytest.raises(ResourceError, match="no run 'deadbeef'"):
        resolve(spec_of(tmp_path, fork="deadbeef@1"), store)
    shutil.rmtree(store.path(run.stage("train[1]").key))
    with pytest.raises(SpecError, match=r"checkpoint of step 1 of run .* is no longer in"):
        resolve(spec_of(tmp_path, rounds=2, fork=f"{run.short}@1"), store)


def test_a_fork_is_measured_against_the_policy_with_which_it_begins(tmp_path):
    first = pretend(tmp_path, rounds=2)
    measured = {f"evaluate[{name}]": {"success": value} for name, value in (("start", 0.8), ("2", 0.5), ("3", 0.6))}
    course = {"rounds": 5, "evaluate": {"every": 1}, "early_stopping": {"patience": 2}, "deploy": {"policy": "best"}}
    # The seed is another one, so that nothing but the beginning is found.
    run = pretend(tmp_path, fork=f"{first.short}@1", seed=3, metrics=measured, **course)
    assert [one.step for one in run.stages if one.label.startswith("evaluate")] == [1, 2, 3, 1]
    assert [one.kind for one in run.notices] == ["early_stopping", "best"]
    assert run.stage("deploy").request["inputs"]["policy"] == first.stage("train[1]").key
    assert "the one at the start of the rounds" in run.notices[-1].message
