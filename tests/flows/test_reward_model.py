"""A reward model in a run: when it is trained, of what, what it judges, and that all of it works with a tiny model."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest

from components.algorithms.reward_models.card import read_card
from components.errors import ArtifactError, SpecError
from components.specs import validate
from components.trajectories.store import load_scored, read_scores, read_trajectories
from flows.execution.executor import Execution
from flows.experiment.requests import Requests
from flows.experiment.spec import ExperimentSpec
from flows.history.lineage_graph import Lineage
from flows.planning.plan import plan
from flows.recipes.run import Run
from flows.stages.base import Context, Request
from flows.stages.execute import key_part, run_stage
from tests.data import rows
from tests.flows.declarations import check_artifact
from tests.flows.pretend import edit_manifest, planned, pretend, spec_of
from tests.flows.test_import import write
from tests.flows.test_online_rl import DATA, WARMUP, Recorder, changed, rounds
from tests.refusals import wrong_problems

BT = {"scenarios": 4, "group_size": 2, "algorithm": {"name": "reward_model"}}
PROCESS = {"scenarios": 4, "group_size": 2, "task_weight": 1.0, "algorithm": {"name": "process_reward_model"}}
REWARD = ["collect[reward]", "judge[reward]", "train[reward]"]


def test_it_is_trained_after_the_warmup_and_judges_the_rounds(tmp_path):
    run = Recorder(tmp_path, reward_model=BT)
    assert list(run.keys) == ["evaluate[start]", *WARMUP, *REWARD, *rounds(1, 2), "evaluate[final]", "deploy"]
    assert {run.steps[label] for label in REWARD} == {0}
    assert run.requests["collect[reward]"].inputs == {"policy": run.keys["train[sft]"]}
    assert (run.requests["collect[reward]"].spec["collect"]["group_size"]) == 2
    assert run.requests["train[reward]"].inputs == {
        "trajectories": run.keys["collect[reward]"],
        "scores": run.keys["judge[reward]"],
        "start": run.keys["train[sft]"],
    }
    for number in (1, 2):
        inputs = run.requests[f"judge[{number}]"].inputs
        assert inputs == {"trajectories": run.keys[f"collect[{number}]"], "reward_model": run.keys["train[reward]"]}
    assert run.requests["judge[reward]"].spec["learned"] is None
    assert run.requests["evaluate[final]"].inputs == {"policy": run.keys["train[2]"]}  # by the declared reward
    assert {step: [one.key for one in found] for step, found in run.outcome.reward_models.items()} == {
        0: [run.keys["train[reward]"]]
    }


def test_preferences_of_a_file_take_the_place_of_its_episodes_and_it_scores_the_held_out_answers(tmp_path):
    files = {name: write(tmp_path / f"{name}.jsonl", rows.FORMS[name]) for name in ("prompt_completion", "preference")}
    part = {**BT, "data": {"path": str(files["preference"])}}
    metrics = {f"judge[heldout {name}]": {"reward": value} for name, value in (("sft", 0.5), ("final", 0.75))}
    run = Recorder(tmp_path, metrics, reward_model=part, data={"path": str(files["prompt_completion"])})
    heldout = [f"judge[heldout {name}]" for name in ("start", "sft", "final")]
    warmup = ["evaluate[start]", "filter[import]", "train[sft]", "evaluate[sft]"]
    course = [
        "import",
        "import[reward]",
        *warmup,
        "train[reward]",
        *rounds(1, 2),
        "evaluate[final]",
        *heldout,
        "deploy",
    ]
    assert list(run.keys) == course
    preferences = run.keys["import[reward]"]
    assert run.requests["train[reward]"].inputs == {
        "trajectories": preferences,
        "scores": preferences,
        "start": run.keys["train[sft]"],
    }
    assert run.requests["judge[heldout sft]"].inputs == {
        "trajectories": run.keys["evaluate[sft]"],
        "reward_model": run.keys["train[reward]"],
    }
    assert run.outcome.reported == {
        "held-out reward-model score, sft": 0.5,
        "held-out reward-model score, final": 0.75,
    }
    moved = {**BT, "data": {"path": str(files["preference"].rename(tmp_path / "moved.jsonl"))}}
    again = Recorder(tmp_path, metrics, reward_model=moved, data={"path": str(files["prompt_completion"])})
    assert again.keys == run.keys  # also that of the export


SWAPPED = [
    (
        "preference",
        "preference",
        r"data: form preference: the warmup imitates demonstrations, .* data\.form=preference",
    ),
    ("prompt_completion", "messages", r"reward_model\.data: no prompt has answers of different scores"),
]


def test_demonstrations_and_preferences_in_each_others_place_are_refused_before_the_first_stage(tmp_path):
    for name, form in {(row[position], row[position]) for row in SWAPPED for position in (0, 1)}:
        write(tmp_path / f"{name}.jsonl", rows.FORMS[form])

    def spec(demonstrations, preferences, **data):
        part = {**BT, "data": {"path": str(tmp_path / f"{preferences}.jsonl")}}
        data = {"path": str(tmp_path / f"{demonstrations}.jsonl"), **data}
        return spec_of(tmp_path, reward_model=part, data=data)

    for demonstrations, preferences, message in SWAPPED:
        with pytest.raises(SpecError, match=message):
            plan(spec(demonstrations, preferences))
    assert plan(spec("preference", "preference", form="preference")).stages  # imitate the best answers, as asked
    part = {**PROCESS, "data": {"path": str(tmp_path / "preference.jsonl")}}
    with pytest.raises(SpecError, match=r"reward_model\.data: form preference: .* labels of steps"):
        plan(spec_of(tmp_path, reward_model=part))


def test_preferences_without_a_pair_end_the_run_before_the_first_training(tmp_path):
    path = write(tmp_path / "a.jsonl", [{**row, "id": "q"} for row in rows.FORMS["prompt_completion"]])
    with pytest.raises(SpecError, match=r"reward_model\.data: no prompt has answers of different scores"):
        Recorder(
            tmp_path,
            {"import[reward]": {"comparable": 0.0}},
            reward_model={**BT, "data": {"path": str(path)}},
        )


def test_without_rounds_it_is_trained_all_the_same(tmp_path):
    run = Recorder(tmp_path, reward_model=BT, rounds=0, warmup=None, deploy={"mode": "none"})
    assert list(run.keys) == ["evaluate[start]", *REWARD]
    assert "start" not in run.requests["train[reward]"].inputs


def test_an_ensemble_differs_by_seed(tmp_path):
    run = Recorder(tmp_path, reward_model={**BT, "models": 3, "combine": "min"})
    members = ["train[reward]", "train[reward 2]", "train[reward 3]"]
    assert len({run.keys[label] for label in members}) == 3
    inputs = run.requests["judge[2]"].inputs
    assert [inputs[name] for name in ("reward_model", "reward_model_2", "reward_model_3")] == [
        run.keys[label] for label in members
    ]
    assert run.keys["train[reward]"] == Recorder(tmp_path, reward_model=BT).keys["train[reward]"]


AFTER = ["evaluate[final]", "deploy"]


CHANGES = [
    ({"weight": 2.0}, ["judge[1]", "filter[1]", "train[1]", *rounds(2), *AFTER]),
    ({"algorithm": {"name": "reward_model", "epochs": 2}},
     ["train[reward]", "judge[1]", "filter[1]", "train[1]", *rounds(2), *AFTER]),
    ({"scenarios": 8}, [*REWARD, "judge[1]", "filter[1]", "train[1]", *rounds(2), *AFTER]),
]  # fmt: skip


def test_a_change_runs_again_only_what_depends_on_it(tmp_path):
    plain = Recorder(tmp_path, reward_model=BT)
    for change, expected in CHANGES:
        assert changed(plain, Recorder(tmp_path, reward_model={**BT, **change})) == expected


def test_the_declared_reward_counts_in_the_rounds_only_where_it_has_a_weight(tmp_path):
    other = {"_target_": "components.rewards.rules.outcome.Outcome", "turn_cost": 0.1}
    for part, differs in ((BT, False), ({**BT, "task_weight": 1.0}, True)):
        runs = [Requests(spec_of(tmp_path, reward_model=part, reward=r)) for r in (DATA["reward"], other)]
        artifact = pretend(tmp_path, stop_at="judge[sft]").stage("collect[sft]")
        keys = [json.dumps(key_part(one.judge(artifact, None, [artifact]))) for one in runs]
        assert (keys[0] != keys[1]) == differs


def test_a_fork_finds_the_reward_model_of_the_run_that_it_forks(tmp_path):
    run = pretend(tmp_path, rounds=2, reward_model=BT)
    new = pretend(tmp_path, rounds=3, reward_model=BT, fork=f"{run.short}@2")
    assert [new.stage(label).status for label in REWARD] == ["cached"] * 3
    assert [new.stage(label).key for label in REWARD] == [run.stage(label).key for label in REWARD]
    labels = [one.label for one in new.stages]
    assert labels == ["evaluate[start]", *REWARD, *rounds(3), "evaluate[final]", "deploy"]


def test_a_plan_knows_its_stages(tmp_path):
    pretend(tmp_path, reward_model=BT, stop_at="train[reward]")
    stages = planned(tmp_path, reward_model=BT)
    assert [stages[label].status for label in REWARD] == ["cached", "cached", "run"]
    assert stages["judge[1]"].inputs == {"trajectories": "collect[1]", "reward_model": "train[reward]"}


NONSENSE = [
    ({"reward_model": {**BT, "group_size": 1}}, "reward_model.group_size", "a preference pair needs two episodes"),
    ({"reward_model": {**BT, "scenarios": 17}}, "reward_model.scenarios", "expected at most 16"),
    ({"reward_model": {**BT, "combine": "min"}}, "reward_model.combine", "but reward_model.models=1"),
    ({"reward_model": BT, "algorithm": {"name": "sft"}, "collect": {"temperature": 0.0, "scenarios": 4}},
     "collect.temperature", "would be identical"),
    ({"reward_model": {**BT, "every": 2}}, "reward_model.every", "with rounds=2 .* expected at most 1, or 0"),
    ({"reward_model": {**BT, "every": 1}, "rounds": 0}, "reward_model.every", "with rounds=0 .* expected 0"),
    ({"reward_model": {**BT, "every": -1}}, "reward_model.every", "0"),
    ({"reward_model": {**BT, "every": 1, "data": {"path": "a.jsonl"}}}, "reward_model.every",
     "needs episodes of the run"),
    ({"reward_model": {**BT, "data": {"path": "a.jsonl", "heldout": 0.1}}}, "reward_model.data.heldout",
     "expected null, and reward_model.algorithm.held_out=SHARE"),
    ({"reward_model": {**BT, "data": {"path": "a", "dataset": "b"}}}, "reward_model.data.dataset",
     "together with path"),
    ({"reward_model": {**BT, "adversarial": True}}, "reward_model.adversarial", "or reward_model.every=1"),
    ({"reward_model": {**BT, "every": 1, "adversarial": True}, "fork": "latest@1"}, "reward_model.adversarial",
     "expected false, or no fork"),
    ({"reward_model": {**BT, "keep": "none"}}, "reward_model.keep", "every=0, which trains the reward model once"),
    ({"reward_model": {**BT, "every": 1}, "evaluate": {"every": 1}, "guards": {"reward_hacking": "stop"}},
     "guards.reward_hacking", "reward_model.every=1 retrains it after each round"),
    ({"reward_model": {**BT, "algorithm": {"name": "grpo"}}}, "reward_model.algorithm.name", "reward_model"),
    ({"algorithm": {"name": "reward_model"}}, "algorithm.name", "grpo"),
]  # fmt: skip


def test_what_makes_no_sense_is_refused(tmp_path):
    assert wrong_problems(NONSENSE, lambda changes: spec_of(tmp_path, **changes)) == []


# --- trained further between the rounds -----------------------------------------------------------------------------


def refresh(number, models=1):
    names = ["reward", *(f"reward {member}" for member in range(2, models + 1))]
    return [f"collect[reward@{number}]", f"judge[reward@{number}]", *(f"train[{name}@{number}]" for name in names)]


def test_after_a_round_each_model_goes_on_from_its_last_state_and_judges_the_next(tmp_path):
    run = Recorder(tmp_path, reward_model={**BT, "every": 1, "models": 2}, rounds=3)
    first = [*REWARD, "train[reward 2]"]
    course = [*rounds(1), *refresh(1, 2), *rounds(2), *refresh(2, 2), *rounds(3)]
    assert list(run.keys) == ["evaluate[start]", *WARMUP, *first, *course, *AFTER]
    assert {run.steps[label] for label in refresh(2, 2)} == {2}
    shown = [run.requests[f"collect[reward{at}]"] for at in ("", "@1", "@2")]
    assert [one.inputs["policy"] for one in shown] == [run.keys[f"train[{at}]"] for at in ("sft", 1, 2)]
    assert [one.spec["round"] for one in shown] == [0, 1, 2]  # other scenarios, other seeds of episodes
    assert len({(one.seed, json.dumps(one.spec["collect"])) for one in shown}) == 1
    assert run.requests["judge[reward@1]"].spec["learned"] is None
    for member in ("reward", "reward 2"):
        assert run.requests[f"train[{member}@2]"].inputs == {
            "trajectories": run.keys["collect[reward@2]"],
            "scores": run.keys["judge[reward@2]"],
            "trajectories-1": run.keys["collect[reward@1]"],
            "scores-1": run.keys["judge[reward@1]"],
            "trajectories-2": run.keys["collect[reward]"],
            "scores-2": run.keys["judge[reward]"],
            "start": run.keys[f"train[{member}@1]"],
        }
        assert run.requests[f"train[{member}@2]"].seed == run.requests[f"train[{member}]"].seed
    for number, at in ((1, ""), (2, "@1"), (3, "@2")):
        inputs = run.requests[f"judge[{number}]"].inputs
        assert inputs["reward_model"] == run.keys[f"train[reward{at}]"]
        assert inputs["reward_model_2"] == run.keys[f"train[reward 2{at}]"]
    assert list(run.outcome.reward_models) == [0, 1, 2]


def test_it_is_trained_after_every_so_many_rounds_but_not_after_the_last(tmp_path):
    for count, every, expected in ((4, 2, [2]), (5, 2, [2, 4]), (4, 3, [3]), (2, 1, [1])):
        run = Recorder(tmp_path, reward_model={**BT, "every": every}, rounds=count)
        labels = [label for label in run.keys if label.startswith("collect[reward@")]
        assert labels == [f"collect[reward@{number}]" for number in expected]


def test_earlier_collections_are_left_out_where_none_is_kept(tmp_path):
    run = Recorder(tmp_path, reward_model={**BT, "every": 1, "keep": "none"}, rounds=3)
    assert set(run.requests["train[reward@2]"].inputs) == {"trajectories", "scores", "start"}


def test_each_training_between_the_rounds_gets_the_adversarial_examples_of_the_rounds_before_it(tmp_path):
    part = {**BT, "every": 2, "adversarial": True}
    run = Recorder(tmp_path, reward_model=part, rounds=5)
    judged = [label for label in run.keys if label.startswith("judge[adversarial")]
    assert judged == [f"judge[adversarial@{number}]" for number in (1, 2, 3, 4)]  # none after the last training
    assert run.requests[judged[0]].inputs == {"trajectories": run.keys["collect[1]"]}
    assert run.requests[judged[0]].spec["learned"] is None

    def collections(run, number):
        labels = {key: label for label, key in run.keys.items()}
        inputs = {name: labels[key] for name, key in run.requests[f"train[reward@{number}]"].inputs.items()}
        names = ("trajectories", "scores", "predicted")
        by_age = [[inputs.get(name + age) for name in names] for age in ("", *(f"-{ago}" for ago in range(1, 9)))]
        return [[label for label in found if label] for found in by_age if any(found)]

    def attacked(number):
        return [f"collect[{number}]", f"judge[adversarial@{number}]", f"judge[{number}]"]

    def own(at):
        return [f"collect[reward{at}]", f"judge[reward{at}]"]

    assert collections(run, 2) == [own("@2"), attacked(2), attacked(1), own("")]
    assert collections(run, 4) == [own("@4"), attacked(4), attacked(3), *collections(run, 2)]
    forgetful = Recorder(tmp_path, reward_model={**part, "keep": "none"}, rounds=5)
    assert collections(forgetful, 4) == [own("@4"), attacked(4), attacked(3)]


def test_what_comes_before_the_first_refresh_is_the_same_without_it(tmp_path):
    plain, other = (Recorder(tmp_path, reward_model={**BT, "every": every}, rounds=3) for every in (0, 2))
    same = ["evaluate[start]", *WARMUP, *REWARD, *rounds(1, 2), "collect[3]"]
    assert {label for label in plain.keys if plain.keys[label] == other.keys[label]} == set(same)


def test_when_the_rounds_end_early_nothing_is_trained_for_the_next(tmp_path):
    measured = {f"evaluate[{name}]": {"success": value} for name, value in (("sft", 0.5), (1, 0.6), (2, 0.4))}
    stopping = {"evaluate": {"every": 1}, "early_stopping": {"patience": 1}, "deploy": {"policy": "best"}}
    run = Recorder(tmp_path, measured, reward_model={**BT, "every": 1}, rounds=4, **stopping)
    assert list(run.outcome.reward_models) == [0, 1]
    assert list(run.keys)[-3:] == ["evaluate[2]", *AFTER]


def test_a_fork_finds_the_models_that_were_in_force_where_it_begins(tmp_path):
    part = {**BT, "every": 1, "models": 2}
    run = pretend(tmp_path, rounds=3, reward_model=part)
    same = pretend(tmp_path, rounds=3, reward_model=part, fork=f"{run.short}@2")
    first = [*REWARD, "train[reward 2]", *refresh(1, 2), *refresh(2, 2)]
    assert [one.label for one in same.stages] == ["evaluate[start]", *first, *rounds(3), *AFTER]
    assert [one.label for one in same.stages if one.status == "ran"] == ["evaluate[start]", "deploy"]
    assert [same.stage(label).key for label in first] == [run.stage(label).key for label in first]
    further = pretend(tmp_path, rounds=5, reward_model=part, fork=f"{run.short}@3")
    ran = [one.label for one in further.stages if one.status == "ran"]
    assert ran == [*refresh(3, 2), *rounds(4), *refresh(4, 2), *rounds(5), *AFTER]
    assert further.stage("collect[reward@3]").request["inputs"] == {"policy": run.stage("train[3]").key}
    assert further.stage("train[reward 2@3]").request["inputs"]["start"] == run.stage("train[reward 2@2]").key
    again = pretend(tmp_path, rounds=5, reward_model=part, fork=f"{further.short}@4")  # a fork of a fork
    assert [one.label for one in again.stages if one.status == "ran"] == ["evaluate[start]", "deploy"]
    assert plan(spec_of(tmp_path, rounds=5, reward_model=part, fork=f"{further.short}@4")).count("run") == 0


def test_a_fork_may_follow_the_policy_where_the_other_run_did_not(tmp_path):
    run = pretend(tmp_path, rounds=3, reward_model=BT)
    new = pretend(tmp_path, rounds=4, reward_model={**BT, "every": 2}, fork=f"{run.short}@3")
    assert [one.label for one in new.stages if one.status == "ran"] == [*refresh(2), *rounds(4), *AFTER]
    assert new.stage("collect[reward@2]").request["inputs"] == {"policy": run.stage("train[2]").key}
    shutil.rmtree(tmp_path / "artifacts" / run.stage("train[1]").key)
    with pytest.raises(SpecError, match=r"fork: reward_model.every needs the checkpoint of step 1 of run .*every=0"):
        pretend(tmp_path, rounds=4, reward_model={**BT, "every": 1}, fork=f"{run.short}@3")


def test_its_lineage_has_a_step_for_each_training(tmp_path):
    run = pretend(tmp_path, reward_model={**BT, "every": 1}, rounds=2)
    found = Lineage(tmp_path).back(run.stage("train[2]").key)
    assert [(step.head.label, [one.label for one in step.others]) for step in found] == [
        ("train[2]", ["filter[2]", "judge[2]", "collect[2]"]),
        ("train[reward@1]", ["judge[reward@1]", "collect[reward@1]"]),
        ("train[1]", ["filter[1]", "judge[1]", "collect[1]"]),
        ("train[reward]", ["judge[reward]", "collect[reward]"]),
        ("train[sft]", ["filter[sft]", "judge[sft]", "collect[sft]"]),
    ]
    forward = Lineage(tmp_path).forward(run.stage("train[reward]").key)
    heads = [step.head.label for step in forward]
    assert (heads[0], "train[1]" in heads) == ("train[reward]", True)


def test_a_plan_prices_a_training_by_the_collections_that_it_learns_from(tmp_path):
    run = pretend(tmp_path, reward_model={**BT, "every": 1}, rounds=2, stop_at="train[reward@1]")
    edit_manifest(tmp_path, run.stage("train[reward]"), seconds=30.0)
    compute = {"prices": {"train": 7.0, "reward_model": 60.0}}
    found = planned(tmp_path, reward_model={**BT, "every": 1}, compute=compute)
    assert [found[label].status for label in refresh(1)] == ["cached", "cached", "run"]
    assert (found["train[reward@1]"].seconds, found["train[reward@1]"].cost) == pytest.approx((60.0, 1.0))
    assert found["train[reward@1]"].inputs == {
        "trajectories": "collect[reward@1]",
        "scores": "judge[reward@1]",
        "start": "train[reward]",
        "trajectories-1": "collect[reward]",
        "scores-1": "judge[reward]",
    }
    assert found["judge[2]"].inputs == {"trajectories": "collect[2]", "reward_model": "train[reward@1]"}


@pytest.mark.parametrize(("every", "compared"), [(0, "(rounds 1 to 2) to 0.350 (rounds 3 to 4)"), (2, None)])
def test_the_guard_compares_no_rounds_that_other_models_judged(tmp_path, every, compared):
    """Rewards rise from round to round, success falls from the second evaluation to the third."""
    before, lost = "+" * 30, "-" * 15 + "+" * 15
    hacked = {"metrics": {f"judge[{n}]": {"reward": value} for n, value in enumerate((0.1, 0.2, 0.4, 0.3), 1)},
              "episodes": {"evaluate[sft]": before, "evaluate[2]": before, "evaluate[final]": lost}}  # fmt: skip
    part = {**BT, "every": every}
    run = pretend(tmp_path, rounds=4, evaluate={"every": 2}, reward_model=part, **hacked)
    assert [compared in one.message for one in run.notices] == ([True] if compared else [])
    hacked["metrics"]["judge[4]"] = {"reward": 0.6}  # of the two that the same model judged, the second is higher
    run = pretend(tmp_path / "rose", rounds=4, evaluate={"every": 2}, reward_model=part, **hacked)
    assert len(run.notices) == 1


def test_its_figures_are_one_series_over_the_rounds(tmp_path, tiny_stages, screen):
    said = []
    tracker = SimpleNamespace(
        outbox=SimpleNamespace(put=lambda tell: tell()),
        log_stage=lambda artifact, label, status, seconds, step, made, group, tracking: said.append(
            (label, step, group)
        ),
        log_metrics=lambda metrics, step: None,
    )
    execution = Execution(spec_of(tmp_path), Context.at(tmp_path), screen[0], tracker, tmp_path / "log")
    for number, label in enumerate(("train[reward 2]", "train[reward 2@1]", "judge[reward@3]", "train[3]")):
        execution.stage(label, number, Request("add", {"amount": float(number)}))
    assert said == [
        ("train[reward 2]", 0, "reward_2/"),
        ("train[reward 2@1]", 1, "reward_2/"),
        ("judge[reward@3]", 2, "reward/"),
        ("train[3]", 3, ""),
    ]
    lines = [line.split("  ")[0] for line in screen[1].getvalue().splitlines()]
    assert [line.partition(" ran")[0] for line in lines] == [label for label, *_ in said[:3]]  # train[3] is of a round


# --- with a tiny model ----------------------------------------------------------------------------------------------

TINY = {
    "model": {"name": "tiny", "source": "random", "max_length": 4096, "lora": {"rank": 4, "alpha": 8}},
    "reward": {"_target_": "components.rewards.rules.outcome.Outcome", "repetition_cost": 1.0, "repetition_ngram": 1},
    "environment": {"_target_": "components.environments.worlds.shop.Shop", "train": 16, "heldout": 2},
    "agent": {"max_turns": 1, "max_tokens": 12},
    "collect": {"scenarios": 2, "group_size": 2},
    "rounds": 1,
    "warmup": None,
    "deploy": {"mode": "none"},
}


def play(root, **changes):
    """Runs an experiment's stages one after another; returns artifacts and statuses by label."""
    spec = validate(ExperimentSpec, {**DATA, **TINY, "root": str(root), **changes})
    context = Context.at(root)
    made, statuses = {}, {}

    def call(label, step, request):
        made[label], statuses[label] = run_stage(request, context)
        return made[label]

    Run(spec, call).execute()
    context.warm.close()
    return made, statuses


