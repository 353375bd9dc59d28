"""What guards find, and what they do about it."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from components.errors import EspalierError, GuardTriggered
from flows.execution.executor import Execution
from flows.experiment.guards import MOST_NAMED, no_signal, reward_hacking, spans
from flows.history.records import Notice, Records
from flows.planning.plan import plan
from flows.stages.base import Context
from tests.flows.pretend import pretend, spec_of

NOTHING = {"filter[2]": {"kept": 0.0, "dropped": 8.0, "dropped/no_spread": 6.0, "dropped/unscored": 2.0}}
BEFORE, LOST = "+" * 30, "-" * 15 + "+" * 15
HACKED = {"metrics": {f"judge[{n}]": {"reward": 0.1 * n} for n in range(1, 5)},
          "episodes": {"evaluate[sft]": BEFORE, "evaluate[2]": BEFORE, "evaluate[final]": LOST}}  # fmt: skip
DIFFERENCE = {
    "difference": -0.5, "low": -0.7, "high": -0.2, "before": 0.9, "after": 0.4, "n": 10, "regressed": ["a", "b"]
}  # fmt: skip


def found(run):
    return [(one.kind, one.step) for one in run.notices]


def test_nothing_kept_is_said_with_the_counts_by_reason():
    assert no_signal("filter[2]", NOTHING["filter[2]"]) == (
        "filter[2] left nothing to train on: none of 8 episodes was kept (6 no_spread, 2 unscored)"
    )
    assert no_signal("filter[2]", {"kept": 1.0, "dropped": 7.0}) is None
    assert no_signal("filter[2]", {}) is None  # not made yet


def test_rounds_since_an_evaluation_are_compared_with_those_before_it():
    for steps, rounds, expected in (
        ([0, 2, 4], [1, 2, 3, 4], ([1, 2], [3, 4])),
        ([0, 3], [1, 2, 3], ([1], [2, 3])),  # the first round is played by the policy that was evaluated before
        ([0, 1], [1], ([1], [])),
        ([0, 1, 2], [1, 2], ([1], [2])),
        ([4, 6], [5, 6], ([5], [6])),  # of a fork
        ([0, 2, 4, 5], [1, 2, 3, 4, 5], ([3, 4], [5])),
    ):
        assert spans(steps, rounds) == expected, steps


def test_hacking_is_a_reward_that_rises_while_success_clearly_falls():
    message = reward_hacking({1: 0.2, 2: 0.4}, {3: 0.5}, DIFFERENCE, (2, 3))
    assert message == (
        "training reward rose from 0.300 (rounds 1 to 2) to 0.500 (round 3), but held-out success fell from 0.900 "
        "(step 2) to 0.400 (step 3): -0.500 [-0.700, -0.200] on the same 10 scenarios. Lost: a, b"
    )
    assert reward_hacking({1: 0.5}, {2: 0.5}, DIFFERENCE, (2, 3)) is None
    assert reward_hacking({1: 0.5}, {}, DIFFERENCE, (2, 3)) is None
    for high in (0.0, 0.1, None):
        assert reward_hacking({1: 0.2}, {2: 0.4}, {**DIFFERENCE, "high": high}, (2, 3)) is None
    many = {**DIFFERENCE, "regressed": [f"s{n}" for n in range(MOST_NAMED + 3)]}
    assert str(reward_hacking({1: 0.2}, {2: 0.4}, many, (2, 3))).endswith(f"s{MOST_NAMED - 1} and 3 more")


def test_a_filter_that_keeps_nothing_is_a_warning_and_the_run_goes_on(tmp_path):
    run = pretend(tmp_path, metrics=NOTHING)
    assert found(run) == [("no_signal", 2)]
    assert run.stages[-1].label == "deploy"
    assert Records(tmp_path).get(run.id) == run


def test_with_stop_it_ends_the_run_before_training_and_with_warn_it_goes_on_from_there(tmp_path):
    stop = {"guards": {"no_signal": "stop"}}
    for _ in range(2):  # the same command gives the same verdict
        with pytest.raises(
            GuardTriggered, match=r"6 no_spread, 2 unscored\)\. Increase .* guards\.no_signal=warn resumes"
        ):
            pretend(tmp_path, metrics=NOTHING, **stop)
    struck, before = Records(tmp_path).all()
    assert (struck.status, struck.stages[-1].label, found(struck)) == ("FAILED", "filter[2]", [("no_signal", 2)])
    assert {one.status for one in struck.stages} == {"cached"}
    planned = plan(spec_of(tmp_path, **stop))
    assert planned.stages[-1].label == "filter[2]"
    assert "a guard ends the run: filter[2] left nothing" in planned.notes[0]
    run = pretend(tmp_path, metrics=NOTHING)
    assert [one.label for one in run.stages if one.status == "ran"] == ["train[2]", "evaluate[final]", "deploy"]
    assert [one.key for one in run.stages][: len(before.stages)] == [one.key for one in before.stages]


def test_the_filter_of_the_warmup_is_watched_too(tmp_path):
    with pytest.raises(GuardTriggered, match=r"filter\[sft\]"):
        pretend(tmp_path, metrics={"filter[sft]": {"kept": 0.0}}, guards={"no_signal": "stop"})


@pytest.mark.parametrize("every", [0, 2])
def test_reward_hacking_is_looked_for_where_there_are_evaluations_in_the_rounds(tmp_path, every):
    run = pretend(tmp_path, rounds=4, evaluate={"every": every}, **HACKED)
    assert found(run) == ([("reward_hacking", 4)] if every else [])
    if every:
        assert "(rounds 1 to 2) to 0.350 (rounds 3 to 4)" in run.notices[0].message
        assert "Lost: scenario-00, scenario-01" in run.notices[0].message


def test_off_says_nothing_and_what_did_not_fall_clearly_neither(tmp_path):
    assert pretend(tmp_path, rounds=4, evaluate={"every": 2}, guards={"reward_hacking": "off"}, **HACKED).notices == []
    slight = {**HACKED, "episodes": {**HACKED["episodes"], "evaluate[final]": "-" + "+" * 29}}
    assert pretend(tmp_path / "slight", rounds=4, evaluate={"every": 2}, **slight).notices == []
    fell = {**HACKED, "metrics": {f"judge[{n}]": {"reward": -0.1 * n} for n in range(1, 5)}}
    assert pretend(tmp_path / "fell", rounds=4, evaluate={"every": 2}, **fell).notices == []


def test_a_policy_that_hacks_is_not_deployed_with_stop(tmp_path):
    rules = {"rounds": 4, "evaluate": {"every": 2}, "guards": {"reward_hacking": "stop"}}
    for _ in range(2):
        with pytest.raises(GuardTriggered, match=r"Lost: .*guards\.reward_hacking=warn resumes from here"):
            pretend(tmp_path, **rules, **HACKED)
    assert Records(tmp_path).all()[0].stages[-1].label == "evaluate[final]"
    run = pretend(tmp_path, **{**rules, "guards": {"reward_hacking": "warn"}}, **HACKED)
    assert [one.label for one in run.stages if one.status == "ran"] == ["deploy"]


def test_the_error_crosses_processes():
    error = pickle.loads(pickle.dumps(GuardTriggered("what it found")))
    assert isinstance(error, EspalierError)
    assert str(error) == "what it found"


def test_a_notice_is_on_the_console_and_in_mlflow(tmp_path, screen):
    class Tracker:
        """What of the tracker is called."""

        said: ClassVar[list[Any]] = []
        outbox = SimpleNamespace(put=lambda tell: tell())
        set_tags = said.append

        def log_metrics(self, metrics, step):
            self.said.append((metrics, step))

    execution = Execution(spec_of(tmp_path), Context.at(tmp_path), screen[0], Tracker(), tmp_path / "log")
    execution.notice(Notice("no_signal", 3, "nothing is left [so]"))
    execution.notice(Notice("best", 2, "the one after round 2"))
    assert [line.strip() for line in screen[1].getvalue().splitlines()] == [
        "warning: nothing is left [so]",
        "the one after round 2",
    ]
    assert Tracker.said == [
        {"notice.no_signal": "nothing is left [so]"},
        ({"notice/no_signal": 1.0}, 3),
        {"notice.best": "the one after round 2"},
        ({"notice/best": 1.0}, 2),
    ]
