"""Budget of a run: refused at the start, stopped at a stage's border, and what is counted as spent."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from components.errors import BudgetReached, SpecError
from flows.execution.parallel import in_turn
from flows.experiment.compose import compose
from flows.experiment.requests import Requests
from flows.history.records import Records, RunRecord, StageRecord
from flows.planning import budget as budgets
from flows.planning.budget import Amount, RunBudget, earlier_attempts, sufficiency
from flows.planning.run_plan import PlannedStage, RunPlan
from flows.recipes.outcome import RunOutcome
from tests.flows.pretend import spec_of

KEY = "0" * 64


def planned(label, seconds=None, cost=None, status="run", beside=None):
    stage = label.partition("[")[0]
    return PlannedStage(label, 0, stage, 1, {}, status, [], "local", seconds, cost, None, beside)


def spec(root, **budget):
    return spec_of(root, compute={"price": 3.6}, budget=budget)


def plan(*stages):
    return RunPlan("smoke", "root", list(stages))


class Stages:
    """Execution whose stages take a fixed time; `call` runs one."""

    def __init__(self, seconds=10.0, cost=1.0):
        self.seconds, self.cost = seconds, cost
        self.done, self.notices, self.shown = {}, [], []
        self.unreported = {}
        self.tracker = self.record = self.context = None

    def call(self, label, step, request):
        self.done[label] = SimpleNamespace(
            label=label, step=step, status="ran", cost=self.cost, seconds=self.seconds, waited=self.seconds
        )
        return label

    def notice(self, notice):
        self.notices.append(notice)

    def limited(self, budget):
        return budget.guard(self.call, self, RunOutcome, self.shown.append)


@pytest.fixture
def uncached(monkeypatch):
    monkeypatch.setattr(budgets, "find_stage", lambda request, context: None)


def request(label):
    return SimpleNamespace(stage=label.partition("[")[0])


def test_a_first_stage_beyond_the_budget_is_refused(tmp_path):
    stages = plan(planned("collect[1]", 0.0, 0.0, "cached"), planned("train[1]", 7200.0, 7.2))
    with pytest.raises(SpecError, match=r"budget\.cost: 5: train\[1\] is expected to take cost 7\.20"):
        RunBudget(spec(tmp_path, cost=5), stages).refuse_first()
    with pytest.raises(SpecError, match=r"budget\.hours: 1: train"):
        RunBudget(spec(tmp_path, hours=1), stages).refuse_first()
    RunBudget(spec(tmp_path, cost=8, hours=3), stages).refuse_first()


def test_the_run_ends_before_the_stage_that_would_exceed_the_budget(tmp_path, uncached):
    """Stages that ran cost more than planned, so the run uses their median."""
    stages = plan(*(planned(f"collect[{number}]", 1.0, 0.1) for number in range(1, 8)))
    execution = Stages()
    call = execution.limited(RunBudget(spec(tmp_path, cost=5), stages))
    for number in range(1, 6):
        call(f"collect[{number}]", number, request("collect"))
    with pytest.raises(BudgetReached) as stop:
        call("collect[6]", 6, request("collect"))
    assert len(execution.done) == 5
    assert "budget.cost=5 ends the run before collect[6]" in str(stop.value)
    assert "2 stages remain (collect[6], collect[7]): cost 2.00, 20 s" in str(stop.value)
    assert [notice.message for notice in execution.notices] == ["budget: cost 4.00 of 5 (80%)"]
    assert execution.shown[-1] == "budget: cost 5.00 of 5 (100%)"


def test_background_stages_count_with_the_stage_beside_them(tmp_path, uncached):
    beside = planned("collect[2]", 40.0, 0.0, beside="train[1]")
    execution = Stages(seconds=10.0)
    call = execution.limited(RunBudget(spec(tmp_path, hours=0.01), plan(planned("train[1]", 1.0, 0), beside)))
    with pytest.raises(BudgetReached, match=r"before train\[1\], whose estimate is cost 0\.00, 41 s"):
        call("train[1]", 1, request("train"))


def test_cached_stages_and_stages_without_an_estimate_may_start(tmp_path, monkeypatch):
    execution = Stages(cost=9.0)
    monkeypatch.setattr(budgets, "find_stage", lambda request, context: None if request.stage == "judge" else "cached")
    call = execution.limited(RunBudget(spec(tmp_path, cost=1), plan()))
    call("judge[1]", 1, request("judge"))
    call("train[1]", 1, request("train"))
    assert list(execution.done) == ["judge[1]", "train[1]"]


def test_each_stage_of_a_branch_is_checked_with_those_that_run_beside_it(tmp_path, uncached):
    """In turn, branches are checked one after the other; a stage that has finished counts with what it took."""
    stages = plan(*(planned(f"{kind}[{name}]", 10.0, 2.0) for kind in ("collect", "judge") for name in "ab"))
    execution = Stages(cost=2.5)
    budget = RunBudget(spec(tmp_path, cost=9), stages)

    def branch(name):
        return lambda call: [call(f"{kind}[{name}]", 1, request(kind)) for kind in ("collect", "judge")]

    run = budget.guard_branches(in_turn(execution.call), execution, RunOutcome, execution.shown.append)
    with pytest.raises(BudgetReached, match=r"before judge\[b\], whose estimate is cost 2\.50, .*spent: cost 7\.50"):
        run([branch("a"), branch("b")])
    assert list(execution.done) == ["collect[a]", "judge[a]", "collect[b]"]
    larger = RunBudget(spec(tmp_path, cost=13), stages)
    run = larger.guard_branches(in_turn(execution.call), execution, RunOutcome, execution.shown.append)
    assert run([branch("b")]) == [["collect[b]", "judge[b]"]]
    assert execution.shown == ["budget: cost 10.00 of 13 (77%)"]


def test_time_at_which_stages_run_beside_each_other_counts_once(tmp_path):
    execution = Stages()
    execution.unreported = {"a[1]": SimpleNamespace(label="a[1]", status="ran", cost=1.0, seconds=10.0, ended=110.0)}
    running = {
        "a[1]": (100.0, Amount(5.0, 50.0)),
        "b[1]": (105.0, Amount(2.0, 10.0)),
        "c[1]": (106.0, Amount(None, None)),
    }
    committed = RunBudget(spec(tmp_path, cost=9), plan())._committed(execution, running)
    assert committed == Amount(3.0, 15.0)  # from 100 to 115; what has finished counts with what it took


def attempt(settings, name, status, started, *stages):
    run = RunRecord(
        name * 32, settings.name, settings.seed, started, status, spec=settings.model_dump(mode="json", by_alias=True)
    )
    for label, state in stages:
        request = {"stage": label, "seed": 0, "spec": {}, "inputs": {}}
        run.stages.append(StageRecord(label, 1, request, 1, KEY, KEY, "kind", state, 100.0, 2.0))
    Records(settings.root).write(run)


def test_spent_are_the_executed_stages_of_unfinished_attempts_since_the_last_finished_run(tmp_path):
    small, large = spec(tmp_path, cost=3), spec(tmp_path, cost=7)
    now = time.time()
    attempt(small, "a", "FAILED", now - 40, ("collect", "ran"))
    attempt(small, "b", "FINISHED", now - 30, ("collect", "ran"))
    attempt(small, "c", "FAILED", now - 20, ("collect", "ran"), ("judge", "cached"))
    attempt(spec_of(tmp_path, rounds=9), "d", "FAILED", now - 10, ("collect", "ran"))
    assert [run.id[0] for run in earlier_attempts(large)] == ["c"]
    notes = list(sufficiency(large, plan(planned("train[1]", 10.0, 4.0), planned("train[2]", 10.0, 4.0))))
    assert notes == [
        "budget.cost=7 does not suffice: 10.00 expected, of which earlier attempts spent 2.00; the run ends before "
        "train[2]"
    ]


def test_the_plan_says_whether_the_budget_suffices(tmp_path):
    notes = list(sufficiency(spec(tmp_path, cost=1, hours=2), plan(planned("train[1]", 3600.0, None))))
    assert notes == [
        "budget.cost=1: unknown whether it suffices, since estimates are missing; the run watches it",
        "budget.hours=2 suffices: at most 1.00 expected",
    ]


def test_a_limited_cost_without_any_price_is_refused():
    with pytest.raises(SpecError, match=r"budget\.cost: 5, but nothing has a price; set .*compute\.price"):
        compose(["+experiment=smoke", "budget.cost=5"])


def test_the_budget_is_in_no_stage_key(tmp_path):
    first, second = (Requests(spec(tmp_path, **budget)).collect(None, 1) for budget in ({}, {"cost": 5}))
    assert first == second
