"""Evaluations that stop when they are decided: what they play, what they depend on, and what is compared with them."""

from __future__ import annotations

import hashlib
import json
import re
from functools import partial

import pytest

from components.errors import ResourceError, SpecError
from components.evaluation.metrics import summarise
from components.evaluation.sequential import paired_sequence
from components.evaluation.spec import EvaluateSpec
from components.trajectories.schema import Trajectory
from components.trajectories.store import read_trajectories
from flows.bisection.ends import read_ends
from flows.experiment.compose import compose
from flows.experiment.requests import Requests
from flows.plan import main as plan_main
from flows.reporting.comparison import compare
from flows.stages.base import Context
from flows.stages.execute import request_key, run_stage
from tests.flows import pretend as pretended
from tests.flows.pretend import pretend, write_evaluation
from tests.flows.test_compare import played
from tests.flows.test_online_rl import Recorder
from tests.refusals import wrong_refusals

LINE = ["+experiment=smoke", "environment=tictactoe", "evaluate.scenarios=48", "environment.heldout=64"]
STOPS = ["evaluate.stop=decided", "evaluate.batch=8"]


def test_only_evaluations_of_the_rounds_stop_and_depend_on_the_start_of_the_rounds(tmp_path):
    whole = Recorder(tmp_path, evaluate={"every": 1})
    stops = Recorder(tmp_path, evaluate={"every": 1, "stop": "decided", "batch": 2})
    reference = stops.keys["evaluate[sft]"]
    before = [label for label in whole.keys if label not in ("evaluate[1]", "evaluate[final]", "deploy")]
    assert {label: stops.keys[label] for label in before} == {label: whole.keys[label] for label in before}
    for label in ("evaluate[1]", "evaluate[final]"):
        assert stops.requests[label].inputs["reference"] == reference
        assert stops.keys[label] != whole.keys[label]
    assert all("reference" not in request.inputs for label, request in whole.requests.items() if "evaluate" in label)
    assert "reference" not in stops.requests["evaluate[sft]"].inputs


