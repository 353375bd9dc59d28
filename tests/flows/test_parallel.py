"""Independent branches of a recipe: what runs at the same time, in which order it is reported, and how it ends."""

from __future__ import annotations

import threading
import time

import pytest

from components.compute.runners import ProcessRunner, StageProcess
from components.errors import BudgetReached, EspalierError, SpecError
from flows.execution.executor import Execution
from flows.execution.parallel import at_once, in_turn, overlaps
from flows.experiment.sections import BudgetSpec
from flows.history.lineage_graph import Lineage
from flows.history.records import Records, RunRecord, recording
from flows.planning.budget import RunBudget
from flows.planning.earlier_stages import SimilarStage
from flows.planning.plan import plan
from flows.planning.run_plan import PlannedStage, RunPlan
from flows.recipes.outcome import RunOutcome
from flows.recipes.run import Run
from flows.stages import STAGES
from flows.stages.base import Context, Request
from tests.flows import waiting
from tests.flows.pretend import pretend, spec_of
from tests.flows.test_online_rl import Recorder
from tests.flows.test_overlap import children, drafts, plainly, wait
from tests.flows.waiting import until
from tests.refusals import wrong_refusals

PARALLEL = {"default": "process", "parallel": 2, "stall_timeout": 60}
REWARD = {"algorithm": {"name": "reward_model"}, "models": 3, "scenarios": 4}


@pytest.fixture
def execution(tmp_path, screen, monkeypatch, unhurried):
    """Execution of stages `wait`, each in a process of its own."""
    monkeypatch.setitem(STAGES, "wait", waiting.STAGE)
    execution = Execution(
        spec_of(tmp_path, compute=PARALLEL), Context.at(tmp_path), screen[0], None, tmp_path / "logs" / "log"
    )
    process = StageProcess(tmp_path, tmp_path / "stages.log")
    for name in ("process", "process-2"):
        execution._runners[name] = ProcessRunner(process, waiting.COMMAND)
    with recording(tmp_path, RunRecord("abcdef01", "test", 0, time.time())) as writer:
        execution.record, execution.lineage = writer, Lineage(tmp_path)
        yield execution
    execution.close()


def branch(number, **options):
    return lambda call: call(f"collect[{number}]", 1, wait(number, **options))


def recorded(tmp_path):
    return Records(tmp_path).all()[0].stages


def test_branches_run_at_the_same_time_and_are_reported_in_their_order(tmp_path, execution):
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    artifacts = at_once(execution, plainly)(
        [branch(1, touch=first, wait_for=second), branch(2, touch=second, wait_for=first), branch(3)]
    )
    assert [artifact.metrics["number"] for artifact in artifacts] == [1, 2, 3]
    assert [stage.label for stage in recorded(tmp_path)] == ["collect[1]", "collect[2]", "collect[3]"]
    overlapped = [stage.overlapped_seconds for stage in recorded(tmp_path)]
    assert overlapped[0] == 0
    assert 0 < overlapped[1] <= recorded(tmp_path)[1].seconds


def test_digests_and_records_are_those_of_one_after_the_other(tmp_path, execution):
    branches = [branch(number) for number in (1, 2, 3)]
    parallel = at_once(execution, plainly)(branches)
    order = [(stage.label, stage.key, stage.digest) for stage in recorded(tmp_path)]
    execution.close()
    execution._runners = {}
    execution.context = Context.at(tmp_path / "other")
    execution.spec = spec_of(tmp_path / "other", compute={"default": "local"})
    sequential = at_once(execution, plainly)(branches)
    assert [(artifact.key, artifact.digest) for artifact in parallel] == [
        (artifact.key, artifact.digest) for artifact in sequential
    ]
    assert {done.status for done in execution.done.values()} == {"ran"}
    assert order == [(label, done.artifact.key, done.artifact.digest) for label, done in execution.done.items()]


def test_stages_of_the_place_local_run_one_after_the_other_in_the_main_thread(tmp_path, execution, monkeypatch):
    execution.spec = spec_of(tmp_path, compute={"default": "local"})
    execution.spec.compute.__dict__["parallel"] = 2
    threads = []
    make = execution.make
    monkeypatch.setattr(execution, "make", lambda *stage: threads.append(threading.current_thread()) or make(*stage))
    at_once(execution, plainly)([branch(number) for number in (1, 2, 3)])
    assert threads == [threading.main_thread()] * 3


def test_a_failed_branch_stops_the_others_and_its_error_is_raised(tmp_path, execution):
    begun, never = tmp_path / "begun", tmp_path / "never"
    branches = [
        branch(1, touch=str(begun), wait_for=str(never)),
        lambda call: (branch(2)(call), branch(-1, wait_for=str(begun))(call)),
        branch(3),
    ]
    with pytest.raises(EspalierError, match="ValueError: below zero"):
        at_once(execution, plainly)(branches)
    assert [stage.label for stage in recorded(tmp_path)] == ["collect[2]"]
    assert_ended(tmp_path)


