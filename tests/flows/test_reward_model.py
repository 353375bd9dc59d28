"""A reward model in a run: when it is trained, of what, what it judges, and that all of it works with a tiny model."""

from __future__ import annotations

import json

import pytest

from components.algorithms.reward_card import read_card
from components.errors import ArtifactError, SpecError
from components.specs import validate
from components.trajectories.store import load_scored, read_scores, read_trajectories
from flows.lineage import Lineage
from flows.online_rl import online_rl
from flows.plan import plan
from flows.requests import Requests
from flows.spec import ExperimentSpec
from flows.stages.base import Context
from flows.stages.execute import run_stage
from tests.flows.pretend import pretend, spec_of
from tests.flows.test_online_rl import DATA, WARMUP, Recorder, changed, rounds

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
    assert "learned" not in run.requests["judge[reward]"].spec
    assert run.requests["evaluate[final]"].inputs == {"policy": run.keys["train[2]"]}  # by the declared reward
    assert [one.key for one in run.outcome.reward_models] == [run.keys["train[reward]"]]


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


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"weight": 2.0}, ["judge[1]", "filter[1]", "train[1]", *rounds(2), *AFTER]),
        ({"algorithm": {"name": "reward_model", "epochs": 2}},
         ["train[reward]", "judge[1]", "filter[1]", "train[1]", *rounds(2), *AFTER]),
        ({"scenarios": 8}, [*REWARD, "judge[1]", "filter[1]", "train[1]", *rounds(2), *AFTER]),
    ],
)  # fmt: skip
def test_a_change_runs_again_only_what_depends_on_it(tmp_path, change, expected):
    assert changed(Recorder(tmp_path, reward_model=BT), Recorder(tmp_path, reward_model={**BT, **change})) == expected


def test_the_declared_reward_counts_in_the_rounds_only_where_it_has_a_weight(tmp_path):
    other = {"_target_": "components.rewards.outcome.Outcome", "turn_cost": 0.1}
    for part, differs in ((BT, False), ({**BT, "task_weight": 1.0}, True)):
        runs = [Requests(spec_of(tmp_path, reward_model=part, reward=r)) for r in (DATA["reward"], other)]
        artifact = pretend(tmp_path, stop_at="judge[sft]").stage("collect[sft]")
        keys = [json.dumps(_key_part(one.judge(artifact, [artifact]))) for one in runs]
        assert (keys[0] != keys[1]) == differs


def _key_part(request):
    from flows.stages.execute import key_part

    return key_part(request)


def test_a_fork_finds_the_reward_model_of_the_run_that_it_forks(tmp_path):
    run = pretend(tmp_path, rounds=2, reward_model=BT)
    new = pretend(tmp_path, rounds=3, reward_model=BT, fork=f"{run.short}@2")
    assert [new.stage(label).status for label in REWARD] == ["cached"] * 3
    assert [new.stage(label).key for label in REWARD] == [run.stage(label).key for label in REWARD]
    labels = [one.label for one in new.stages]
    assert labels == ["evaluate[start]", *REWARD, *rounds(3), "evaluate[final]", "deploy"]


def test_its_lineage_is_a_step_of_its_own(tmp_path):
    run = pretend(tmp_path, reward_model=BT, rounds=1)
    found = Lineage(tmp_path).back(run.stage("train[1]").key)
    assert [(step.head.label, [one.label for one in step.others]) for step in found] == [
        ("train[1]", ["filter[1]", "judge[1]", "collect[1]"]),
        ("train[reward]", ["judge[reward]", "collect[reward]"]),
        ("train[sft]", ["filter[sft]", "judge[sft]", "collect[sft]"]),
    ]
    forward = Lineage(tmp_path).forward(run.stage("train[reward]").key)
    assert [step.head.label for step in forward] == ["train[reward]", "train[1]"]


def test_a_plan_knows_its_stages(tmp_path):
    pretend(tmp_path, reward_model=BT, stop_at="train[reward]")
    found = plan(spec_of(tmp_path, reward_model=BT))
    status = {one.label: one.status for one in found.stages}
    assert [status[label] for label in REWARD] == ["cached", "cached", "run"]
    judge = next(one for one in found.stages if one.label == "judge[1]")
    assert judge.inputs == {"trajectories": "collect[1]", "reward_model": "train[reward]"}


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"reward_model": {**BT, "group_size": 1}}, "reward_model.group_size", "pairs are two episodes"),
        ({"reward_model": {**BT, "scenarios": 17}}, "reward_model.scenarios", "16 scenarios"),
        ({"reward_model": {**BT, "combine": "min"}}, "reward_model.combine", "models=1 is one"),
        ({"reward_model": BT, "algorithm": {"name": "sft"}, "collect": {"temperature": 0.0, "scenarios": 4}},
         "collect.temperature", "alike"),
        ({"reward_model": {**BT, "algorithm": {"name": "grpo"}}}, "reward_model.algorithm", "reward_model"),
        ({"algorithm": {"name": "reward_model"}}, "algorithm", "grpo"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(tmp_path, changes, path, words):
    with pytest.raises(SpecError) as caught:
        spec_of(tmp_path, **changes)
    found = {problem.path: str(problem) for problem in caught.value.problems}
    (named,) = [text for where, text in found.items() if where.startswith(path)]
    assert words in named


# --- with a tiny model ----------------------------------------------------------------------------------------------

TINY = {
    "model": {"name": "tiny", "source": "random", "max_length": 4096, "lora": {"rank": 4, "alpha": 8}},
    "reward": {"_target_": "components.rewards.outcome.Outcome", "repetition_cost": 1.0, "repetition_ngram": 1},
    "environment": {"_target_": "components.environments.shop.Shop", "train": 16, "heldout": 2},
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

    online_rl(spec, call)
    context.warm.close()
    return made, statuses


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "part", [{**BT, "scenarios": 12, "models": 2, "combine": "bound"}, PROCESS], ids=["episodes", "turns"]
)
def test_from_the_first_episode_to_the_last(tmp_path, part):
    algorithm = {"name": "grpo", "credit": "turns" if part is PROCESS else "episode"}
    made, _ = play(tmp_path, reward_model=part, algorithm=algorithm)
    assert "loss" in made["train[1]"].metrics  # the learned reward tells episodes of random words apart
    model = made["train[reward]"]
    assert read_card(model.path).kind == part["algorithm"]["name"]
    assert model.kind == "reward_model"
    assert {
        "loss",
        "heldout_loss",
        "pairs" if part["algorithm"]["name"] == "reward_model" else "labelled_episodes",
    } <= set(model.metrics)
    scores = list(read_scores(made["judge[1]"].path / "scores.parquet"))
    path = made["collect[1]"].path / "trajectories.parquet"
    scored = load_scored(path, made["judge[1]"].path / "scores.parquet", None)
    for score, one, played in zip(scores, scored, read_trajectories(path), strict=True):
        assert one.reward == score.reward is not None
        if part is PROCESS:
            assert one.step_rewards == score.step_rewards
            assert sum(score.step_rewards) == pytest.approx(score.reward)
            assert score.components["task"] <= 0.0
        else:
            assert one.step_rewards == played.step_rewards
            assert "spread" in score.components
    _, again = play(tmp_path, reward_model=part, algorithm=algorithm)
    assert set(again.values()) == {"cached"}


@pytest.mark.timeout(300)
def test_a_reward_model_of_an_earlier_run_judges_another(tmp_path):
    made, _ = play(tmp_path, reward_model={**BT, "scenarios": 12})
    learned = {"_target_": "components.rewards.learned.Learned", "path": str(made["train[reward]"].path)}
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
