"""The order of the stages, and what each of them depends on. No Prefect here: the order is a plain function."""

import json
import re

import pytest

from components.artifacts import Artifact, stage_key
from components.specs import validate
from flows.experiment.spec import ExperimentSpec
from flows.recipes.run import Run
from flows.stages import STAGES
from flows.stages.base import input_pattern

DATA = {
    "name": "test",
    "rounds": 2,
    "model": {"name": "tiny", "source": "random"},
    "environment": {"_target_": "components.environments.worlds.shop.Shop", "train": 16, "heldout": 4},
    "reward": {"_target_": "components.rewards.rules.outcome.Outcome"},
    "filter": {"_target_": "components.filters.signal.Signal"},
    "algorithm": {"name": "grpo"},
    "warmup": {"demonstrations": 4, "filter": {"_target_": "components.filters.successful.Successful"}},
    "collect": {"scenarios": 4, "group_size": 2},
}
WARMUP = ["collect[sft]", "judge[sft]", "filter[sft]", "train[sft]", "evaluate[sft]"]


class Recorder:
    """Takes requests as the stages would, and gives artifacts whose digest is their key: what depends on a change has
    another key."""

    def __init__(self, tmp_path, metrics=None, prune=lambda measured: None, spec=None, **changes):
        self.root = tmp_path
        self.metrics = metrics or {}
        """By label, of its artifact."""
        self.notices = []
        self.spec = spec or validate(ExperimentSpec, {**DATA, "root": str(tmp_path), **changes})
        self.requests = {}
        self.steps = {}
        self.keys = {}
        self.rounds = []
        self.made = {}
        run = Run(
            self.spec,
            self,
            on_round=lambda number, artifacts: self.rounds.append((number, artifacts)),
            on_notice=self.notices.append,
            prune=prune,
        )
        self.outcome = run.execute()

    def __call__(self, label, step, request):
        json.dumps(request.to_json())
        stage = STAGES[request.stage]
        spec = validate(stage.spec, request.spec, allow=request.allow)
        key = stage_key(stage.name, stage.version, spec.key_part(), request.inputs, request.seed)
        self.requests[label], self.steps[label], self.keys[label] = request, step, key
        metrics = self.made.setdefault(key, self.metrics.get(label, {}))
        return Artifact(key, stage.kind, stage.name, 1, key, self.root, metrics, request.inputs, (), 0.0)


def changed(one, other):
    """Labels whose artifact differs."""
    assert list(one.keys) == list(other.keys)
    return [label for label in one.keys if one.keys[label] != other.keys[label]]


def rounds(*numbers):
    return [f"{stage}[{number}]" for number in numbers for stage in ("collect", "judge", "filter", "train")]


def test_the_whole_line_and_what_each_stage_depends_on(tmp_path):
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
    assert "policy" not in run.requests["evaluate[start]"].inputs
    assert run.requests["collect[1]"].inputs == {"policy": run.keys["train[sft]"]}
    assert run.requests["collect[2]"].inputs == {"policy": run.keys["train[1]"]}
    assert run.requests["train[2]"].inputs["start"] == run.keys["train[1]"]
    assert "start" not in run.requests["train[sft]"].inputs
    assert [run.requests[f"collect[{n}]"].spec["round"] for n in (1, 2)] == [0, 1]
    assert {run.requests[f"train[{n}]"].inputs["reference"] for n in (1, 2)} == {run.keys["train[sft]"]}
    run = Recorder(tmp_path, algorithm={"name": "grpo", "reference": "base"})
    assert not any("reference" in run.requests[f"train[{n}]"].inputs for n in (1, 2))
    collect = run.requests["collect[sft]"].spec["collect"]
    assert (collect["scenarios"], collect["group_size"]) == (4, 1)


LEFT_OUT = [
    ({"warmup": None}, ["evaluate[start]", *rounds(1, 2), "evaluate[final]", "deploy"]),
    ({"rounds": 0}, ["evaluate[start]", *WARMUP, "deploy"]),
    ({"deploy": {"mode": "none"}, "rounds": 1}, ["evaluate[start]", *WARMUP, *rounds(1), "evaluate[final]"]),
    ({"rounds": 0, "warmup": None, "deploy": {"mode": "none"}}, ["evaluate[start]"]),
]


def test_what_is_not_asked_for_is_left_out(tmp_path):
    for changes, labels in LEFT_OUT:
        run = Recorder(tmp_path, **changes)
        assert list(run.keys) == labels
        assert min(run.steps.values()) == (0 if "warmup" in changes else -1)


