"""Bisection of two runs: the cause among several changes, refusals, causes outside the settings."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.errors import SpecError
from components.specs import validate
from components.specs.code import code_digest
from components.trajectories.schema import Scenario
from flows.bisection.changes import changes_between, minimal_changes
from flows.bisection.ends import paired_effect, seeds_to_decide
from flows.bisection.step import run_step
from flows.experiment.spec import ExperimentSpec
from flows.explain.bisect import main
from flows.history.code import CodeRecords
from flows.history.records import Records
from flows.stages import STAGES
from flows.stages.base import Request
from flows.stages.code import stage_code
from flows.stages.execute import stage_and_spec
from tests.databases import give_databases
from tests.flows.pretend import pretend, spec_of
from tests.pages.test_report import episode

HIGH, LOW, MIDDLE = "+" * 36 + "-" * 4, "+" * 4 + "-" * 36, "+" * 20 + "-" * 20
NOISE = "+" * 35 + "-" * 5
LEARNING, CAUSE = {"name": "grpo", "learning_rate": 1e-4}, {"name": "grpo", "learning_rate": 1.0}
ADAPTERS = "components.environments.adapters"
COLLECT = {"scenarios": 4, "group_size": 2}


def played(outcomes):
    return {f"evaluate[{name}]": outcomes for name in ("start", "sft", "final")} | {
        "evaluate[start]": "-" * 40,
        "evaluate[sft]": "-" * 40,
    }


class Experiment:
    """An experiment whose held-out success is a function of its settings; its stages compute nothing."""

    def __init__(self, root, success):
        self.root = root
        self.success = success
        self.files = None
        """Files that the runs of the bisection write, by label."""
        self.has_code = False
        """Whether the runs of the bisection record their code, which takes seconds."""
        self.played = []
        """Overrides of the runs of the bisection."""

    def run(self, **changes):
        spec = spec_of(self.root, **changes)
        run = pretend(self.root, episodes=played(self.success(spec)), **changes)
        for stage in run.stages:  # the plan's order follows from the number of stages, not from the machine
            manifest = self.root / "artifacts" / stage.key / "manifest.json"
            manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "seconds": 1.0}))
        return run

    def step(self, data, overrides, log):
        self.played.append(list(overrides))
        changes = {name: value for name, value in data.items() if name != "root"}
        outcome = self.success(spec_of(data["root"], **changes))
        if outcome is None:
            return None, "the loss is not finite"
        run = pretend(data["root"], episodes=played(outcome), files=self.files, overrides=overrides, **changes)
        return (record_code(Path(data["root"]), run, {}) if self.has_code else run).id, ""


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    """An experiment whose success depends on the learning rate only."""
    result = Experiment(tmp_path, lambda spec: LOW if spec.algorithm.learning_rate > 0.1 else HIGH)
    monkeypatch.setattr("flows.bisection.step.run_step", result.step)
    return result


def bisect(capsys, *arguments, code=0):
    assert main([*map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def ids(experiment, good, bad):
    return good.id, bad.id, f"root={experiment.root}"


def test_the_cause_among_several_settings_is_named_with_its_effect(experiment, capsys):
    good = experiment.run(algorithm=LEARNING)
    bad = experiment.run(
        algorithm=CAUSE, collect={**COLLECT, "temperature": 0.9}, agent={"max_turns": 7}, deploy={"prompts": 9}
    )
    result = bisect(capsys, *ids(experiment, good, bad))
    assert result["verdict"] == "setting"
    assert [result["cause"][name] for name in ("key", "good", "bad")] == ["algorithm.learning_rate", 1e-4, 1.0]
    assert result["effect"] == result["difference"] == pytest.approx(-0.8)
    assert result["interval"][1] < 0
    assert [step["verdict"] for step in result["steps"]].count("reproduces") == 1
    assert result["steps"][-1]["verdict"] == "reproduces"
    assert result["shared"] == ["evaluate[start]"] or "collect[sft]" in result["shared"]
    # The cheapest change is tested first, and one of no stage is not run.
    planned = [(step["price"], step["planned_seconds"]) for step in result["steps"]]
    assert planned == sorted(planned)
    free = result["steps"][0]
    assert (free["keys"], free["verdict"], free["run"], free["effect"]) == (["deploy.prompts"], "none", None, 0.0)
    assert ["deploy.prompts=9"] not in experiment.played
    # The runs are tagged and have the change as override.
    run = next(step["run"] for step in result["steps"] if step["run"])
    labels = json.loads((experiment.root / "records" / "labels" / f"{run}.json").read_text())
    assert labels["tags"] == ["bisect"]
    assert good.short in labels["notes"][0]
    assert ["algorithm.learning_rate=1.0"] in experiment.played


def test_a_single_change_needs_no_run(experiment, capsys):
    good, bad = experiment.run(algorithm=LEARNING), experiment.run(algorithm=CAUSE)
    result = bisect(capsys, *ids(experiment, good, bad))
    assert (result["cause"]["key"], result["steps"], experiment.played) == ("algorithm.learning_rate", [], [])


def test_changes_that_only_together_have_the_effect(experiment, capsys):
    experiment.success = lambda spec: (
        LOW if spec.algorithm.learning_rate > 0.1 and spec.collect.temperature < 1 else HIGH
    )
    good = experiment.run(algorithm=LEARNING)
    bad = experiment.run(algorithm=CAUSE, collect={**COLLECT, "temperature": 0.9}, agent={"max_turns": 7})
    result = bisect(capsys, *ids(experiment, good, bad))
    assert result["verdict"] == "combination"
    causes = {change["key"] for change in result["cause"]["changes"]}
    assert causes == {"algorithm.learning_rate", "collect.temperature"}


def test_a_small_part_of_the_difference_is_not_the_cause(experiment, capsys):
    def success(spec):
        return LOW if spec.evaluate.temperature else "+" * 28 + "-" * 12 if spec.algorithm.learning_rate > 0.1 else HIGH

    experiment.success = success
    good = experiment.run(algorithm=LEARNING)
    bad = experiment.run(algorithm=CAUSE, evaluate={"temperature": 0.5})
    result = bisect(capsys, *ids(experiment, good, bad))
    assert [(step["keys"], step["verdict"]) for step in result["steps"]] == [
        (["algorithm.learning_rate"], "part"),
        (["evaluate.temperature"], "reproduces"),
    ]


def test_a_step_that_fails_reproduces_nothing(experiment, capsys):
    def success(spec):
        if spec.agent.max_turns == 7 and spec.algorithm.learning_rate < 0.1:
            return None
        return LOW if spec.algorithm.learning_rate > 0.1 else HIGH

    good = experiment.run(algorithm=LEARNING)
    bad = experiment.run(algorithm=CAUSE, agent={"max_turns": 7}, collect={**COLLECT, "temperature": 0.9})
    experiment.success = success
    result = bisect(capsys, *ids(experiment, good, bad))
    assert result["cause"]["key"] == "algorithm.learning_rate"
    problems = [step["problem"] for step in result["steps"] if step["verdict"] == "failed"]
    assert problems in ([], ["the loss is not finite"])


def test_another_algorithm_is_a_change_with_its_settings(tmp_path):
    good = spec_of(tmp_path).model_dump(mode="json", by_alias=True)
    other = spec_of(tmp_path, algorithm={"name": "dpo", "beta": 0.3}).model_dump(mode="json", by_alias=True)
    paths = [
        ("algorithm", name)
        for name in {*good["algorithm"], *other["algorithm"]}
        if good["algorithm"].get(name, "–") != other["algorithm"].get(name, "–")
    ]

    def valid(data):
        try:
            validate(ExperimentSpec, data)
        except SpecError:
            return False
        return True

    (change,) = changes_between(good, other, paths, valid)
    assert change.key == "algorithm"
    assert ("algorithm", "beta") in change.paths


def test_runs_that_cannot_be_bisected_are_refused_before_anything_runs(experiment, capsys):
    root, runs = experiment.root, {"are the same run": experiment.run(algorithm=LEARNING)}
    (first,) = runs.values()
    stopped = pretend(root, seed=1, stop_at="evaluate[final]", episodes=played(LOW))
    Records(root).write(replace(Records(root).get(stopped.id), status="RUNNING"))
    runs["is killed|expected a finished run"] = stopped
    episodes = [replace(episode(n, False), scenario=Scenario(f"x{n}", {}, "heldout")) for n in range(9)]
    runs["share no scenario"] = pretend(root, seed=2, episodes=played(LOW) | {"evaluate[final]": episodes})
    experiment.success = lambda spec: HIGH
    runs["No number of seeds decides a difference of 0"] = experiment.run(algorithm=LEARNING, seed=3)
    experiment.success = lambda spec: NOISE
    words = r"do not differ in success beyond noise: -0\.025 .* At least \d+ seeds of each"
    runs[words] = experiment.run(algorithm=LEARNING, seed=4)
    for message, second in {
        **{message: run.id for message, run in runs.items()},
        "no run 'nothing'": "nothing",
    }.items():
        assert main([first.id, second, f"root={root}"]) == 2
        error = capsys.readouterr().err
        assert re.search(message, error), error
        assert "Traceback" not in error
    assert experiment.played == []


def test_a_record_of_somebody_else_runs_nothing_of_its_own_without_trust(experiment, capsys):
    runs = experiment.run(algorithm=LEARNING), experiment.run(algorithm=CAUSE)
    record = Records(experiment.root).get(runs[1].id)
    program = {"_target_": "components.environments.adapters.mcp.Mcp", "scenarios": None, "command": ["id"]}
    for change, text in (
        ({"allow": ["planted_package"]}, "allow = planted_package runs code"),
        ({"environment": program}, "environment.command = ['id'] starts a program"),
    ):
        Records(experiment.root).write(replace(record, spec={**record.spec, **change}))
        assert main([*map(str, ids(experiment, *runs))]) == 2
        error = capsys.readouterr().err
        assert text in error
        assert "only with --trust" in error
    assert experiment.played == []


def test_the_number_of_seeds_is_that_of_the_paired_test():
    before = [episode(n, n < 30) for n in range(40)]
    after = [episode(n, n < 28 or n == 39) for n in range(40)]
    effect = paired_effect("success", before, after)
    half, quantile = NormalDist().inv_cdf(0.975), NormalDist().inv_cdf(0.8)
    gain, changed = 1 / 40, 3 / 40
    needed = (half * changed**0.5 + quantile * (changed - gain**2) ** 0.5) ** 2 / gain**2  # Connor 1987
    assert seeds_to_decide("success", effect, before, after) == -(-needed // 40)


def test_a_dry_run_plans_each_change_and_a_step_beyond_the_maximum_time_is_not_run(experiment, capsys):
    good, bad = experiment.run(algorithm=LEARNING), experiment.run(algorithm=CAUSE, agent={"max_turns": 7})
    before = sorted(experiment.root.rglob("*"))
    with pytest.raises(SystemExit):
        main([*ids(experiment, good, bad), "--max-hours", "0"])
    result = bisect(capsys, *ids(experiment, good, bad), "--dry-run")
    assert result["verdict"] == "planned"
    assert {step["keys"][0] for step in result["steps"]} == {"algorithm.learning_rate", "agent.max_turns"}
    assert all(step["stages"] > 0 and step["planned_seconds"] > 0 for step in result["steps"])
    assert experiment.played == []
    assert sorted(experiment.root.rglob("*")) == before
    result = bisect(capsys, *ids(experiment, good, bad), "--max-hours", "1e-6", code=1)
    assert (result["verdict"], result["cause"], experiment.played) == ("budget", None, [])


def test_a_higher_version_of_a_stage_is_named_as_code(experiment, capsys, monkeypatch):
    experiment.success = lambda spec: HIGH
    good = experiment.run(algorithm=LEARNING)
    old = STAGES["train"]
    monkeypatch.setitem(STAGES, "train", replace(old, version=old.version + 1))
    experiment.success = lambda spec: LOW
    bad = experiment.run(algorithm=LEARNING)
    result = bisect(capsys, *ids(experiment, good, bad))
    assert (result["verdict"], result["cause"]["version"]) == ("code", [old.version, old.version + 1])
    assert result["cause"]["stage"].startswith("train[")
    assert [step["verdict"] for step in result["steps"]] == ["reproduces"]


def test_changed_data_are_named_with_their_digests(experiment, capsys):
    path = experiment.root / "data.jsonl"
    rows = [{"prompt": f"Question {n}?", "completion": f"Answer {n}", "label": True} for n in range(4)]
    offline = {
        "flow": {"_target_": "flows.recipes.offline.offline"},
        "algorithm": {"name": "kto"},
        "warmup": None,
        "rounds": 0,
        "filter": {"_target_": "components.filters.everything.Everything"},
        "data": {"path": str(path), "form": "thumbs"},
    }

    def write(number):
        path.write_text("".join(json.dumps({**row, "completion": row["completion"] * number}) + "\n" for row in rows))

    write(1)
    experiment.success = lambda spec: HIGH
    good = experiment.run(**offline)
    write(2)
    experiment.success = lambda spec: LOW
    bad = experiment.run(**offline)
    result = bisect(capsys, "--trust", *ids(experiment, good, bad))
    assert (result["verdict"], result["cause"]["stage"]) == ("data", "import")
    (entry,) = result["cause"]["data"]
    assert entry["key"] == "content"
    assert entry["good"] != entry["bad"]


def record_code(root, run, edits):
    """Record the code of a run's stages: the present one, with these digests of modules of the rounds' trainings."""
    codes, stages = CodeRecords(root), []
    for stage in run.stages:
        modules = stage_code(*stage_and_spec(Request.from_json(stage.request)))
        modules |= edits if stage.label in ("train[1]", "train[2]") else {}
        codes.add(modules)
        stages.append(replace(stage, code=code_digest(modules)))
    run = replace(run, stages=stages)
    Records(root).write(run)
    return run


def test_edited_code_with_equal_keys_is_tested_in_a_root_of_its_own(experiment, capsys):
    """The good run's training was computed by other code; with the present code its settings give the bad result."""
    module = "components.algorithms.policy_gradient.trainer"
    experiment.has_code = True
    good = record_code(experiment.root, experiment.run(algorithm=LEARNING), {module: "0" * 16})
    experiment.success = lambda spec: LOW
    bad = record_code(experiment.root, experiment.run(algorithm=LEARNING, agent={"max_turns": 7}), {})
    experiment.files = {"train[1]": lambda folder: (folder / "weights").write_text("other")}
    result = bisect(capsys, *ids(experiment, good, bad))
    assert [step["change"] for step in result["steps"]] == ["settings of GOOD, present code and data"]
    assert result["verdict"] == "code"
    assert result["cause"]["modules"] == {"train[1]": [module], "train[2]": [module]}
    assert [path.name[:18] for path in (experiment.root / "bisect").iterdir()] == [f"{good.short}-{bad.short}-"]


