"""The next round while this one is trained: who plays it, what runs at the same time, and how it ends."""

from __future__ import annotations

import threading
import time

import psutil
import pytest

from components.compute.runners import KeptProcessRunner, StageProcess
from components.errors import EspalierError, SpecError, WaitTimeout
from flows.execution.executor import Execution
from flows.execution.overlap import Concurrent
from flows.history.records import Records, RunRecord, recording
from flows.plan import show
from flows.planning.earlier_stages import SimilarStage
from flows.planning.notes import resolved_values
from flows.planning.plan import plan
from flows.recipes.run import Run
from flows.stages import STAGES
from flows.stages.base import Context, Request
from tests.flows import waiting
from tests.flows.pretend import pretend, spec_of
from tests.flows.test_online_rl import DATA, Recorder, changed, rounds
from tests.flows.waiting import until
from tests.refusals import wrong_refusals

COLLECT = DATA["collect"]
OVERLAP = {
    "rounds": 4,
    "collect": {**COLLECT, "overlap": 1},
    "algorithm": {"name": "grpo"},
}
BEFORE = {**OVERLAP, "collect": COLLECT}


# --- the schedule ---------------------------------------------------------------------------------------------------


def test_a_round_is_played_by_the_policy_one_version_back(tmp_path):
    run = Recorder(tmp_path, **OVERLAP)
    played = {number: run.requests[f"collect[{number}]"].inputs["policy"] for number in (1, 2, 3, 4)}
    trained = {number: run.keys[f"train[{number}]"] for number in ("sft", 1, 2)}
    assert played == {1: trained["sft"], 2: trained["sft"], 3: trained[1], 4: trained[2]}
    assert run.requests["train[4]"].inputs["start"] == run.keys["train[3]"]
    assert run.requests["train[4]"].inputs["trajectories"] == run.keys["collect[4]"]
    assert [run.requests[f"collect[{number}]"].spec["round"] for number in (1, 2, 3, 4)] == [0, 1, 2, 3]
    assert list(run.keys)[6:] == [*rounds(1)[:3], "train[1]", *rounds(2)[:3], "train[2]", *rounds(3)[:3], "train[3]",
                                  *rounds(4), "evaluate[final]", "deploy"]  # fmt: skip


def test_staleness_is_the_smaller_of_the_earlier_rounds_and_the_overlap(tmp_path):
    for overlap in (0, 1, 2, 6):
        run = Recorder(tmp_path, **{**OVERLAP, "rounds": 5, "collect": {**COLLECT, "overlap": overlap}})
        versions = {run.keys["train[sft]"]: 0} | {run.keys[f"train[{number}]"]: number for number in range(1, 6)}
        played = [versions[run.requests[f"collect[{number}]"].inputs["policy"]] for number in range(1, 6)]
        assert [n - 1 - version for n, version in enumerate(played, 1)] == [min(n, overlap) for n in range(5)]
        trained = [versions[run.requests[f"train[{number}]"].inputs["start"]] for number in range(1, 6)]
        assert trained == [0, 1, 2, 3, 4]
        behind = {"policy versions behind, at most": float(min(4, overlap))} if overlap else {}
        assert run.outcome.reported == behind


