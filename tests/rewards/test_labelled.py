"""Labels of turns from a file: their episodes, their scores, and invalid files."""

from __future__ import annotations

import json
import shutil

import pytest

from components.errors import SpecError
from components.rewards.judge import judge
from components.rewards.judges.learned import Learned
from components.rewards.rules.labelled import Labelled
from components.rewards.rules.outcome import Outcome
from components.specs import Target
from components.trajectories.schema import History, Message
from tests.trajectories.builders import FAILURE, episode, talk


@pytest.fixture
def labels(tmp_path):
    """Write lines and return the path."""

    def write(*lines):
        path = tmp_path / "labels.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        return str(path)

    return write


def label(step, value, name="s/0", **more):
    return {"trajectory_id": name, "step": step, "label": value, **more}


def two_turns(sample=0, **more):
    return episode("s", sample, histories=[talk("?", "first", "!", "second")], **more)


def test_every_turn_labelled_makes_components_step_rewards_and_their_sum(labels):
    (score,) = judge(Labelled(labels(label(1, 0.25), label(0, 1)), name="good"), [two_turns()])
    assert score.components == {"good/0": 1.0, "good/1": 0.25}
    assert (score.step_rewards, score.reward, score.failure) == ([1.0, 0.25], 1.25, None)


def test_an_episode_without_all_labels_is_unscored_and_keeps_those_it_has(labels):
    none, some = judge(Labelled(labels(label(1, 0.5, "s/1"))), [two_turns(0), two_turns(1)])
    assert (none.reward, some.reward) == (None, None)
    assert none.failure.message == "0 of its 2 turns have a label"
    assert (some.failure.message, some.components, some.step_rewards) == (
        "1 of its 2 turns have a label",
        {"labelled/1": 0.5},
        [],
    )


def test_with_a_task_that_is_the_reward_and_labels_stand_beside_it(labels):
    path = labels(label(0, 0.5), label(1, 1.0), label(0, 0.1, "s/1"))
    rows = [two_turns(0, success=True), two_turns(1, success=False), two_turns(2, success=True)]
    result = list(judge(Labelled(path, task=Outcome()), rows))
    assert [score.reward for score in result] == [1.0, 0.0, 1.0]
    assert [score.step_rewards for score in result] == [[0.5, 1.0], [], []]
    assert result[0].components == {"success": 1.0, "labelled/0": 0.5, "labelled/1": 1.0}
    assert result[1].components == {"success": 0.0, "labelled/0": 0.1}
    assert result[2].components == {"success": 1.0}


def test_an_episode_that_the_task_cannot_score_is_unscored_with_its_reason(labels):
    def task(trajectory):
        raise RuntimeError("no way")

    (score,) = judge(Labelled(labels(label(0, 1.0)), task=task), [two_turns()])
    assert (score.reward, score.components) == (None, {"labelled/0": 1.0})
    assert score.failure.message.startswith("no way (tests/rewards/test_labelled.py:")


def test_several_labels_of_a_turn_count_by_their_mean_and_other_keys_are_left_alone(labels):
    path = labels(label(0, 0.0, author="first"), label(0, 1.0, author="second"), label(1, 0.5))
    (score,) = judge(Labelled(path), [two_turns()])
    assert score.step_rewards == [0.5, 0.5]


def test_an_episode_is_named_by_its_id_or_by_scenario_and_sample(labels):
    line = {"scenario": "s", "sample": 1, "step": 0, "label": 0.5}
    results = judge(Labelled(labels(line, {**line, "step": 1})), [two_turns(0), two_turns(1)])
    assert [score.reward for score in results] == [None, 1.0]


def test_a_label_of_another_policys_episode_is_not_taken(labels):
    path = labels(label(0, 1.0, policy="base"), label(1, 1.0))
    mine, other = two_turns(), two_turns()
    other.policy = "later"
    assert [next(iter(judge(Labelled(path), [labelled_episode]))).components for labelled_episode in (mine, other)] == [
        {"labelled/0": 1.0, "labelled/1": 1.0},
        {"labelled/1": 1.0},
    ]