AFTER_ROUNDS = ["evaluate[final]", "deploy"]


CHANGES = [
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
]  # fmt: skip


def test_a_change_runs_again_only_what_depends_on_it(tmp_path):
    plain = Recorder(tmp_path)
    for change, expected in CHANGES:
        assert changed(plain, Recorder(tmp_path, **change)) == expected, change


# --- evaluations in the rounds --------------------------------------------------------------------------------------


def success(**values):
    """Metrics of evaluations; `_3` is the one after round 3."""
    return {f"evaluate[{name.lstrip('_')}]": {"success": value} for name, value in values.items()}


def evaluations(run):
    return [label for label in run.keys if label.startswith("evaluate")]


LOOKS = [(4, 0, []), (4, 2, [2]), (5, 2, [2, 4]), (4, 1, [1, 2, 3]), (4, 3, [3]), (4, 4, []), (4, 9, [])]


def test_the_policy_is_evaluated_after_every_so_many_rounds_and_once_at_the_end(tmp_path):
    for rounds_, every, expected in LOOKS:
        run = Recorder(tmp_path, rounds=rounds_, evaluate={"every": every})
        labels = [f"evaluate[{number}]" for number in expected]
        assert evaluations(run) == ["evaluate[start]", "evaluate[sft]", *labels, "evaluate[final]"]
        for number in expected:
            assert run.requests[f"evaluate[{number}]"].inputs == {"policy": run.keys[f"train[{number}]"]}
            assert run.steps[f"evaluate[{number}]"] == number
        assert [one.step for one in run.outcome.measured] == [0, *expected, rounds_]


def test_it_is_the_same_stage_as_at_the_end(tmp_path):
    short, long = Recorder(tmp_path, rounds=2), Recorder(tmp_path, rounds=4, evaluate={"every": 2})
    assert long.keys["evaluate[2]"] == short.keys["evaluate[final]"]


def test_when_to_look_and_when_to_stop_are_in_no_key(tmp_path):
    plain = Recorder(tmp_path, rounds=3)
    early = {"evaluate": {"every": 1}, "early_stopping": {"patience": 5, "metric": "reward"}}
    for change in (early, {"guards": {"no_signal": "stop", "reward_hacking": "off"}}):
        assert plain.keys.items() <= Recorder(tmp_path, rounds=3, **change).keys.items()


FALLING = success(sft=0.3, _1=0.5, _2=0.4, _3=0.45, _4=0.9, final=0.9)
STOPPING = {"rounds": 5, "evaluate": {"every": 1}, "early_stopping": {"patience": 2}}


def test_the_rounds_end_early_and_the_rest_follows_as_usual(tmp_path):
    run = Recorder(tmp_path, FALLING, **STOPPING)
    assert list(run.keys)[-3:] == ["evaluate[3]", "evaluate[final]", "deploy"]
    assert [number for number, _ in run.rounds] == [1, 2, 3]
    assert run.outcome.checkpoint.key == run.keys["train[3]"]
    assert run.keys["evaluate[final]"] == run.keys["evaluate[3]"]
    assert (run.outcome.step, run.outcome.last_step, run.steps["evaluate[final]"]) == (3, 3, 3)
    assert [one.step for one in run.outcome.measured] == [0, 1, 2, 3]
    assert [(one.kind, one.step, one.message) for one in run.notices] == [("early_stopping", 3, run.outcome.stopped)]
    assert "not risen above 0.500 (step 1) in the last 2 evaluations (0.400, 0.450)" in run.outcome.stopped


@pytest.mark.parametrize(("step", "played"), [(2, [1, 2]), (0, [])])
def test_a_sweep_may_end_a_run_after_any_evaluation_and_nothing_is_deployed(tmp_path, step, played):
    told = []

    def prune(measured):
        told.append((measured.step, measured.value("success")))
        return "pruned: hopeless" if measured.step == step else None

    course = {"rounds": 3, "evaluate": {"every": 1}, "deploy": {"policy": "best"}}
    run = Recorder(tmp_path, FALLING, prune, **course)
    assert told == [(n, FALLING[f"evaluate[{n or 'sft'}]"]["success"]) for n in range(step + 1)]
    assert [number for number, _ in run.rounds] == played
    assert (run.outcome.pruned, run.outcome.decisions) == ("pruned: hopeless", ["pruned: hopeless"])
    assert [(one.kind, one.step) for one in run.notices] == [("pruned", step)]
    assert list(run.keys)[-1] == "evaluate[final]"
    assert run.outcome.last.key == run.outcome.measured[-1].evaluation.key
    assert run.outcome.export is None