@pytest.mark.timeout(1800)
def test_from_the_first_episode_to_the_last(tmp_path):
    """By a model of whole episodes; test_step_labels.py has one of turns."""
    part = {**BT, "scenarios": 12, "models": 2, "combine": "bound"}
    made, _ = play(tmp_path, reward_model=part)
    assert "loss" in made["train[1]"].metrics  # the learned reward tells episodes of random words apart
    model = made["train[reward]"]
    assert read_card(model.path).kind == "reward_model"
    assert model.kind == "reward_model"
    assert {check_artifact(artifact.path) for artifact in made.values()} >= {"reward_model", "judge", "train"}
    assert {"loss", "heldout_loss", "pairs"} <= set(model.metrics)
    scores = list(read_scores(made["judge[1]"].path / "scores.parquet"))
    path = made["collect[1]"].path / "trajectories.parquet"
    scored = load_scored(path, made["judge[1]"].path / "scores.parquet", None)
    for score, one, played in zip(scores, scored, read_trajectories(path), strict=True):
        assert one.reward == score.reward is not None
        assert one.step_rewards == played.step_rewards
        assert "spread" in score.components
    _, again = play(tmp_path, reward_model=part)
    assert set(again.values()) == {"cached"}


@pytest.mark.timeout(1800)
def test_a_reward_model_of_an_earlier_run_judges_another(tmp_path):
    made, _ = play(tmp_path, reward_model={**BT, "scenarios": 12})
    learned = {"_target_": "components.rewards.judges.learned.Learned", "path": str(made["train[reward]"].path)}
    other, statuses = play(tmp_path, reward=learned)
    assert statuses["collect[1]"] == "cached"
    assert other["evaluate[final]"].metrics["components/overall"] == pytest.approx(
        other["evaluate[final]"].metrics["reward"]
    )
    same = [list(read_scores(one["judge[1]"].path / "scores.parquet")) for one in (made, other)]
    assert same[0] == same[1]
    base = next((tmp_path / "models").glob("tiny-*"))
    with pytest.raises(ArtifactError, match="trained on another base, name=tiny"):
        play(tmp_path, reward=learned, model={**TINY["model"], "name": str(base), "source": "hub"})


