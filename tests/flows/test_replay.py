"""Replay in a run: which rounds a training is given, and what plan, fork and lineage make of it."""

from __future__ import annotations

import shutil

import pytest

from components.artifacts import Store
from components.errors import SpecError
from flows.experiment.fork import resolve
from flows.history.lineage_graph import Lineage
from tests.flows.pretend import planned, pretend, spec_of
from tests.flows.test_lineage import fed, steps
from tests.flows.test_online_rl import Recorder

REPLAY = {"rounds": 4, "replay": {"share": 0.5, "rounds": 2}}


def of_round(run, number: int, ago: int) -> dict[str, str]:
    names = {"trajectories": "collect", "scores": "judge", "selection": "filter"}
    return {f"{name}-{ago}": run.keys[f"{stage}[{number}]"] for name, stage in names.items()}


def test_a_training_is_given_the_last_rounds(tmp_path):
    run = Recorder(tmp_path, **REPLAY)
    own = {"trajectories", "scores", "selection", "start", "reference"}
    warmup = set(run.requests["train[sft]"].inputs)
    assert set(run.requests["train[1]"].inputs) == warmup | {"start", "reference"} == own
    assert run.requests["train[2]"].inputs.items() >= of_round(run, 1, 1).items()
    assert run.requests["train[4]"].inputs.items() >= (of_round(run, 3, 1) | of_round(run, 2, 2)).items()
    assert len(run.requests["train[4]"].inputs) == 11


def test_the_first_round_has_nothing_to_replay_and_is_shared_with_runs_that_do_not(tmp_path):
    plain, replaying = Recorder(tmp_path, rounds=4), Recorder(tmp_path, **REPLAY)
    assert plain.keys["train[1]"] == replaying.keys["train[1]"]
    assert plain.keys["train[2]"] != replaying.keys["train[2]"]
    other = Recorder(tmp_path, rounds=4, replay={"share": 0.5, "rounds": 2, "max_staleness": 1})
    assert other.keys["train[1]"] == replaying.keys["train[1]"]
    assert other.keys["train[2]"] != replaying.keys["train[2]"]


def test_a_fork_replays_what_the_other_run_played(tmp_path):
    run = pretend(tmp_path, **REPLAY)
    same = pretend(tmp_path, **REPLAY, fork=f"{run.short}@2")
    assert same.stage("train[3]").key == run.stage("train[3]").key
    new = pretend(tmp_path, **REPLAY, fork=f"{run.short}@2", algorithm={"name": "grpo", "learning_rate": 5e-4})
    assert new.stage("train[3]").request["inputs"]["trajectories-2"] == run.stage("collect[1]").key
    assert new.stage("train[4]").request["inputs"]["trajectories-2"] == run.stage("collect[2]").key
    again = pretend(tmp_path, **{**REPLAY, "rounds": 5}, fork=f"{new.short}@3")  # a fork of a fork
    assert again.stage("train[4]").request["inputs"]["selection-2"] == run.stage("filter[2]").key
    assert again.stage("train[4]").request["inputs"]["selection-1"] == new.stage("filter[3]").key


def test_a_fork_says_what_is_gone(tmp_path):
    run = pretend(tmp_path, **REPLAY)
    store = Store(tmp_path / "artifacts")
    shutil.rmtree(store.path(run.stage("judge[2]").key))
    with pytest.raises(SpecError, match=r"scores of round 2 of run .* are no longer"):
        resolve(spec_of(tmp_path, **REPLAY, fork=f"{run.short}@2"), store)
    assert resolve(spec_of(tmp_path, rounds=4, fork=f"{run.short}@2"), store) is not None


def test_a_plan_knows_what_is_replayed(tmp_path):
    run = pretend(tmp_path, **REPLAY)
    assert {one.status for one in planned(tmp_path, **REPLAY).values()} == {"cached"}
    forked = planned(tmp_path, **REPLAY, fork=f"{run.short}@2")
    assert forked["train[3]"].status == forked["train[4]"].status == "cached"
    assert forked["train[3]"].inputs["scores-1"] == f"{run.short} judge[2]"
    assert forked["train[4]"].inputs["scores-1"] == "judge[3]"
    assert planned(tmp_path, rounds=4, replay={"share": 0.2})["train[2]"].why == ["replay.share: 0.5 → 0.2"]


def test_what_is_replayed_belongs_to_the_round_that_played_it(tmp_path):
    run = pretend(tmp_path, **REPLAY)
    lineage = Lineage(tmp_path)
    rounds = [(f"train[{n}]", fed(n)) for n in (4, 3, 2, 1, "sft")]
    assert steps(lineage.back(run.stage("train[4]").key)) == rounds
    assert steps(lineage.forward(run.stage("judge[1]").key))[:3] == [
        ("judge[1]", []),
        ("train[1]", ["filter[1]"]),
        ("train[2]", fed(2)),
    ]