def test_the_plan_of_several_rounds_ahead_says_how_old_episodes_are_and_waits_for_what_is_not_covered(
    tmp_path, monkeypatch
):
    seconds = {"train": 2, "collect": 9, "judge": 1, "filter": 0, "evaluate": 1, "deploy": 1}
    pretend(tmp_path, **BEFORE)
    monkeypatch.setattr(SimilarStage, "seconds_for", lambda near, request: seconds[request.stage])
    deep = {**OVERLAP, "rounds": 5, "collect": {**COLLECT, "overlap": 2}, "seed": 1}
    found = plan(spec_of(tmp_path, **deep))
    note = "round r is collected by the policy after round r - 3; its tokens are at most 2 policy versions old"
    assert any(note in text for text in found.notes)
    assert [one.label for one in found.stages if one.stage == "collect" and one.step] == [
        f"collect[{number}]" for number in range(1, 6)
    ]
    beside = {one.label: one.beside for one in found.stages if one.stage == "collect" and one.beside}
    assert beside == {f"collect[{n}]": f"train[{max(1, n - 2)}]" for n in range(2, 6)}
    # Rounds 2 and 3 begin with train[1], at 0: it ends at 2, they end at 10. Round 4 begins with train[2], at 10, and
    # ends at 20; train[3] begins at 12, with round 5, and ends at 14. train[4] ends at 22, as round 5 does.
    waited = {
        number: sum(
            one.seconds - one.overlapped_seconds
            for one in found.stages
            if one.step == number and one.stage in ("collect", "judge", "filter")
        )
        for number in range(2, 6)
    }
    assert waited == {2: 8, 3: 0, 4: 6, 5: 0}


def test_what_does_not_depend_on_it_is_the_same(tmp_path):
    same = {"algorithm": {"name": "grpo", "correction": "truncate"}}  # auto depends on it
    one, other = Recorder(tmp_path, **{**BEFORE, **same}), Recorder(tmp_path, **{**OVERLAP, **same})
    assert changed(one, other) == [*rounds(2, 3, 4), "evaluate[final]", "deploy"]


def test_refills_are_played_by_the_same_policy_and_an_early_end_has_collected_one_round_too_many(tmp_path):
    left = {"filter[2]": {"scenarios": 3.0, "kept": 6.0}, "filter[2+1]": {"scenarios": 1.0, "kept": 2.0}}
    changes = {**OVERLAP, "collect": {**OVERLAP["collect"], "refills": 1}}
    run = Recorder(tmp_path, left, **changes)
    assert run.requests["collect[2+1]"].inputs == run.requests["collect[2]"].inputs
    assert "trajectories+1" in run.requests["train[2]"].inputs
    falling = {f"evaluate[{name}]": {"success": value} for name, value in (("sft", 0.5), ("1", 0.4))}
    run = Recorder(tmp_path, falling, **OVERLAP, evaluate={"every": 1}, early_stopping={"patience": 1})
    assert "collect[2]" in run.keys
    assert "train[2]" not in run.keys
    assert [number for number, _ in run.rounds] == [1]


def test_a_fork_begins_as_a_run_does(tmp_path):
    run = pretend(tmp_path, **OVERLAP)
    fork = pretend(tmp_path, **OVERLAP, fork=f"{run.short}@2")
    played = {number: fork.stage(f"collect[{number}]").request["inputs"]["policy"] for number in (3, 4)}
    assert set(played.values()) == {run.stage("train[2]").key}
    assert fork.stage("train[4]").request["inputs"]["start"] == fork.stage("train[3]").key != run.stage("train[3]").key


REWARD = {"algorithm": {"name": "reward_model"}, "every": 1, "scenarios": 4}


ON_POLICY = [
    (
        {"algorithm": {"name": "grpo", "correction": "none"}},
        "algorithm.correction: none: .* expected truncate or mask",
    ),
    ({"algorithm": {"name": "ppo", "correction": "none"}}, "algorithm.correction"),
    ({"replay": {"max_staleness": 0}}, "replay.max_staleness: 0: drops episodes of this round"),
    ({"reward_model": REWARD}, "reward_model.every: 1: .* expected 0, or collect.overlap=0"),
    ({"collect": {**COLLECT, "overlap": -1}}, "collect.overlap"),
]


def test_what_must_not_be_one_version_behind_is_refused(tmp_path):
    assert wrong_refusals(ON_POLICY, lambda change: spec_of(tmp_path, **{**OVERLAP, **change})) == []
    for change, _ in ON_POLICY:
        spec_of(tmp_path, **{**OVERLAP, **change, "collect": COLLECT})
    for name in ("dpo", "kto", "sft"):  # they learn from any episodes, without a correction
        spec_of(tmp_path, **{**OVERLAP, "algorithm": {"name": name}})


