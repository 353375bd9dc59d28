"""Labels of turns, by a rule as a judge would give them and by people from a file, on their way to a process reward
model and into the reward of the rounds. The model is real and tiny."""

from __future__ import annotations

import json
import math
import sys
from statistics import fmean

import pytest

from components.algorithms.reward_models.card import read_card
from components.trajectories.store import load_scored, read_scores, read_trajectories
from tests.flows.test_reward_model import PROCESS, play

RULE = '''
from components.trajectories.schema import Score


class ByTurn:
    """As a judge that looks at turns: each has a label for how much it says, and one for whether it is the first."""

    def score_group(self, group):
        return [self.score(one) for one in group]

    def score(self, one):
        said = [message.content for history in one.histories for message in history.messages if message.span]
        labels = {f"brief/{turn}": 1.0 / (1 + len(text)) for turn, text in enumerate(said)}
        labels |= {f"first/{turn}": float(turn == 0) for turn in range(len(said))}
        return Score(one.id, 0.5, labels)
'''
PLAYED = {  # random words are no moves, and the game goes on until the turns are used up
    "environment": {"_target_": "components.environments.games.tictactoe.TicTacToe", "train": 16, "heldout": 2},
    "agent": {"max_turns": 2, "max_tokens": 8},
}
EPOCHS = 8
SHOWN = {"scenarios": 6, "group_size": 2}


def process(heads, **more):
    algorithm = {
        "name": "process_reward_model",
        "heads": heads,
        "learning_rate": 1e-2,
        "epochs": EPOCHS,
        "batch_size": 2,
    }
    return {**PROCESS, **SHOWN, **more, "algorithm": algorithm}


def losses(made):
    """Mean loss of the first pass over the episodes, and of the last."""
    lines = (made["train[reward]"].path / "log.jsonl").read_text().splitlines()
    found = [json.loads(line)["loss"] for line in lines]
    each = len(found) // EPOCHS
    return fmean(found[:each]), fmean(found[-each:])


@pytest.fixture
def rule(tmp_path, monkeypatch):
    (tmp_path / "own_rule.py").write_text(RULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield {"allow": ["own_rule"], "reward": {"_target_": "own_rule.ByTurn"}}
    sys.modules.pop("own_rule", None)


@pytest.mark.timeout(1800)
def test_each_head_learns_the_labels_of_its_name_and_judges_the_rounds_turn_by_turn(tmp_path, rule):
    heads = {"brief": 2.0, "first": -1.0}
    made, _ = play(
        tmp_path / "runs",
        **rule,
        **PLAYED,
        reward_model=process(heads, weight=3.0, task_weight=0.5),
        algorithm={"name": "grpo", "credit": "turns"},
    )
    assert set(read_card(made["train[reward]"].path).heads) == set(heads)
    metrics = made["train[reward]"].metrics
    assert (metrics["labelled_episodes"], metrics["unlabelled"]) == (10.0, 0.0)  # one scenario of six is held out
    assert losses(made)[1] < losses(made)[0] / 2
    path = made["collect[1]"].path / "trajectories.parquet"
    for one, score in zip(read_trajectories(path), read_scores(made["judge[1]"].path / "scores.parquet"), strict=True):
        turns = sum(message.span is not None for history in one.histories for message in history.messages)
        assert len(score.step_rewards) == turns == 2
        learned = 2.0 * score.components["brief"] - 1.0 * score.components["first"]
        assert score.reward == pytest.approx(0.5 * 0.5 + 3.0 * learned, rel=1e-4, abs=1e-5)
        assert sum(score.step_rewards) == pytest.approx(score.reward, rel=1e-4, abs=1e-5)


def check_process_rewards(made):
    """Fail unless a learned process reward is spread over the turns of each episode of the first round."""
    assert "loss" in made["train[1]"].metrics  # the learned reward tells episodes of random words apart
    model = made["train[reward]"]
    assert read_card(model.path).kind == "process_reward_model"
    assert {"loss", "heldout_loss", "labelled_episodes"} <= set(model.metrics)
    paths = [
        made[f"{stage}[1]"].path / f"{name}.parquet"
        for stage, name in (("collect", "trajectories"), ("judge", "scores"))
    ]
    for score, one in zip(read_scores(paths[1]), load_scored(*paths, None), strict=True):
        assert one.reward == score.reward is not None
        assert one.step_rewards == score.step_rewards
        assert sum(score.step_rewards) == pytest.approx(score.reward)
        assert score.components["task"] <= 0.0


@pytest.mark.timeout(1800)
def test_labels_of_people_from_a_file_teach_a_process_model(tmp_path):
    """First the episodes, then the labels, then the same experiment with them: the episodes are found again."""
    credit = {"algorithm": {"name": "grpo", "credit": "turns"}}
    first, _ = play(tmp_path / "runs", **PLAYED, **credit, reward_model={**PROCESS, **SHOWN})
    check_process_rewards(first)
    shown = list(read_trajectories(first["collect[reward]"].path / "trajectories.parquet"))
    file = tmp_path / "labels.jsonl"
    with file.open("w") as out:
        for one in shown[:-2]:  # two episodes remain without
            for turn in range(sum(message.span is not None for message in one.histories[0].messages)):
                line = {"trajectory_id": one.id, "policy": one.policy, "step": turn, "label": turn / 2 - 1}
                print(json.dumps(line), file=out)
    reward = {"_target_": "components.rewards.rules.labelled.Labelled", "path": str(file), "name": "people"}
    reward["task"] = {"_target_": "components.rewards.rules.outcome.Outcome"}
    part = process({"people": 1.0})
    made, statuses = play(tmp_path / "runs", **PLAYED, **credit, reward=reward, reward_model=part)
    assert statuses["collect[reward]"] == "cached"
    metrics = made["train[reward]"].metrics
    assert metrics["unlabelled"] == 2.0
    assert losses(made)[1] < losses(made)[0] / 2
    judged = load_scored(*(made[f"{stage}[reward]"].path / f"{name}.parquet" for stage, name in
                           (("collect", "trajectories"), ("judge", "scores"))), None, components=True)  # fmt: skip
    assert [one.metrics.get("people/1") for one in judged][:-2] == [-0.5] * (len(shown) - 2)
    assert [one.metrics.get("people/1") for one in judged][-2:] == [None, None]
    assert all("people" in one.components for one in read_scores(made["judge[1]"].path / "scores.parquet"))
    assert not math.isnan(made["evaluate[final]"].metrics["reward"])  # of the task: nobody labelled those
