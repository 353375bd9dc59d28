"""Elastic weight consolidation in a run: what is held on to, and what plan, fork and lineage make of it."""

from __future__ import annotations

import pytest

from components.errors import SpecError
from components.specs import validate
from flows.experiment.spec import ExperimentSpec
from flows.history.lineage_graph import Lineage
from tests.flows.pretend import planned, pretend
from tests.flows.test_lineage import fed, steps
from tests.flows.test_online_rl import DATA, Recorder

EWC = {"rounds": 3, "ewc": {"coefficient": 10.0, "rounds": 2}}
NAMES = {"trajectories": "collect", "scores": "judge", "selection": "filter"}


def test_the_warmup_is_held_in_every_round(tmp_path):
    run = Recorder(tmp_path, **EWC)
    for number in (1, 2, 3):
        request = run.requests[f"train[{number}]"]
        assert request.inputs["anchor"] == run.keys["train[sft]"]
        held = {name: key for name, key in request.inputs.items() if name.startswith("anchored-")}
        assert held == {f"anchored-{name}-1": run.keys[f"{stage}[sft]"] for name, stage in NAMES.items()}
        assert request.spec["ewc"]["coefficient"] == 10.0
    assert not {"anchor", "anchored-scores-1"} & set(run.requests["train[sft]"].inputs)
    assert Recorder(tmp_path, rounds=3).keys["train[sft]"] == run.keys["train[sft]"]


def test_a_fork_holds_what_the_other_run_had_learned(tmp_path):
    run = pretend(tmp_path, rounds=3)
    for step, held in ((2, ["2", "1"]), (1, ["1", "sft"]), (0, ["sft"])):
        new = pretend(tmp_path, **EWC, fork=f"{run.short}@{step}", seed=step + 1)
        inputs = new.stage("train[3]").request["inputs"]
        assert inputs["anchor"] == run.stage(f"train[{step or 'sft'}]").key
        found = [inputs[f"anchored-scores-{ago}"] for ago in range(1, 1 + sum("anchored-scores" in n for n in inputs))]
        assert found == [run.stage(f"judge[{name}]").key for name in held]


def test_plan_and_lineage(tmp_path):
    run = pretend(tmp_path, **EWC, replay={"rounds": 1})
    assert {one.status for one in planned(tmp_path, **EWC, replay={"rounds": 1}).values()} == {"cached"}
    rounds = [(f"train[{n}]", fed(n)) for n in (3, 2, 1, "sft")]
    assert steps(Lineage(tmp_path).back(run.stage("train[3]").key)) == rounds
    train = planned(tmp_path, **{**EWC, "rounds": 4}, fork=f"{run.short}@1")["train[4]"]
    assert train.inputs["anchored-scores-1"] == f"{run.short} judge[1]"
    assert train.inputs["anchored-scores-2"] == f"{run.short} judge[sft]"
    assert train.inputs["anchor"] == f"{run.short}@1"


def test_with_nothing_to_hold_on_to_it_is_refused(tmp_path):
    with pytest.raises(SpecError, match="ewc: has no earlier training to preserve; expected a warmup, a fork"):
        validate(ExperimentSpec, {**DATA, "root": str(tmp_path), "warmup": None, "ewc": {}})
