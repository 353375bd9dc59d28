"""Champion decision: real registry, artifacts of simulated runs, no model."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from components.tracking.mlflow_tracker import Tracker
from components.tracking.spec import TrackingSpec
from components.trajectories.schema import Scenario, Trajectory
from flows.execution.executor import Execution
from flows.recipes.outcome import RunOutcome
from flows.release import champion
from flows.stages.base import Context
from flows.terminal.console import Console
from tests.flows.pretend import pretend, spec_of


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("champion")


@pytest.fixture
def name(request):
    """Return a separate model name for each test; the store is shared."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", request.node.name.replace("+", "p"))


def conclude(root, name, episodes, *, seed, margin=0.0, evaluated=True, **changes):
    """Register and compare a run with these final episodes; return decision, champion, tags and execution."""
    changes = {"seed": seed, "deploy": {"name": name, "margin": margin}, **changes}
    run = pretend(root, episodes={"evaluate[final]": episodes}, **changes)
    spec = spec_of(root, **changes)
    context = Context.at(root)
    artifacts = {label: context.store.find(run.stage(label).key) for label in ("train[2]", "evaluate[final]", "deploy")}
    with Tracker.open(root, TrackingSpec(), "champion") as tracker:
        execution = Execution(spec, context, Console(), tracker, root / "run.log")
        evaluations = {"final": artifacts["evaluate[final]"]} if evaluated else {}
        outcome = RunOutcome(checkpoint=artifacts["train[2]"], evaluations=evaluations)
        outcome.measured.append(SimpleNamespace(step=0))
        tags = champion.tags(execution, outcome)
        version = tracker.register_model(name, artifacts["deploy"], policy_digest="f" * 64, tags=tags)
        decision = champion.decide(execution, outcome, tracker.registry, name, version)
        now = tracker.registry.aliased(name, "champion")
        tags_of_version = tracker.client.get_model_version(name, version).tags
    return decision, now and now.number, tags_of_version, execution


def test_the_first_version_is_champion_and_stays_it_when_its_run_is_repeated(root, name):
    decision, now, tags_of_version, execution = conclude(root, name, "++--", seed=1)
    assert (decision.verdict, decision.is_champion, now) == ("first", True, "1")
    assert tags_of_version["champion.decision"] == f"{name} version 1 is champion: the first of its name"
    assert [notice.message for notice in execution.notices] == [decision.text]
    again, now, tags_of_version, _ = conclude(root, name, "++--", seed=1)
    assert (again.verdict, again.is_champion, now) == ("already", True, "1")
    assert tags_of_version["champion.verdict"] == "first"


@pytest.mark.parametrize(
    ("episodes", "margin", "verdict", "seed"),
    [
        ("+++-", 0.0, "won", 30),
        ("+++-", 0.25, "won", 31),
        ("+++-", 0.3, "lost", 32),
        ("++--", 0.0, "lost", 33),
    ],
)
def test_the_champion_has_to_be_beaten_by_the_margin_on_the_same_scenarios(root, name, episodes, margin, verdict, seed):
    conclude(root, name, "++--", seed=2)
    decision, now, tags_of_version, _ = conclude(root, name, episodes, seed=seed, margin=margin)
    assert (decision.verdict, now) == (verdict, "2" if verdict == "won" else "1")
    assert (decision.success, decision.champion_success, decision.scenarios) == (episodes.count("+") / 4, 0.5, 4)
    assert tags_of_version["champion.verdict"] == verdict
    assert float(tags_of_version["champion.difference"]) == pytest.approx(episodes.count("+") / 4 - 0.5)
    assert f"on the same 4 scenarios; it had to be better {f'by {margin:g}' if margin else 'at all'}" in decision.text


def test_a_champion_that_was_asked_something_else_is_evaluated_again(root, name, monkeypatch):
    conclude(root, name, "++++", seed=4)
    execution = conclude(root, name, "++--", seed=5)[3]
    other = execution.context.store.find(
        pretend(root, seed=6, episodes={"evaluate[final]": "+---"}).stage("evaluate[final]").key
    )
    asked = []

    def stage(self, label, step, request):
        asked.append((label, request))
        return SimpleNamespace(artifact=other)

    monkeypatch.setattr(Execution, "stage", stage)
    decided, now, _, _ = conclude(root, name, "++--", seed=7, evaluate={"scenarios": 4})
    [(label, request)] = asked
    assert label == "evaluate[champion]"
    assert request.spec["evaluate"]["scenarios"] == 4
    assert request.inputs["policy"] == pretend(root, seed=4, deploy={"name": name}).stage("train[2]").key
    assert (decided.verdict, decided.champion_success, now) == ("won", 0.25, "3")


def test_a_champion_that_cannot_be_asked_the_same_stays(root, name):
    conclude(root, name, "+---", seed=8)
    run = pretend(root, seed=8, deploy={"name": name})
    store = Context.at(root).store
    folder = store.path(run.stage("train[2]").key)
    folder.rename(folder.with_name("away"))
    decision, now, tags_of_version, _ = conclude(root, name, "++++", seed=9, evaluate={"scenarios": 4})
    folder.with_name("away").rename(folder)
    assert (decision.verdict, decision.is_champion, now) == ("refused", False, "1")
    assert "version 1 was evaluated on other scenarios, and its checkpoint" in tags_of_version["champion.decision"]
    assert tags_of_version["champion.decision"].endswith("version 1 stays")


def test_a_champion_that_somebody_else_registered_stays(root, name):
    with Tracker.open(root, TrackingSpec(), "champion") as tracker:
        tracker.client.create_registered_model(name)
        tracker.client.create_model_version(name, (root / "somewhere").as_uri())
        tracker.registry.alias(name, "champion", "1")
    decision, now, _, _ = conclude(root, name, "++++", seed=10)
    assert (decision.verdict, now) == ("refused", "1")
    assert "was not registered by a run" in decision.text


def test_a_version_without_an_evaluation_never_becomes_champion(root, name):
    decision, now, _, _ = conclude(root, name, "++++", seed=13, evaluated=False)
    assert (decision.verdict, now) == ("refused", None)
    assert (
        decision.text == f"{name} version 1 is not champion: its run evaluates it in no environment (environment=none)"
    )
    assert conclude(root, name, "+---", seed=14)[0].verdict == "first"
    decision, now, tags_of_version, _ = conclude(root, name, "++++", seed=15, evaluated=False)
    assert (decision.verdict, now) == ("refused", "2")
    assert tags_of_version["champion.decision"].endswith("version 2 stays")


def test_versions_without_a_stated_success_are_no_comparison(root, name):
    silent = [Trajectory("a", Scenario("a", {}, "heldout"), 0, [], metrics={"turns": 1.0}, outcome={"success": None})]
    conclude(root, name, silent, seed=16)
    decision, now, _, _ = conclude(root, name, silent, seed=17)
    assert (decision.verdict, now) == ("refused", "1")
    assert "no episode of an evaluation states its success" in decision.text


def test_scenarios_that_nobody_shares_are_no_comparison(root, name):
    others = [Trajectory("other", Scenario("other", {}, "heldout"), 0, [], outcome={"success": True})]
    conclude(root, name, others, seed=11)
    decision, now, _, _ = conclude(root, name, "++", seed=12)
    assert (decision.verdict, now) == ("refused", "1")
    assert "share no finished scenario" in decision.text