def test_without_the_option_the_key_has_none_of_its_settings():
    assert EvaluateSpec().key_part() == {
        "split": "heldout", "scenarios": None, "temperature": 0.0, "max_failures": 0.1,
    }  # fmt: skip
    decided = EvaluateSpec(stop="decided").key_part()
    assert {name: decided[name] for name in ("stop", "alpha", "batch")} == {
        "stop": "decided", "alpha": 0.05, "batch": 32,
    }  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a context, and the evaluation of random actions on all scenarios."""
    context = Context.at(tmp_path_factory.mktemp("root"))
    evaluation, _ = run_stage(Requests(compose(LINE)).evaluate(None, actor="random"), context)
    return context, evaluation


def reference_of(context, name: str, episodes: list[Trajectory]):
    with context.store.draft(name, stage="evaluate", kind="evaluation", schema_version=1, inputs={}) as draft:
        write_evaluation(draft.path, episodes)
    return context.store.find(name)


def test_a_decided_evaluation_plays_batches_in_an_order_of_its_own(whole):
    context, evaluation = whole
    episodes = list(read_trajectories(evaluation.path / "trajectories.parquet"))
    for episode in episodes:
        episode.outcome = {"success": True}
    reference = reference_of(context, "solved", episodes)
    request = Requests(compose([*LINE, *STOPS])).evaluate(None, actor="random", reference=reference)
    ended, status = run_stage(request, context)
    assert status == "ran"
    summary = json.loads((ended.path / "summary.json").read_text())
    sequence = summary["sequence"]
    assert (sequence["decided"], sequence["planned"], sequence["alpha"]) == (True, 48, 0.05)
    assert sequence["high"] < 0
    assert sequence["scenarios"] % 8 == 0
    assert 8 <= sequence["scenarios"] < 48
    assert ended.metrics["episodes"] == sequence["scenarios"] == sequence["n"]
    assert ended.metrics["not_played"] == 48 - sequence["scenarios"]
    assert ended.metrics["decided"] == 1
    names = [episode.group for episode in episodes]
    order = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    ours = list(read_trajectories(ended.path / "trajectories.parquet"))
    assert {episode.group for episode in ours} == set(order[: sequence["scenarios"]])
    assert [episode.group for episode in ours] == [name for name in names if name in {e.group for e in ours}]
    changes = [episode.success - 1.0 for episode in ours]
    assert (sequence["low"], sequence["high"]) == pytest.approx(paired_sequence(changes, 0.05))
    earlier = [episode.success - 1.0 for episode in ours if episode.group in order[: sequence["scenarios"] - 8]]
    assert paired_sequence(earlier, 0.05)[1] >= 0


def test_an_undecided_evaluation_plays_the_episodes_of_a_whole_one_and_depends_on_its_reference(whole):
    context, evaluation = whole
    request = Requests(compose([*LINE, *STOPS])).evaluate(None, actor="random", reference=evaluation)
    same, _ = run_stage(request, context)
    name = "trajectories.parquet"
    assert (same.path / name).read_bytes() == (evaluation.path / name).read_bytes()
    sequence = json.loads((same.path / "summary.json").read_text())["sequence"]
    assert (sequence["decided"], sequence["scenarios"], sequence["difference"]) == (False, 48, 0.0)
    assert same.metrics["not_played"] == 0
    other = reference_of(context, "other", played({1, 2}))
    requests = Requests(compose([*LINE, *STOPS]))
    keys = {request_key(requests.evaluate(None, reference=each), context) for each in (None, evaluation, other)}
    assert len(keys) == 3
    request = requests.evaluate(None, actor="random")
    request.spec["evaluate"]["stop"] = "decided"
    with pytest.raises(SpecError, match=r"no input `reference`"):
        run_stage(request, context)


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """Return the root, and two runs whose evaluations may stop, the second after 12 of 16 scenarios."""
    sequence = {"alpha": 0.05, "scenarios": 12, "planned": 16, "decided": True}
    monkeypatch.setattr(
        pretended, "summarise", lambda episodes: partial(summarise, alpha=0.05)(episodes) | {"sequence": sequence}
    )
    settings = {"evaluate": {"stop": "decided", "batch": 2}}
    first = pretend(tmp_path, episodes={"evaluate[final]": played({0}, 16)}, **settings)
    second = pretend(tmp_path, seed=1, episodes={"evaluate[final]": played(set(range(12)), 12)}, **settings)
    return tmp_path, first, second


def test_a_comparison_uses_the_sequence_and_a_verdict_over_seeds_is_refused(stopped):
    root, first, second = stopped
    comparison = compare(root, [first.id, second.id])
    (against,) = comparison.against
    assert against.difference
    assert (against.difference["n"], against.difference["method"]) == (12, "sequence")
    assert against.difference["low"] == paired_sequence([0.0, *[1.0] * 11], 0.05)[0]
    assert "B decided after 12 of 16 scenarios (confidence sequence, level 0.95)" in against.notes
    assert "4 scenarios played only by A" in against.notes
    (verdict,) = comparison.verdicts
    assert verdict.verdict == "better"
    assert "confidence sequence" in verdict.method
    others = [
        pretend(
            root,
            seed=seed,
            algorithm={"name": "grpo", "learning_rate": 5e-4},
            evaluate={"stop": "decided", "batch": 2},
            episodes={"evaluate[final]": played({1}, 16)},
        )
        for seed in (0, 1)
    ]
    comparison = compare(root, [first.id, second.id, *(run.id for run in others)])
    (verdict,) = comparison.verdicts
    assert verdict.verdict is None
    assert "run its command with evaluate.stop=never" in verdict.advice
    with pytest.raises(ResourceError, match=r"evaluate\.stop=decided, so its last evaluation has no fixed number"):
        read_ends(root, first.id, second.id, "success")


REFUSED = [
    (["deploy.policy=best", "evaluate.every=1"], "decided: deploy.policy=best compares the success of evaluations"),
    (["+early_stopping={patience: 1}", "evaluate.every=1"], "decided: early_stopping compares the success"),
    (
        ["evaluate.stop=never", "evaluate.batch=8"],
        "evaluate.batch: 8: only evaluations that stop early use it",
    ),
    (["evaluate.alpha=0.5"], "expected less than 0.5"),
]


def test_settings_that_do_not_fit_are_refused():
    cases = [(lines, re.escape(text)) for lines, text in REFUSED]
    assert wrong_refusals(cases, lambda lines: compose(["+experiment=smoke", "evaluate.stop=decided", *lines])) == []


def test_the_plan_says_that_it_is_an_upper_bound_and_predicts_the_sequence(tmp_path, capsys):
    def planned(*lines):
        assert plan_main([*LINE, f"root={tmp_path}", "--success", "0.3", "--json", *lines]) == 0
        return json.loads(capsys.readouterr().out)

    fixed, stops = planned(), planned(*STOPS)
    assert any("evaluate.stop=decided" in note for note in stops["notes"])
    assert not any("evaluate.stop" in note for note in fixed["notes"])
    assert stops["power"]["detectable_gain"] > fixed["power"]["detectable_gain"]