@pytest.mark.timeout(1800)
def test_it_follows_the_policy(tmp_path):
    """From its last state, on new scenarios and old ones; no scenario changes sides."""
    part = {**BT, "scenarios": 6, "group_size": 4, "every": 1}
    part["algorithm"] = {"name": "reward_model", "held_out": 0.5}
    made, _ = play(tmp_path, reward_model=part, rounds=2)
    shown = [list(read_trajectories(made[f"collect[reward{at}]"].path / "trajectories.parquet")) for at in ("", "@1")]
    scenarios = [{one.group for one in found} for found in shown]
    assert (len(scenarios[0]), len(scenarios[1]), scenarios[0] & scenarios[1]) == (6, 6, set())
    assert {one.policy for one in shown[0]} != {one.policy for one in shown[1]}
    first, second = (made[f"train[reward{at}]"] for at in ("", "@1"))
    steps = [json.loads((one.path / "trainer.json").read_text())["step"] for one in (first, second)]
    assert steps[1] == steps[0] + len((second.path / "log.jsonl").read_text().splitlines()) > steps[0]
    assert second.metrics["pairs"] > first.metrics["pairs"]
    sides = [json.loads((one.path / "scenarios.json").read_text()) for one in (first, second)]
    for side in ("trained", "held_out"):
        assert set(sides[0][side]) < set(sides[1][side])
        assert not set(sides[1][side]) <= scenarios[0]
    assert not set(sides[1]["trained"]) & set(sides[1]["held_out"])
    assert {"heldout_accuracy", "heldout_accuracy_before", "heldout_accuracy_earlier"} <= set(second.metrics)
    assert "heldout_accuracy_before" not in first.metrics
    assert made["judge[2]"].inputs["reward_model"] == second.key