def test_more_versions_behind_need_as_much_staleness_in_replay(tmp_path):
    deep = {**OVERLAP, "collect": {**COLLECT, "overlap": 3}}
    with pytest.raises(SpecError, match=r"replay.max_staleness: 2: .* up to 3 versions old; expected at least 3"):
        spec_of(tmp_path, **deep, replay={"max_staleness": 2})
    spec_of(tmp_path, **deep, replay={"max_staleness": 3})
    with pytest.raises(SpecError, match=r"correction: none: with collect.overlap=3 .* up to 3 versions behind"):
        spec_of(tmp_path, **{**deep, "algorithm": {"name": "grpo", "correction": "none"}})


VERSIONS_BEHIND = [
    (6, "up to 5 versions behind"),
    (3, "up to 2 versions behind"),
    (2, "1 version behind"),
    (1, "there is none"),
]


def test_the_rounds_limit_the_versions_behind_that_a_plan_states(tmp_path):
    """The correction itself stays, so that more rounds later find the first one in the cache."""
    for count, words in VERSIONS_BEHIND:
        spec = spec_of(tmp_path, **{**OVERLAP, "rounds": count, "collect": {**COLLECT, "overlap": 5}})
        (note,) = [text for text in resolved_values(spec) if text.startswith("algorithm.correction=auto")]
        assert words in note
        assert spec.corrected_algorithm().correction == "truncate"


def test_the_plan_shows_what_runs_beside_what_and_counts_its_time_once(tmp_path, monkeypatch):
    pretend(tmp_path, **BEFORE)
    seconds = {"train": 5, "collect": 4, "judge": 2, "filter": 1, "evaluate": 1, "deploy": 1}
    monkeypatch.setattr(SimilarStage, "seconds_for", lambda near, request: seconds[request.stage])
    found = plan(spec_of(tmp_path, **{**OVERLAP, "seed": 1, "compute": {"price": 3600, "prices": {"train": 7200}}}))
    beside = {one.label: one.beside for one in found.stages if one.beside}
    assert beside == {
        label: f"train[{number - 1}]"
        for number in (2, 3, 4)
        for label in (f"{stage}[{number}]" for stage in ("collect", "judge", "filter"))
    }
    overlapped_seconds = {one.label: one.overlapped_seconds for one in found.stages if one.label.endswith("[2]")}
    assert overlapped_seconds == {"collect[2]": 4, "judge[2]": 1, "filter[2]": 0, "train[2]": 0}
    ran = [one for one in found.stages if one.status == "run"]
    assert found.seconds == sum(one.seconds for one in ran) - 3 * 5
    trained = sum(one.seconds for one in ran if one.stage == "train")
    assert found.cost == found.seconds + trained  # training costs twice as much, and what runs beside it nothing
    assert "process, beside train[1]" in " ".join(show(found).split())


# --- at the same time -----------------------------------------------------------------------------------------------


@pytest.fixture
def execution(tmp_path, screen, monkeypatch, unhurried):
    """Of stages `wait`, which run in a second process where they are beside another."""
    monkeypatch.setitem(STAGES, "wait", waiting.STAGE)
    spec = spec_of(tmp_path, compute={"stall_timeout": 60})
    made = Execution(spec, Context.at(tmp_path), screen[0], None, tmp_path / "logs" / "log")
    made.second = KeptProcessRunner(StageProcess(tmp_path, tmp_path / "stages.log"), waiting.COMMAND)
    with recording(tmp_path, RunRecord("abcdef01", "test", 0, time.time())) as writer:
        made.record = writer
        from flows.history.lineage_graph import Lineage

        made.lineage = Lineage(tmp_path)
        yield made
    made.close()


def plainly(run):
    return lambda label, step, request: run(label, step, request).artifact


def wait(number, **options):
    return Request("wait", {"number": number, **options})


def drafts(tmp_path):
    return list((tmp_path / "artifacts" / ".drafts").glob("*"))