def test_turns_are_what_was_sampled_over_all_histories(labels):
    sampled = History([Message("assistant", "shown"), Message("assistant", "said", span=(1, 2))], [5, 6], [-1.0] * 2)
    labelled_episode = episode("s", 0, histories=[sampled, talk("?", "written")])
    (score,) = judge(Labelled(labels(label(0, 0.5), label(1, 0.75))), [labelled_episode])
    assert score.step_rewards == [0.5, 0.75]
    (score,) = judge(Labelled(labels(label(2, 0.5))), [labelled_episode])
    assert score.failure.message == "a label of step 2, and the episode has 2 turns, from step 0"
    assert (score.reward, score.components) == (None, {})


def test_a_failed_episode_keeps_its_failure(labels):
    (score,) = judge(Labelled(labels(label(0, 1.0))), [episode("s", 0, failure=FAILURE)])
    assert score.failure == FAILURE


def test_a_line_that_is_no_label_is_named_by_its_number(labels, subtests):
    for line, said in [
        ("{", r"no JSON \(Expecting"),
        ("[1]", r"\[1\] is no JSON object"),
        ({"step": 0, "label": 1}, "has neither trajectory_id nor scenario and sample"),
        (label(0, 1.0, scenario="s", sample=0), "has both trajectory_id and scenario"),
        (label(0, 1.0, 7), "trajectory_id is 7; expected text"),
        ({"scenario": "s", "step": 0, "label": 1}, "sample is None; expected a whole number"),
        ({"scenario": 3, "sample": 0, "step": 0, "label": 1}, "scenario is 3; expected text"),
        (label(0, 1.0, policy=None), "policy is None; expected text"),
        (label(-1, 1.0), "step is -1; expected a whole number from 0 on"),
        (label(True, 1.0), "step is True"),
        (label(0.5, 1.0), "step is 0.5"),
        ({"trajectory_id": "s/0", "label": 1}, "step is None"),
        (label(0, "good"), "label is 'good'; expected a finite number"),
        (label(0, None), "label is None"),
        (label(0, True), "label is True"),
        ('{"trajectory_id": "s/0", "step": 0, "label": NaN}', "label is nan"),
        ('{"trajectory_id": "s/0", "step": 0, "label": Infinity}', "label is inf"),
    ]:
        with (
            subtests.test(said=said),
            pytest.raises(SpecError, match=rf"reward\.path: .*labels\.jsonl, line 3: .*{said}"),
        ):
            Labelled(labels(label(0, 1.0), "", line, label(1, 1.0)))


def test_all_faulty_lines_are_named_up_to_some(labels):
    with pytest.raises(SpecError) as caught:
        Labelled(labels(*["{"] * 12))
    assert len(caught.value.problems) == 11
    assert "2 more lines are no labels" in str(caught.value)


def test_a_file_without_labels_or_that_is_not_there_is_refused(labels, tmp_path):
    with pytest.raises(SpecError, match="has no label"):
        Labelled(labels("", " "))
    with pytest.raises(SpecError, match=r"reward\.path: .*missing\.jsonl' cannot be read \(No such file"):
        Labelled(str(tmp_path / "missing.jsonl"))
    with pytest.raises(SpecError, match="cannot be read"):
        Labelled(str(tmp_path))
    (tmp_path / "latin.jsonl").write_bytes(b'{"trajectory_id": "\xe4"}')
    with pytest.raises(SpecError, match=r"is no UTF-8 text \(byte 19\)"):
        Labelled(str(tmp_path / "latin.jsonl"))


def test_a_task_that_computes_with_a_model_is_refused(labels, tmp_path):
    with pytest.raises(SpecError, match=r"reward\.task: Learned computes with a model"):
        Labelled(labels(label(0, 1.0)), task=Learned(str(tmp_path)))


def test_a_stage_key_says_what_the_file_holds_not_where_it_is(labels, tmp_path):
    def key(path):
        return Target.model_validate(
            {"_target_": "components.rewards.rules.labelled.Labelled", "path": str(path)}
        ).resolved()

    path = labels(label(0, 1.0), label(1, 0.5))
    shutil.copy(path, tmp_path / "copy.jsonl")
    (tmp_path / "turned.jsonl").write_text("\n\n".join(reversed((tmp_path / "copy.jsonl").read_text().split("\n"))))
    assert key(path) == key(tmp_path / "copy.jsonl") == key(tmp_path / "turned.jsonl")
    assert str(tmp_path) not in str(key(path))
    before = key(path)
    assert key(labels(label(0, 1.0), label(1, 0.6))) != before
    assert key(labels(label(0, 1.0), label(1, 0.5, policy="base"))) != before