def test_edited_code_without_an_effect_is_no_cause(experiment, capsys):
    experiment.has_code = True
    good = record_code(experiment.root, experiment.run(algorithm=LEARNING), {"components.errors": "0" * 16})
    bad = record_code(experiment.root, experiment.run(algorithm=CAUSE, agent={"max_turns": 7}), {})
    result = bisect(capsys, *ids(experiment, good, bad))
    assert result["steps"][0]["verdict"] == "none"
    assert result["cause"]["key"] == "algorithm.learning_rate"


@given(st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1))))
def test_the_minimal_changes_are_exactly_the_cause(case):
    count, cause = case
    tested = []

    def reproduces(changes):
        tested.append(tuple(changes))
        return cause <= set(changes)

    assert set(minimal_changes(range(count), reproduces)) == cause
    assert len(set(tested)) == len(tested)
    if len(cause) == 1:
        assert len(tested) <= max(4, 2 * count.bit_length() + 4)


def test_few_changes_are_tested_one_at_a_time_in_their_order():
    tested = []

    def reproduces(changes):
        tested.append(list(changes))
        return 2 in changes

    assert minimal_changes([0, 1, 2, 3], reproduces) == [2]
    assert tested == [[0], [1], [2]]


def test_a_real_run_finds_the_cause(tmp_path, capsys):
    """Two evaluations of a model with random weights; the price of a turn in the reward is the cause."""
    give_databases(tmp_path)
    experiment = {
        "rounds": 0,
        "warmup": None,
        "deploy": {"mode": "none"},
        "agent": {"max_turns": 1, "max_tokens": 4},
        "evaluate": {"scenarios": 2},
    }
    changes = {"reward": {"_target_": "components.rewards.rules.outcome.Outcome", "turn_cost": 0.5}}
    runs = []
    for more in ({}, {**changes, "algorithm": {"name": "grpo", "learning_rate": 0.5}}):
        spec = spec_of(tmp_path, **experiment, **more)
        run_id, problem = run_step(spec.model_dump(mode="json", by_alias=True), [], tmp_path / "log")
        assert run_id is not None, problem
        runs.append(run_id)
    record = Records(tmp_path).get(runs[0])
    assert all(len(CodeRecords(tmp_path).modules(stage.code)) > 50 for stage in record.stages)
    result = bisect(capsys, *runs, "--metric", "reward", f"root={tmp_path}")
    assert (result["verdict"], result["cause"]["key"]) == ("setting", "reward.turn_cost")
    assert result["effect"] == pytest.approx(-0.5)