def children():
    return [one for one in psutil.Process().children() if "tests.flows.waiting" in " ".join(one.cmdline())]


def test_both_run_at_the_same_time_and_are_told_in_one_order(tmp_path, execution):
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    with Concurrent(execution, plainly)("train[1]", lambda call: call("collect[2]", 2, wait(2, touch=one))) as ahead:
        trained = execution.stage("train[1]", 1, wait(1, touch=other, wait_for=one))  # ends after the one beside it
    assert (ahead.value.metrics["number"], trained.artifact.metrics["number"]) == (2, 1)
    told = Records(tmp_path).all()[0].stages
    assert [(stage.label, stage.step, stage.status) for stage in told] == [
        ("train[1]", 1, "ran"),
        ("collect[2]", 2, "ran"),
    ]
    collected = execution.done["collect[2]"]
    assert 0 < collected.overlapped_seconds <= collected.seconds
    assert [stage.overlapped_seconds for stage in told] == [0.0, round(collected.overlapped_seconds, 3)]
    with Concurrent(execution, plainly)("train[1]", lambda call: call("collect[2]", 2, wait(2))) as ahead:
        pass  # found: no process is started
    assert execution.done["collect[2]"].status == "cached"


def test_works_of_several_rounds_run_at_the_same_time_and_are_waited_for_in_their_order(tmp_path, execution):
    marks = {number: str(tmp_path / f"mark-{number}") for number in (2, 3, 4)}
    background = Concurrent(execution, plainly)

    def work(number, waits_for):
        options = {"touch": marks[number], "wait_for": marks[waits_for]}
        return lambda call: call(f"collect[{number}]", number, wait(number, **options))

    with background("train[1]", work(2, waits_for=3), work(3, waits_for=2)) as second:  # each needs the other to run
        execution.stage("train[1]", 1, wait(1))
    with background("train[2]", work(4, waits_for=3)) as third:
        execution.stage("train[2]", 2, wait(5))
    with background("train[3]") as fourth:
        execution.stage("train[3]", 3, wait(6))
    assert [result.value.metrics["number"] for result in (second, third, fourth)] == [2, 3, 4]
    labels = [stage.label for stage in Records(tmp_path).all()[0].stages]
    assert labels == ["train[1]", "collect[2]", "train[2]", "collect[3]", "train[3]", "collect[4]"]
    assert len({execution.background(lane) for lane in range(2)}) == 2


def test_an_early_end_stops_what_was_not_waited_for(tmp_path, execution):
    begun, never = tmp_path / "begun", tmp_path / "never"
    background = Concurrent(execution, plainly)

    def work(call):
        call("collect[3]", 3, wait(3))
        call("judge[3]", 3, wait(4, touch=str(begun), wait_for=str(never)))

    with background("train[1]", lambda call: call("collect[2]", 2, wait(2)), work):
        until(begun.exists)
    background.close()
    assert drafts(tmp_path) == []
    assert [one.name for one in tmp_path.glob("artifacts/.scratch/*/*")] == ["put-away"]
    assert [stage.label for stage in Records(tmp_path).all()[0].stages] == ["collect[2]", "collect[3]"]
    with background("train[1]", work):  # the same command goes on with it
        never.touch()
    assert {label: done.status for label, done in execution.done.items()}["judge[3]"] == "ran"


def test_work_for_a_later_round_that_fails_ends_the_run_after_the_stage(tmp_path, execution):
    background = Concurrent(execution, plainly)
    failed = tmp_path / "failed"

    def fails(call):
        try:
            call("collect[3]", 3, wait(-1))
        finally:
            failed.touch()

    def collects(number, wait_for):
        return lambda call: call(f"collect[{number}]", number, wait(number, wait_for=str(wait_for)))

    works = [collects(2, failed), fails, collects(4, tmp_path / "never")]
    with pytest.raises(EspalierError, match="ValueError: below zero"), background("train[1]", *works):
        execution.stage("train[1]", 1, wait(1, wait_for=str(failed)))
    assert [stage.label for stage in Records(tmp_path).all()[0].stages] == ["train[1]", "collect[2]"]
    assert drafts(tmp_path) == []