def test_an_interruption_stops_all_branches(tmp_path, execution, monkeypatch):
    begun, never = tmp_path / "begun", tmp_path / "never"
    local = execution.spec.compute.model_copy(update={"stages": {"train": "local"}})
    execution.spec = execution.spec.model_copy(update={"compute": local})

    def interrupted(label, step, request, beside=None):
        if beside is not None:
            return make(label, step, request, beside)
        until(begun.exists)
        raise KeyboardInterrupt

    make = execution.make
    monkeypatch.setattr(execution, "make", interrupted)
    branches = [
        branch(1, touch=str(begun), wait_for=str(never)),
        lambda call: call("train[1]", 1, Request("train", {})),
    ]
    with pytest.raises(KeyboardInterrupt):
        at_once(execution, plainly)(branches)
    assert_ended(tmp_path)


def assert_ended(tmp_path):
    assert children() == []
    assert drafts(tmp_path) == []
    assert [path.name for path in tmp_path.glob("artifacts/.scratch/*/*")] == ["put-away"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("branch")]


def test_the_seconds_that_earlier_spans_cover():
    assert overlaps([(0, 4), (1, 3), (3, 6), (5, 9), (10, 11)]) == [0, 2, 1, 1, 0]


def test_an_ensemble_has_the_same_stages_in_the_same_order(tmp_path):
    assert list(Recorder(tmp_path, reward_model=REWARD).keys.values()) == list(
        Recorder(tmp_path, reward_model=REWARD, compute=PARALLEL).keys.values()
    )


def test_a_plan_counts_trainings_at_the_same_time_once(tmp_path, monkeypatch):
    pretend(tmp_path, reward_model=REWARD)
    monkeypatch.setattr(SimilarStage, "seconds_for", lambda similar, request: 10)
    changes = {"reward_model": REWARD, "seed": 1}
    sequential = plan(spec_of(tmp_path, **changes, compute={"default": "process", "price": 3600}))
    parallel = plan(spec_of(tmp_path, **changes, compute={**PARALLEL, "price": 3600}))
    assert sequential.seconds - parallel.seconds == 10  # three trainings in two lanes
    assert sequential.cost - parallel.cost == 10
    assert {stage.label: stage.beside for stage in parallel.stages if stage.beside} == {
        "train[reward 2]": "train[reward]"
    }


REFUSED = [
    ({"parallel": 2}, "compute.parallel: 2: stages in the process of the flow run one after the other"),
    ({"parallel": 0}, "compute.parallel: 0"),
    (
        {"parallel": 2, "default": "sky", "places": {"sky": {"name": "sky", "cluster": "mine"}}},
        "compute.places.sky.cluster: 'mine': 2 stages at the same time need one machine each",
    ),
]


def test_a_limit_that_no_place_can_use_is_refused(tmp_path):
    shared = {"store": "s3://bucket/prefix"}
    assert wrong_refusals(REFUSED, lambda compute: spec_of(tmp_path, compute=compute, **shared)) == []


def test_a_recipe_collects_in_several_environments(tmp_path):
    recorder = Recorder(tmp_path)
    run = Run(spec_of(tmp_path), recorder)
    policy = run.policy
    levels = run.parallel(
        lambda run, name: run.judge(run.using(environment=run.spec.environment).collect(policy, name)), ["easy", "hard"]
    )
    assert [episodes.name for episodes in levels] == ["easy", "hard"]
    with pytest.raises(SpecError, match=r"inside run.parallel"):
        run.parallel(lambda run, name: run.evaluate(policy, name), ["first", "second"])


def test_in_turn_each_branch_ends_before_the_next():
    calls = []
    in_turn(lambda *stage: calls.append(stage))([lambda call: call(1), lambda call: call(2)])
    assert calls == [(1,), (2,)]


def test_a_stage_beyond_the_budget_does_not_start_and_those_beside_it_finish(tmp_path, execution):
    started, release = tmp_path / "started", tmp_path / "release"
    stages = [PlannedStage(f"collect[{n}]", 0, "wait", 1, {}, "run", [], "process", 1.0, 3.0, None) for n in (1, 2, 3)]
    settings = execution.spec.model_copy(update={"budget": BudgetSpec(cost=5)})
    budget = RunBudget(settings, RunPlan("test", "root", stages))
    first = branch(1, touch=str(started), wait_for=str(release))

    def second(call):
        until(started.exists)
        try:
            return branch(2)(call)
        finally:
            release.touch()

    guarded = budget.guard_branches(at_once(execution, plainly), execution, RunOutcome)
    with pytest.raises(BudgetReached, match=r"before collect\[2\].*with the estimates of collect\[1\]: cost 3\.00"):
        guarded([first, second, branch(3)])
    assert [stage.label for stage in recorded(tmp_path)] == ["collect[1]"]
    assert execution.unreported == {}
