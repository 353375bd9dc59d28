"""The guard judge_drift: a real judge server over a socket is swapped in the middle of a run whose policy changes."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from components.errors import GuardTriggered
from components.trajectories.store import write_trajectories
from flows.execution.executor import Execution, FinishedStage
from flows.history.records import Records
from flows.planning.plan import plan
from flows.reporting.console_lines import round_teller
from flows.stages.anchors import anchor_label, drift_metrics, sample_anchors
from flows.stages.base import Context, Request
from tests.flows.pretend import pretend, spec_of
from tests.refusals import wrong_problems
from tests.rewards.judge_server import GOOD, Asked, Reply, by_quality, judge_server
from tests.trajectories.builders import FAILURE, episode, talk

ROUNDS, SCENARIOS, SAMPLES, ANCHORS = 5, 14, 3, 12
SWAPPED = 3
"""Round from which the other judge answers."""
QUESTIONS = SCENARIOS * ROUNDS + ANCHORS * (ROUNDS + 1)
"""Requests of the rounds: their groups, and the anchors, twice in the first round."""


def collected(number: int) -> Callable[[Path], object]:
    """Return a writer of the episodes of a round, whose policy improves from round to round."""
    episodes = [
        episode(f"s{n:02}", i, histories=[talk(f"Task {n}.", f"{number}: quality 0.{number + i}{n % 10}")])
        for n in range(SCENARIOS)
        for i in range(SAMPLES)
    ]
    return lambda folder: write_trajectories(folder / "trajectories.parquet", episodes)


class Judge:
    """Judge that is another one from the first question about the episodes of a round on."""

    def __init__(self, other: Callable[[float], float], swapped: int = SWAPPED, noise: float = 0.0):
        self.other, self.swapped, self.noise = other, swapped, noise
        self.draw = random.Random(0)
        self.latest = 0

    def __call__(self, name: str, text: str) -> float:
        written = re.search(r"(\d): quality", text)
        self.latest = max(self.latest, int(written[1]) if written else 0)
        score = by_quality(name, text) + self.draw.uniform(-self.noise, self.noise)
        return min(max(self.other(score) if self.latest >= self.swapped else score, 0.0), 1.0)


def settings(url: str, **changes):
    model = {"name": "served", "url": url, "model": "judge", "temperature": 0.0, "retry_for": 1.0}
    model["price"] = {"input": 1000.0, "output": 1000.0}
    reward = {"_target_": "components.rewards.judges.ruler.Ruler", "model": model}
    guards = {"judge_drift": "warn", "anchors": ANCHORS, **changes.pop("guards", {})}
    collect = {"scenarios": SCENARIOS, "group_size": SAMPLES}
    base = {"rounds": ROUNDS, "reward": reward, "collect": collect, "warmup": None, "guards": guards}
    return base | changes


def played(root: Path, url: str, **changes):
    files = {f"collect[{number}]": collected(number) for number in range(1, ROUNDS + 1)}
    return pretend(root, real=["judge"], files=files, **settings(url, **changes))


def strikes(run):
    return [(notice.kind, notice.step) for notice in run.notices]


def metrics_of(root: Path, run, number: int) -> dict[str, float]:
    artifact = Context.at(root).store.find(run.stage(anchor_label(number)).key)
    assert artifact is not None
    return artifact.metrics


@pytest.fixture(scope="module")
def swapped_run(tmp_path_factory):
    """A run in which the judge scores lower from round 3 on."""
    root = tmp_path_factory.mktemp("swapped")
    with judge_server(rate=Judge(lambda score: 0.6 * score)) as server:
        run = played(root, server.url)
        asked = len(server.requests)
        again = played(root, server.url)
        assert len(server.requests) == asked  # all cached
    return SimpleNamespace(root=root, run=run, again=again, asked=asked)


def test_the_alarm_comes_in_the_round_of_the_swap_and_once_also_from_the_cache(swapped_run):
    assert strikes(swapped_run.run) == [("judge_drift", SWAPPED)]
    message = swapped_run.run.notices[0].message
    assert f"on the same episodes of {ANCHORS} scenarios as at its first judgement" in message
    assert "its mean score shifted by -0." in message
    assert "limit p = 0.00083 (drift_alpha=0.01 over 12 tests)" in message
    assert strikes(swapped_run.again) == [("judge_drift", SWAPPED)]
    judged = [stage for stage in swapped_run.again.stages if stage.label.startswith("judge[")]
    assert {stage.status for stage in judged} == {"cached"}


def test_the_anchors_are_asked_again_in_each_round_in_spite_of_cached_answers(swapped_run):
    assert swapped_run.asked == QUESTIONS
    labels = [stage.label for stage in swapped_run.run.stages if "anchors" in stage.label]
    assert labels == [anchor_label(number) for number in range(ROUNDS + 1)]
    figures = [metrics_of(swapped_run.root, swapped_run.run, number) for number in range(ROUNDS + 1)]
    assert [(one["calls"], one["kept_answers"], one["scored"]) for one in figures] == [(12, 0, 36)] * (ROUNDS + 1)
    keys = [swapped_run.run.stage(label).key for label in labels]
    assert len(set(keys)) == len(keys)


def test_the_drift_is_that_of_the_same_episodes(swapped_run):
    first, last = (metrics_of(swapped_run.root, swapped_run.run, number) for number in (0, ROUNDS))
    drift = drift_metrics(last)
    assert drift_metrics(first) == drift_metrics(metrics_of(swapped_run.root, swapped_run.run, 1)) == {}
    assert drift["shift"] == pytest.approx(last["reward"] - first["reward"]) == pytest.approx(-0.4 * first["reward"])
    assert drift["shift_low"] < drift["shift"] < drift["shift_high"] < 0
    assert (drift["flips"], drift["flips_control"], drift["unscored"]) == (0.0, 0.0, 0.0)
    assert drift_metrics(metrics_of(swapped_run.root, swapped_run.run, 2))["shift"] == 0.0


def test_the_change_of_the_policy_is_told_apart(swapped_run):
    """The policy improves by 0.1 a round, and the judge takes 40 % of all scores."""
    message = swapped_run.run.notices[0].message
    numbers = re.search(
        r"changed by (\S+) since then, of which (\S+) is the judge's shift and about (\S+) the", message
    )
    assert numbers is not None
    change, shift, policy = map(float, numbers.groups())
    assert change == pytest.approx(0.6 * 0.445 - 0.245, abs=0.02)
    assert policy == pytest.approx(change - shift, abs=0.002)
    assert policy > 0.1 > change


def test_a_better_policy_alone_is_no_drift(tmp_path):
    with judge_server(rate=Judge(lambda score: score, noise=0.05)) as server:
        run = played(tmp_path, server.url)
    assert strikes(run) == []


def test_a_judge_that_reverses_the_order_strikes_by_its_flips(tmp_path):
    with judge_server(rate=Judge(lambda score: 0.5 - score, noise=0.05)) as server:
        run = played(tmp_path, server.url)
    assert strikes(run) == [("judge_drift", SWAPPED)]
    assert re.search(r"the order of \S+ of the pairs within groups changed, of \S+ at an", run.notices[0].message)


def test_rounds_that_are_collected_ahead_are_judged_with_their_anchors(tmp_path):
    collect = {"scenarios": SCENARIOS, "group_size": SAMPLES, "overlap": 1}
    with judge_server(rate=Judge(lambda score: 0.6 * score)) as server:
        run = played(tmp_path, server.url, collect=collect)
    assert strikes(run) == [("judge_drift", SWAPPED)]
    labels = [stage.label for stage in run.stages]
    assert labels.index("train[2]") < labels.index(anchor_label(3)) < labels.index("train[3]")


def test_stop_ends_the_run_before_the_training_and_warn_resumes_it(tmp_path):
    with judge_server(rate=Judge(lambda score: 0.6 * score)) as server:
        with pytest.raises(GuardTriggered, match=r"Pin the version .* guards\.judge_drift=warn resumes from here"):
            played(tmp_path, server.url, guards={"judge_drift": "stop"})
        labels = [stage.label for stage in Records(tmp_path).all()[0].stages]
        assert labels[-1] == anchor_label(SWAPPED)
        asked = len(server.requests)
        run = played(tmp_path, server.url)
        assert len(server.requests) == QUESTIONS > asked
    assert strikes(run) == [("judge_drift", SWAPPED)]


def test_another_run_with_the_same_first_round_judges_the_anchors_again_from_where_it_differs(tmp_path):
    """With other training, the episodes of round 2 are others, and so is the time at which they are judged."""
    with judge_server() as server:
        first = played(tmp_path, server.url)
        asked = len(server.requests)
        second = played(tmp_path, server.url, algorithm={"name": "grpo", "learning_rate": 1.0e-3})
    status = {stage.label: stage.status for stage in second.stages}
    assert [status[anchor_label(number)] for number in range(ROUNDS + 1)] == ["cached"] * 2 + ["ran"] * (ROUNDS - 1)
    # Answers about equal episodes of the rounds are cached.
    assert len(server.requests) - asked == ANCHORS * (ROUNDS - 1)
    assert first.stage(anchor_label(2)).key != second.stage(anchor_label(2)).key
    assert strikes(first) == strikes(second) == []
    off = played(tmp_path, server.url, guards={"judge_drift": "off"})  # adds no stage and changes no key
    keys = {stage.label: stage.key for stage in first.stages if "anchors" not in stage.label}
    assert {stage.label: stage.key for stage in off.stages} == keys
    assert {stage.status for stage in off.stages} == {"cached"}


def test_anchors_are_finished_episodes_and_the_same_each_time(tmp_path):
    path = tmp_path / "trajectories.parquet"
    episodes = [
        episode(f"s{n}", i, failure=FAILURE if (n, i) in ((1, 0), (2, 0), (2, 1)) else None)
        for n in range(6)
        for i in range(2)
    ]
    write_trajectories(path, episodes)
    chosen = sample_anchors(path, 4)
    assert sample_anchors(path, 4) == chosen
    assert all(one.failure is None for one in chosen)
    assert {one.group for one in chosen} == {"s0", "s3", "s4", "s5"}  # those with a pair to compare
    assert [one.id for one in sample_anchors(path, 100)] == [one.id for one in episodes if one.failure is None]
    smaller = {one.group for one in sample_anchors(path, 2)}
    assert smaller < {one.group for one in chosen}


def test_the_plan_lists_the_judgements_and_their_cost(swapped_run):
    spec = spec_of(swapped_run.root, **settings("http://127.0.0.1:9/v1", seed=1))
    planned = {stage.label: stage for stage in plan(spec).stages}
    assert [label for label in planned if "anchors" in label] == [anchor_label(number) for number in range(ROUNDS + 1)]
    whole, anchors = planned["judge[2]"], planned[anchor_label(2)]
    assert whole.cost is not None
    assert anchors.cost == pytest.approx(whole.cost * ANCHORS / SCENARIOS, rel=1e-3)
    stopping = spec_of(swapped_run.root, **settings("http://127.0.0.1:9/v1", seed=1, guards={"judge_drift": "stop"}))
    assert any("guards.judge_drift may end the run earlier" in note for note in plan(stopping).notes)


def test_the_drift_is_in_mlflow_and_in_the_line_of_the_round(swapped_run, screen, tmp_path):
    class Tracker:
        logged: dict[str, float] = {}
        outbox = SimpleNamespace(put=lambda write: write())

        def log_metrics(self, metrics, step):
            self.logged.update({name: value for name, value in metrics.items() if step == SWAPPED})

        def log_stage(self, *arguments):
            pass

    spec = spec_of(tmp_path, **settings("http://127.0.0.1:9/v1"))
    execution = Execution(spec, Context.at(tmp_path), screen[0], Tracker(), tmp_path / "log")
    store = Context.at(swapped_run.root).store
    artifacts = {}
    for stage in swapped_run.run.stages:
        artifact = store.find(stage.key)
        done = FinishedStage(stage.label, stage.step, artifact, "ran", 1.0, Request.from_json(stage.request), 2.0)
        if stage.step == SWAPPED and stage.label != "evaluate[final]" and stage.label != "deploy":
            execution.tell(done)
            artifacts[artifact.stage] = artifact if "anchors" not in stage.label else artifacts["judge"]
    round_teller(execution)(SWAPPED, artifacts)
    lines = screen[1].getvalue().splitlines()
    assert any(re.match(rf"round {SWAPPED}/{ROUNDS} .*judge drift -0\.\d+  flips 0\.000", line) for line in lines)
    assert any(line.startswith("judge[anchors-3] ran in 1.0 s  reward 0.") for line in lines)
    assert Tracker.logged["judge_drift/shift"] < 0
    assert {f"judge_drift/{name}" for name in ("shift_low", "flips", "unscored", "shift_p")} <= set(Tracker.logged)


REFUSED = [
    ({"rounds": 1}, "guards.judge_drift", "rounds=1 is too few"),
    ({"guards": {"anchors": 5}}, "guards.anchors", "at least 12"),
    ({"collect": {"scenarios": 4, "group_size": 2}}, "guards.judge_drift", "at least 12"),
    ({"guards": {"drift_alpha": 0}}, "guards.drift_alpha", "more than 0"),
    ({"guards": {"anchors": 0}}, "guards.anchors", "1"),
    ({"reward_model": {"algorithm": {"name": "reward_model"}}}, "guards.judge_drift", "reward models score the rounds"),
]
"""Changes, the key that is refused, and why."""


def test_what_cannot_raise_an_alarm_is_refused(tmp_path):
    url = "http://127.0.0.1:9/v1"
    assert wrong_problems(REFUSED, lambda changes: spec_of(tmp_path, **settings(url, **changes))) == []


def test_a_judge_that_no_longer_answers_all_is_reported(tmp_path):
    """From round 3 on it answers one group only."""
    judge = Judge(lambda score: score)
    mute = Reply(say="I cannot judge this.")

    def meet(asked: Asked) -> Reply:
        return mute if judge.latest >= SWAPPED and "Task 3." not in asked.prompt else GOOD

    with judge_server(meet, rate=judge) as server:
        run = played(tmp_path, server.url)
    assert strikes(run) == [("judge_drift", SWAPPED)]
    assert "the share of unscored episodes rose from 0.0% to 91.7% (p = 0.00049)" in run.notices[0].message