def test_where_the_work_fails_the_stage_is_let_end_and_the_error_is_that_of_the_work(tmp_path, execution, screen):
    gone = tmp_path / "gone"

    def work(call):
        try:
            call("collect[2]", 2, wait(-1))
        finally:
            gone.touch()

    with pytest.raises(EspalierError, match="ValueError: below zero"), Concurrent(execution, plainly)("train[1]", work):
        trained = execution.stage("train[1]", 1, wait(1, wait_for=str(gone)))
    assert Context.at(tmp_path).store.find(trained.artifact.key) is not None
    assert "background work failed; train[1] finishes first: ValueError: below zero" in screen[1].getvalue()
    assert drafts(tmp_path) == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_where_the_stage_fails_the_work_is_ended_and_puts_away_what_it_has(tmp_path, execution, error):
    begun, never = tmp_path / "begun", tmp_path / "never"

    def work(call):
        call("collect[2]", 2, wait(2))
        call("judge[2]", 2, wait(3, touch=str(begun), wait_for=str(never)))

    def stage():
        until(begun.exists)
        raise error("of the stage")

    with pytest.raises(error, match="of the stage"), Concurrent(execution, plainly)("train[1]", work):
        stage()
    assert children() == []
    assert drafts(tmp_path) == []
    assert [one.name for one in tmp_path.glob("artifacts/.scratch/*/*")] == ["put-away"]
    told = [stage.label for stage in Records(tmp_path).all()[0].stages]
    assert told == ["collect[2]"]  # what had ended is known to clean and to fork
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("beside")]


def test_work_that_hangs_is_ended_as_any_stage(tmp_path, execution):
    execution.spec = spec_of(tmp_path, compute={"stall_timeout": 1})
    words = r"collect\[2\]: no progress for 1 s.*compute.stall_timeout"
    with (
        pytest.raises(WaitTimeout, match=words),
        Concurrent(execution, plainly)(
            "train[1]", lambda call: call("collect[2]", 2, wait(2, wait_for=str(tmp_path / "never")))
        ),
    ):
        pass
    assert children() == []


# --- the real stages ------------------------------------------------------------------------------------------------

REAL = {
    "warmup": None,
    "deploy": {"mode": "none"},
    "evaluate": {"scenarios": 2},
    "filter": {"_target_": "components.filters.everything.Everything"},
    "collect": {"scenarios": 2, "group_size": 2, "overlap": 1},
    "agent": {"max_turns": 2, "max_tokens": 8},
    "algorithm": {"name": "grpo", "baseline": "none", "scale": "none"},
    "reward": {"_target_": "components.rewards.rules.outcome.Outcome", "repetition_cost": 0.5, "repetition_ngram": 1},
}


@pytest.mark.timeout(1800)
def test_played_at_the_same_time_or_one_after_the_other_the_bytes_are_the_same(tmp_path, screen):
    found = []
    real = {**REAL, "rounds": 3, "collect": {**REAL["collect"], "overlap": 2}}
    for folder, beside in ((tmp_path / "after", None), (tmp_path / "beside", Concurrent)):
        spec = spec_of(folder, **real)
        execution = Execution(spec, Context.at(folder), screen[0], None, folder / "log")
        at_once = beside(execution, plainly) if beside else None
        outcome = Run(spec, plainly(execution.stage), at_once).execute()
        execution.context.warm.close()
        execution.close()
        found.append({label: (done.artifact.key, done.artifact.digest) for label, done in execution.done.items()})
        assert outcome.rounds[1]["train"].metrics["off_policy"] == 1.0
        assert "off_policy" not in outcome.rounds[0]["train"].metrics
        assert outcome.rounds[1]["train"].metrics["correction"] > 0
    assert found[0] == found[1]
    assert list(found[0]) == list(found[1])
