"""Revision of a run's answers by a judge, and training on them as on human corrections."""

from __future__ import annotations

import json

import pytest

from components.rewards.judge import judge
from components.trajectories.feedback import Correction, read, read_all
from components.trajectories.feedback_episodes import taught
from flows.runs.revise import main
from tests.flows.annotated import EPISODES, played
from tests.flows.pretend import pretend
from tests.rewards.judged import data, judge_server, means, says, target, used

ANSWERS = {"It is on its way.", "Refunded."}
"""Answers that follow the principles."""


def about(asked):
    (judged,) = [one for one in json.loads(data(asked)) if one.get("judged")]
    return judged["content"]


def script(asked):
    """Return the scripted answer of a judge that criticizes and revises unknown answers."""
    if len(asked.body["messages"]) > 2:
        return says({"revision": f"I will find out. (It was: {len(about(asked))} characters.)"})
    score = 1.0 if about(asked) in ANSWERS else 0.25
    return says({"scores": {name: {"score": score, "critique": "So."} for name in ("helpful", "honest", "harmless")}})


def constitution(server, **changes):
    made = target("constitution", **changes).model_dump(mode="json")
    return {**made, "model": {**made["model"], "url": server.url, "model": "judge"}}


@pytest.fixture
def server():
    with judge_server(script) as server:
        yield server


@pytest.fixture
def run(tmp_path, server):
    """Return a run that was judged by a constitution."""
    episodes = {"collect[1]": EPISODES, "judge[1]": EPISODES} | {f"evaluate[{one}]": "+" for one in ("start", "final")}
    return pretend(tmp_path, rounds=1, warmup=None, episodes=episodes, reward=constitution(server))


def revise(tmp_path, *more):
    return main(["latest", f"root={tmp_path}", "--trust", "--out", str(tmp_path / "revised.jsonl"), *more])


def test_answers_that_do_not_keep_the_principles_become_corrections(tmp_path, run, capsys):
    assert revise(tmp_path) == 0
    found = read(tmp_path / "revised.jsonl")
    assert [one.trajectory for one in found] == ["order-A7/1", "order-A7/2"]  # the failed one is not asked about
    assert {(type(one), one.author, one.message) for one in found} == {(Correction, "constitution judge", 4)}
    assert found[0].text.startswith("I will find out.")
    assert "honest 0.25: So." in found[0].note
    stderr = capsys.readouterr().err
    assert "4 answers of collect[1]" in stderr
    assert "2 revised (2 added" in stderr
    assert "6 calls, 0 answers from the cache" in stderr
    assert f"feedback=answers feedback.path={tmp_path / 'revised.jsonl'} fork={run.short}" in stderr


def test_they_are_learned_from_like_corrections_of_people(tmp_path, run):
    assert revise(tmp_path) == 0
    learned = taught(EPISODES, read_all(tmp_path / "revised.jsonl"))
    assert len(learned) == 2
    for episode, score in learned:
        *before, last = episode.histories[0].messages
        assert [one.role for one in before] == ["system", "user", "assistant", "tool"]
        assert last.content.startswith("I will find out.")
        assert score.reward == 1.0


def test_a_second_time_nothing_is_asked_and_nothing_added(tmp_path, run, server, capsys):
    assert revise(tmp_path) == 0
    asked = len(server.requests)
    assert revise(tmp_path) == 0
    assert len(server.requests) == asked
    assert len(read(tmp_path / "revised.jsonl")) == 2
    assert "(0 added" in capsys.readouterr().err


def test_what_the_judge_stage_asked_is_not_asked_again(tmp_path, run, server, capsys):
    """With `revise`, the judge stage has already made these calls."""
    with used(
        target("constitution", **constitution(server, revise=True)).build(), means(tmp_path / "answers")
    ) as reward:
        list(judge(reward, EPISODES))
    asked = len(server.requests)
    assert asked == 6
    assert revise(tmp_path) == 0
    assert len(server.requests) == asked
    assert "0 calls, 6 answers from the cache" in capsys.readouterr().err


def test_preferences_are_written_beside_them(tmp_path, run):
    assert revise(tmp_path, "--pairs", str(tmp_path / "pairs.jsonl")) == 0
    pairs = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert len(pairs) == 2
    for pair in pairs:
        assert pair["chosen"][:-1] == pair["rejected"][:-1]
        assert pair["chosen"][-1]["content"].startswith("I will find out.")
        assert pair["rejected"][-1]["content"] in {EPISODES[1].histories[0].messages[-1].content, "\ud800 odd"}
        assert pair["tools"] == EPISODES[1].tools


def test_another_judge_can_be_named(tmp_path, server, capsys):
    played(tmp_path)
    assert revise(tmp_path) == 2
    assert "components.rewards.rules.outcome.Outcome contains no constitution; set a judge" in capsys.readouterr().err
    assert revise(tmp_path, f"reward.model.url={server.url}", "reward.model.model=judge") == 0
    assert len(read(tmp_path / "revised.jsonl")) == 2


def test_a_constitution_inside_of_another_reward_is_found(tmp_path, server):
    outer = {"_target_": "components.rewards.judges.ruler.Ruler", "independent": constitution(server)}
    outer["model"] = {"name": "served", "url": server.url, "model": "judge"}
    pretend(tmp_path, rounds=1, warmup=None, episodes={"collect[1]": EPISODES, "judge[1]": EPISODES}, reward=outer)
    assert revise(tmp_path) == 0
    assert len(read(tmp_path / "revised.jsonl")) == 2


MISTAKES = [
    (["--stage", "collect[7]"], "--stage collect[7]: run"),
    (["--out", "/dev/null/x.jsonl"], "cannot be written"),
    (["reward.model.url=http://there/v1"], "reward.model.model: needs a value"),
    (["reward.answers=first", "reward.model.url=http://there/v1", "reward.model.model=a"], "reward.answers"),
    (["root=/nowhere"], "root=/nowhere: the folder does not exist"),
]


def test_mistakes_are_named(tmp_path, run, capsys):
    for given, words in MISTAKES:
        assert revise(tmp_path, *given) == 2, given
        assert words in capsys.readouterr().err