RULES = [
    ({"patience": 3}, 5),
    ({"patience": 1}, 2),
    ({"patience": 1, "min_gain": 0.25}, 1),  # the start of the rounds counts: 0.3 to 0.5 is no gain
    ({"patience": 1, "metric": "reward"}, 5),  # not measured: go on
]


def test_patience_and_least_gain_are_counted_in_evaluations(tmp_path):
    for rule, last in RULES:
        run = Recorder(tmp_path, FALLING, **{**STOPPING, "early_stopping": rule})
        assert run.outcome.last_step == last, rule
        assert (run.outcome.stopped is None) == (last == 5)


def test_the_best_policy_is_evaluated_as_the_final_one_and_deployed(tmp_path):
    run = Recorder(tmp_path, FALLING, **{**STOPPING, "deploy": {"policy": "best"}})
    assert list(run.keys)[-3:] == ["evaluate[3]", "evaluate[final]", "deploy"]
    assert run.outcome.checkpoint.key == run.keys["train[1]"]
    assert run.outcome.last.key == run.keys["evaluate[final]"] == run.keys["evaluate[1]"]
    assert (run.steps["evaluate[final]"], run.steps["deploy"]) == (1, 3)
    deploy = run.requests["deploy"]
    assert (deploy.inputs["policy"], deploy.spec["step"]) == (run.keys["train[1]"], 1)
    assert deploy.inputs["evaluation_final"] == run.keys["evaluate[1]"]
    assert run.notices[-1].kind == "best"
    assert run.notices[-1].message == run.outcome.decisions[-1]
    assert run.outcome.chosen == (
        "the final policy is the one after round 1, the best by held-out success "
        "(step 0: 0.300, step 1: 0.500, step 2: 0.400, step 3: 0.450)"
    )


BEST = [
    (success(sft=0.3, _2=0.5), 2),
    (success(sft=0.5, _2=0.5), 0),  # a tie goes to the earlier one
    (success(sft=0.6, _2=0.5), 0),
    (success(start=0.9, sft=0.3, _2=0.5), 2),  # the untrained model is no checkpoint
]


def test_without_evaluations_in_the_rounds_the_best_is_the_start_of_the_rounds_or_the_last(tmp_path):
    for metrics, step in BEST:
        run = Recorder(tmp_path, metrics, deploy={"policy": "best"})
        assert evaluations(run) == ["evaluate[start]", "evaluate[sft]", "evaluate[2]", "evaluate[final]"]
        assert run.outcome.checkpoint.key == run.keys["train[2]" if step else "train[sft]"]
        assert run.steps["evaluate[final]"] == run.outcome.step == step


def test_the_best_is_chosen_by_the_metric_of_early_stopping(tmp_path):
    both = {
        label: {"success": value, "reward": 1 - value}
        for label, value in (("evaluate[sft]", 0.5), ("evaluate[1]", 0.9), ("evaluate[2]", 0.2))
    }
    run = Recorder(tmp_path, both, evaluate={"every": 1}, deploy={"policy": "best"})
    assert run.outcome.step == 1
    stopping = {"patience": 5, "metric": "reward"}
    run = Recorder(tmp_path, both, evaluate={"every": 1}, deploy={"policy": "best"}, early_stopping=stopping)
    assert run.outcome.step == 2


def test_without_a_warmup_the_base_model_is_the_measure_but_never_the_final_policy(tmp_path):
    metrics = success(start=0.9, _1=0.3, _2=0.2)
    run = Recorder(tmp_path, metrics, warmup=None, deploy={"policy": "best"}, **{**STOPPING, "rounds": 4})
    assert (run.outcome.last_step, run.outcome.step) == (2, 1)


FURTHER = {"collect": {"scenarios": 4, "group_size": 2, "refills": 2}}


def test_groups_without_signal_are_replaced(tmp_path):
    left = {"filter[1]": {"scenarios": 1.0, "kept": 2.0}, "filter[1+1]": {"scenarios": 3.0, "kept": 6.0}}
    run = Recorder(tmp_path, left | {"filter[2]": {"scenarios": 4.0, "kept": 8.0}}, **FURTHER)
    further = ["collect[1+1]", "judge[1+1]", "filter[1+1]"]
    assert list(run.keys)[6:] == [*rounds(1)[:3], *further, "train[1]", *rounds(2), "evaluate[final]", "deploy"]
    request = run.requests["collect[1+1]"]
    assert (request.spec["collect"]["scenarios"], tuple(request.spec["further"])) == (3, (4, 0))
    inputs = run.requests["train[1]"].inputs
    assert [inputs[name] for name in ("trajectories+1", "scores+1", "selection+1")] == [
        run.keys[one] for one in further
    ]
    assert "trajectories+1" not in run.requests["train[2]"].inputs


