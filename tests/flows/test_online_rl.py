"""The order of the stages, and what each of them depends on. No Prefect here: the order is a plain function."""

import json

import pytest

from components.artifacts import Artifact, stage_key
from components.specs import validate
from flows.online_rl import online_rl
from flows.spec import ExperimentSpec
from flows.stages import STAGES

DATA = {
    "name": "test",
    "rounds": 2,
    "model": {"name": "tiny", "source": "random"},
    "environment": {"_target_": "components.environments.shop.Shop", "train": 16, "heldout": 4},
    "reward": {"_target_": "components.rewards.outcome.Outcome"},
    "filter": {"_target_": "components.filters.signal.Signal"},
    "algorithm": {"name": "grpo"},
    "warmup": {"demonstrations": 4, "filter": {"_target_": "components.filters.successful.Successful"}},
    "collect": {"scenarios": 4, "group_size": 2},
}
WARMUP = ["collect[sft]", "judge[sft]", "filter[sft]", "train[sft]", "evaluate[sft]"]


class Recorder:
    """Takes requests as the stages would, and gives artifacts whose digest is their key: what depends on a change has
    another key."""

    def __init__(self, tmp_path, **changes):
        self.root = tmp_path
        self.spec = validate(ExperimentSpec, {**DATA, "root": str(tmp_path), **changes})
        self.requests = {}
        self.steps = {}
        self.keys = {}
        self.rounds = []
        self.outcome = online_rl(self.spec, self, lambda number, artifacts: self.rounds.append((number, artifacts)))

    def __call__(self, label, step, request):
        json.dumps(request.to_json())
        stage = STAGES[request.stage]
        spec = validate(stage.spec, request.spec, allow=request.allow)
        key = stage_key(stage.name, stage.version, spec.key_part(), request.inputs, request.seed)
        self.requests[label], self.steps[label], self.keys[label] = request, step, key
        return Artifact(key, stage.kind, stage.name, 1, key, self.root, {}, request.inputs, (), 0.0)


def changed(one, other):
    """Labels whose artifact differs."""
    assert list(one.keys) == list(other.keys)
    return [label for label in one.keys if one.keys[label] != other.keys[label]]


def rounds(*numbers):
    return [f"{stage}[{number}]" for number in numbers for stage in ("collect", "judge", "filter", "train")]


def test_the_whole_line(tmp_path):
    run = Recorder(tmp_path)
    assert list(run.keys) == ["evaluate[start]", *WARMUP, *rounds(1, 2), "evaluate[final]", "deploy"]
    assert run.steps["evaluate[start]"] == -1
    assert {run.steps[label] for label in WARMUP} == {0}
    assert (run.steps["train[2]"], run.steps["evaluate[final]"]) == (2, 2)
    assert [number for number, _ in run.rounds] == [1, 2]
    assert list(run.outcome.evaluations) == ["start", "sft", "final"]
    assert run.outcome.checkpoint.key == run.keys["train[2]"]
    assert run.outcome.export.key == run.keys["deploy"]
    assert run.outcome.last.key == run.keys["evaluate[final]"]


@pytest.mark.parametrize(
    ("changes", "labels"),
    [
        ({"warmup": None}, ["evaluate[start]", *rounds(1, 2), "evaluate[final]", "deploy"]),
        ({"rounds": 0}, ["evaluate[start]", *WARMUP, "deploy"]),
        ({"deploy": {"mode": "none"}, "rounds": 1}, ["evaluate[start]", *WARMUP, *rounds(1), "evaluate[final]"]),
        ({"rounds": 0, "warmup": None, "deploy": {"mode": "none"}}, ["evaluate[start]"]),
    ],
)
def test_what_is_not_asked_for_is_left_out(tmp_path, changes, labels):
    run = Recorder(tmp_path, **changes)
    assert list(run.keys) == labels
    assert min(run.steps.values()) == (0 if "warmup" in changes else -1)


def test_each_policy_acts_in_the_next_round_and_training_goes_on_from_it(tmp_path):
    run = Recorder(tmp_path)
    assert "policy" not in run.requests["evaluate[start]"].inputs
    assert run.requests["collect[1]"].inputs == {"policy": run.keys["train[sft]"]}
    assert run.requests["collect[2]"].inputs == {"policy": run.keys["train[1]"]}
    assert run.requests["train[2]"].inputs["start"] == run.keys["train[1]"]
    assert "start" not in run.requests["train[sft]"].inputs
    assert "reference" not in run.requests["train[2]"].inputs
    assert [run.requests[f"collect[{n}]"].spec["round"] for n in (1, 2)] == [0, 1]


def test_the_reference_is_the_checkpoint_from_which_the_rounds_began(tmp_path):
    run = Recorder(tmp_path, algorithm={"name": "grpo", "reference": "start"})
    assert {run.requests[f"train[{n}]"].inputs["reference"] for n in (1, 2)} == {run.keys["train[sft]"]}


AFTER_ROUNDS = ["evaluate[final]", "deploy"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"algorithm": {"name": "grpo", "learning_rate": 1e-5}}, ["train[1]", *rounds(2), *AFTER_ROUNDS]),
        ({"collect": {"scenarios": 4, "group_size": 2, "concurrency": 3}}, []),
        ({"evaluate": {"concurrency": 3, "timeout": 9.0}}, []),
        ({"compute": {"default": "process"}}, []),
        ({"tracking": {"traces": 0}}, []),
        ({"root": "elsewhere"}, []),
        ({"store": "memory://elsewhere"}, []),
        ({"model": {"name": "tiny", "source": "random", "device": "cpu"}}, []),
        ({"collect": {"scenarios": 4, "group_size": 4}}, [*rounds(1, 2), *AFTER_ROUNDS]),
        ({"evaluate": {"scenarios": 2}}, ["evaluate[start]", "evaluate[sft]", *AFTER_ROUNDS]),
        ({"filter": {"_target_": "components.filters.everything.Everything"}},
         ["filter[1]", "train[1]", *rounds(2), *AFTER_ROUNDS]),
        ({"seed": 1}, [*WARMUP, *rounds(1, 2), *AFTER_ROUNDS]),
        ({"model": {"name": "tiny", "source": "random", "lora": {"rank": 4}}},
         ["train[sft]", "evaluate[sft]", *rounds(1, 2), *AFTER_ROUNDS]),
    ],
)  # fmt: skip
def test_a_change_runs_again_only_what_depends_on_it(tmp_path, change, expected):
    assert changed(Recorder(tmp_path), Recorder(tmp_path, **change)) == expected


def test_demonstrations_are_one_episode_a_scenario(tmp_path):
    collect = Recorder(tmp_path).requests["collect[sft]"].spec["collect"]
    assert (collect["scenarios"], collect["group_size"]) == (4, 1)