def test_refills_end_at_their_limit_and_draw_on(tmp_path):
    left = {f"filter[{label}]": {"scenarios": 1.0, "kept": 2.0} for label in ("1", "1+1", "1+2", "2", "2+1", "2+2")}
    run = Recorder(tmp_path, left, **FURTHER)
    assert "collect[1+3]" not in run.keys
    assert tuple(run.requests["collect[1+2]"].spec["further"]) == (4, 3)  # three were played since
    assert run.requests["collect[1+2]"].spec["collect"]["scenarios"] == 2


def test_refills_that_are_not_needed_change_no_key(tmp_path):
    full = {f"filter[{number}]": {"scenarios": 4.0, "kept": 8.0} for number in (1, 2)}
    one, other = Recorder(tmp_path, full), Recorder(tmp_path, full, **FURTHER)
    assert changed(one, other) == ["deploy"]  # the card shows the experiment


def test_no_signal_is_told_where_refills_find_none_either(tmp_path):
    none = {"scenarios": 0.0, "kept": 0.0, "dropped": 8.0, "kept_share": 0.0}
    some = {"scenarios": 2.0, "kept": 4.0, "dropped": 4.0, "kept_share": 0.5}
    found = {f"filter[{label}]": none for label in ("1", "1+1", "1+2", "2", "2+2")} | {"filter[2+1]": some}
    run = Recorder(tmp_path, found, **FURTHER)
    assert [notice.step for notice in run.notices] == [1]


def test_what_further_collections_left_is_replayed_too(tmp_path):
    left = {"filter[1]": {"scenarios": 3.0, "kept": 6.0}, "filter[1+1]": {"scenarios": 1.0, "kept": 2.0}}
    run = Recorder(tmp_path, left, **FURTHER, replay={"share": 0.5, "rounds": 1})
    inputs = run.requests["train[2]"].inputs
    assert inputs["trajectories-1"] == run.keys["collect[1]"]
    assert inputs["trajectories+1-1"] == run.keys["collect[1+1]"]


def test_every_input_is_one_that_its_stage_declares(tmp_path):
    reward_model = {"algorithm": {"name": "reward_model"}, "scenarios": 8, "group_size": 2, "models": 2, "every": 1}
    reward_model["adversarial"] = True
    few = {f"filter[{number}]": {"scenarios": 1.0, "kept": 2.0} for number in ("1", "2", "3")}
    course = {"rounds": 3, **FURTHER, "replay": {"rounds": 1}, "ewc": {"coefficient": 10.0}}
    run = Recorder(tmp_path, few, reward_model=reward_model, **course)
    kinds = {key: STAGES[run.requests[label].stage].kind for label, key in run.keys.items()}
    names = set()
    for request in run.requests.values():
        declared = STAGES[request.stage].inputs
        for name, key in request.inputs.items():
            accepted = [text for pattern, text in declared.items() if re.fullmatch(input_pattern(pattern), name)]
            assert kinds[key] in " or ".join(accepted).split(" or "), (request.stage, name)
            names.add(name)
    assert {
        "trajectories+1",
        "scores-1",
        "predicted-1",
        "selection+1-1",
        "anchored-scores-1",
        "reward_model_2",
    } <= names
    names = ("scores", "scores+1", "scores+1-2", "anchored-scores-3", "anchor", "other")
    assert [STAGES["train"].rounds_ago(name) for name in names] == [0, 0, 2, 3, None, None]


def test_a_limited_cost_of_the_final_policy_is_reported(tmp_path):
    changes = {
        "algorithm": {"name": "grpo", "costs": {"invalid_actions": {"limit": 0.1}}},
        "filter": {"_target_": "components.filters.everything.Everything"},
    }
    for metric, mean, within in (("invalid_actions", 0.07, 1.0), ("components/invalid_actions", 0.11, 0.0)):
        run = Recorder(tmp_path, {"evaluate[final]": {metric: mean}}, **changes)
        expected = {"held-out invalid_actions": mean, "held-out invalid_actions within its limit": within}
        assert run.outcome.reported == expected
    assert Recorder(tmp_path, **changes).outcome.reported == {}, "unknown, as in a plan"
