"""Sweeps: outcomes of points, summary, and search with Optuna. The runs are simulated."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from components.errors import EnvironmentFailed, ResourceError
from flows.experiment.compose import compose_points
from flows.run import main
from flows.sweeps.points import Point, attempt, read
from flows.sweeps.summary import Summary
from tests.refusals import wrong_refusals

OPTUNA = ["hydra/sweeper=optuna", "hydra.sweeper.startup_trials=2"]


class Runs:
    """Replacement for `flows.session.run`. Maps a learning rate to the run's success or exception."""

    def __init__(self):
        self.done: list[tuple[float, str]] = []
        self.verdicts: dict[float, list[str | None]] = {}
        self.does = lambda rate: 0.5
        self.course = lambda rate: {}

    def __call__(self, spec, *, overrides, sweep=None, prune=None):
        from flows.experiment.early_stopping import EvaluatedPolicy

        rate = spec.algorithm.learning_rate
        self.done.append((rate, sweep))
        for step, value in self.course(rate).items():
            verdict = prune(EvaluatedPolicy(step, None, type("Evaluation", (), {"metrics": {"success": value}})))
            self.verdicts.setdefault(rate, []).append(verdict)
            if verdict is not None:
                return {"success": value, "reward": 0.0, "pruned": verdict}
        value = self.does(rate)
        if isinstance(value, BaseException):
            raise value
        return {"success": value, "reward": 1.0, "pruned": None}

    @property
    def rates(self) -> list[float]:
        return [rate for rate, _ in self.done]


@pytest.fixture
def runs(monkeypatch):
    runs = Runs()
    monkeypatch.setattr("flows.session.run", runs)
    return runs


@pytest.fixture
def sweep(tmp_path, answered):
    """Return a function that runs the command and returns the exit code and its standard error."""

    def run(*arguments: str) -> tuple[object, str]:
        code, _, said = answered(*arguments, "+experiment=smoke", f"root={tmp_path}")
        return code, said

    return run


def notes(root) -> list[Point]:
    (folder,) = (root / "sweeps").iterdir()
    return read(folder)


# --- points ---------------------------------------------------------------------------------------------------------


def test_a_point_that_fails_does_not_end_the_others_and_can_be_run_alone(runs, sweep, tmp_path):
    runs.does = lambda rate: {1e-4: 0.5, 2e-4: EnvironmentFailed("it broke"), 3e-4: RuntimeError("a bug"), 4e-4: 0.7}[
        rate
    ]
    code, output = sweep("-m", "algorithm.learning_rate=1e-4,2e-4,3e-4,4e-4", "hydra.sweeper.max_batch_size=1")
    assert code == 1
    assert runs.rates == [1e-4, 2e-4, 3e-4, 4e-4]
    assert [point.status for point in notes(tmp_path)] == ["finished", "failed", "failed", "finished"]
    assert "point 1 failed: EnvironmentFailed: it broke" in output
    assert "point 2 failed: RuntimeError: a bug (tests/flows/test_sweeps.py" in output
    assert re.search(r"4 points: 2 finished, 2 failed", output)
    (again,) = re.findall(r"point 1 failed: .*\n  run it alone: python -m flows.run (.*)", output)
    runs.does = lambda rate: 0.6
    main(shlex.split(again))
    assert runs.done[-1] == (2e-4, None)


def test_what_failed_decides_the_exit_code(runs, sweep):
    runs.does = lambda rate: ResourceError("no weights")
    code, output = sweep("-m", "algorithm.learning_rate=1e-4,2e-4")
    assert (code, output.count("Traceback")) == (2, 0)
    assert len(runs.done) == 2
    runs.does = lambda rate: KeyboardInterrupt()
    code, output = sweep("-m", "algorithm.learning_rate=1e-4,2e-4")
    assert code == 130
    assert "run the same command again to resume" in output
    assert len(runs.done) == 3


def test_the_note_of_a_point_that_is_tried_again_replaces_the_first(tmp_path):
    attempt(tmp_path, 0, ["seed=1"], lambda: {}["nothing"], "success")
    attempt(tmp_path, 1, ["seed=2"], lambda: {"success": 0.25}, "success")
    assert attempt(tmp_path, 2, ["seed=1"], lambda: {"success": 0.75}, "success") == 0.75
    assert [(point.number, point.status) for point in read(tmp_path)] == [(1, "finished"), (2, "finished")]


def test_a_summary_names_the_best_and_what_differs():
    points = [
        Point(0, ["x=0", "rounds=1"], "finished", result={"success": 0.5}),
        Point(1, ["x=1", "rounds=1"], "pruned", result={"success": 0.9}),
        Point(2, ["x=2", "rounds=1"], "finished", result={"success": None}),
        Point(3, ["x=3", "rounds=1"], "running"),
    ]
    sweep_summary = Summary(points, "success", "maximize", ["python", "-m", "flows.run"])
    assert sweep_summary.best
    assert sweep_summary.best.points == points[:1]
    assert sweep_summary.distinct_overrides(sweep_summary.settings[1]) == "x=1"
    assert sweep_summary.counts() == "4 points: 2 finished, 1 pruned, 1 died"
    assert [sweep_summary.rerun_command(point) for point in sweep_summary.unsuccessful] == [
        "python -m flows.run x=3 rounds=1"
    ]
    assert sweep_summary.code == 1


def test_points_that_tie_have_no_best():
    points = [Point(number, [f"x={number}"], "finished", result={"success": 0.0}) for number in range(3)]
    sweep_summary = Summary(points, "success", "maximize", ["python", "-m", "flows.run"])
    assert sweep_summary.best is None
    assert sweep_summary.to_json()["tied"] == [0, 1, 2]
    assert sweep_summary.figures()["sweep/best_success"] == 0.0
    points.append(Point(3, ["x=3"], "finished", result={"success": 0.25}))
    sweep_summary = Summary(points, "success", "maximize", [])
    assert sweep_summary.to_json()["best"] == 3
    assert sweep_summary.to_json()["tied"] == []
    assert Summary(points, "success", "minimize", []).to_json()["tied"] == [0, 1, 2]


def test_points_that_differ_in_their_seed_are_one_row_and_equals_have_no_best():
    rates = {"a": (0.50, 0.60, 0.55), "b": (0.55, 0.52, 0.60), "c": (0.10, 0.12, 0.08)}
    points = [
        Point(3 * index + seed, [f"x={name}", f"seed={seed}"], "finished", result={"success": value, "reward": value})
        for index, (name, values) in enumerate(rates.items())
        for seed, value in enumerate(values)
    ]
    sweep_summary = Summary(points, "reward", "maximize", [])
    assert [setting.overrides for setting in sweep_summary.settings] == [["x=a"], ["x=b"], ["x=c"]]
    data = sweep_summary.to_json()
    assert (data["best"], data["tied"]) == (None, [0, 3])
    assert [setting["seeds"] for setting in data["settings"]] == [[0, 1, 2]] * 3
    assert data["settings"][0]["reward"]["mean"] == pytest.approx(0.55)
    assert data["settings"][2]["to_best"]["equal_to_best"] is False
    assert data["settings"][2]["to_best"]["interval"][1] < 0
    points[3:6] = []
    assert Summary(points, "reward", "maximize", []).to_json()["best"] == 0


def test_success_is_compared_over_seeds_and_scenarios():
    """Equal results of both seeds hide the variation over scenarios."""
    points = [
        Point(number, [f"x={name}", f"seed={seed}"], "finished", result={"success": share / 10})
        for number, (name, seed, share) in enumerate([("a", 0, 9), ("a", 1, 9), ("b", 0, 7), ("b", 1, 7)])
    ]
    rates = {
        point.number: {(str(index), ""): float(index < 10 * (point.value("success") or 0)) for index in range(10)}
        for point in points
    }
    assert Summary(points, "success", "maximize", []).to_json()["best"] == 0  # over seeds alone there is no variation
    assert Summary(points, "success", "maximize", [], rates).to_json()["tied"] == [0, 2]


def test_the_end_of_a_sweep_says_that_points_tie(runs, sweep):
    code, output = sweep("-m", "algorithm.learning_rate=1e-4,2e-4")
    assert code == 0
    assert "no single best setting by success: the differences between these include 0: points 0; 1" in output


# --- Optuna ---------------------------------------------------------------------------------------------------------


def test_optuna_searches_and_goes_on_where_it_was_interrupted(runs, sweep, tmp_path):
    line = ["-m", *OPTUNA, "hydra.sweeper.n_trials=4", "algorithm.learning_rate=tag(log, interval(1e-5, 1e-3))"]
    runs.does = lambda rate: (
        KeyboardInterrupt() if len(runs.done) == 3 else EnvironmentFailed("it broke") if len(runs.done) == 2 else rate
    )
    assert sweep(*line)[0] == 130
    first = list(runs.rates)
    assert len(set(first)) == 3
    runs.does = lambda rate: rate
    code, output = sweep(*line)
    assert code == 0, output
    assert runs.rates[3:5] == first[1:]  # what failed and what was under way, with the same parameters
    assert len(runs.rates) == 6
    assert {sweep for _, sweep in runs.done} == {"smoke"}
    assert [point.status for point in notes(tmp_path)] == ["finished"] * 4
    summary = json.loads((tmp_path / "sweeps" / "smoke" / "summary.json").read_text())
    best = next(point for point in summary["points"] if point["number"] == summary["best"])
    assert best["result"]["success"] == max(runs.rates)
    sweep(*line)
    assert len(runs.rates) == 6  # there is nothing left to do


def test_a_trial_is_pruned_by_what_it_reports(runs, sweep, tmp_path):
    runs.course = lambda rate: {0: 0.1, 1: 0.9 if len(runs.done) <= 2 else 0.2, 2: 0.9}
    pruner = "hydra.sweeper.pruner={name: median, startup_trials: 2, warmup_steps: 1}"
    line = ["algorithm.learning_rate=interval(1e-4,1e-3)", "hydra.sweeper.n_trials=4", "evaluate.every=1", pruner]
    code, output = sweep("-m", *OPTUNA, *line)
    assert code == 0, output
    assert [point.status for point in notes(tmp_path)] == ["finished", "finished", "pruned", "pruned"]
    behind = "pruned after round 1: held-out success 0.200 is behind the other trials of study smoke"
    assert [runs.verdicts[rate] for rate in runs.rates] == [[None] * 3] * 2 + [[None, behind]] * 2
    assert "4 points: 2 finished, 2 pruned" in output


SLOW = pytest.mark.slow  # they import scipy and torch


@pytest.mark.parametrize("sampler", ["tpe", "random", pytest.param("qmc", marks=SLOW), pytest.param("gp", marks=SLOW)])
def test_every_sampler_draws_within_the_space(tmp_path, sampler):
    from flows.experiment.sweep_settings import optuna_settings
    from flows.sweeps.study import distribution, load, prepare

    specs, sweep_config = compose_points(
        ["hydra/sweeper=optuna", f"hydra.sweeper.sampler={sampler}", "hydra.sweeper.startup_trials=1",
         "seed=range(0,9,2)", "algorithm=grpo,dr_grpo", "algorithm.learning_rate=interval(1e-5,1e-3)"],
        multirun=True,
    )  # fmt: skip
    settings = optuna_settings(sweep_config.hydra)
    prepare(tmp_path / "study", settings, sweep_config.overrides, specs[0])
    space = {
        override.get_key_element(): distribution(override)
        for override in sweep_config.overrides
        if override.is_sweep_override()
    }
    study = load(tmp_path / "study", settings)
    for _ in range(3):
        trial = study.ask(space)
        assert trial.params["seed"] in range(0, 9, 2)
        assert trial.params["algorithm"] in ("grpo", "dr_grpo")
        assert 1e-5 <= trial.params["algorithm.learning_rate"] <= 1e-3
        study.tell(trial, 0.5)


def test_a_study_is_not_continued_with_another_search(runs, sweep, tmp_path):
    line = ["-m", *OPTUNA, "hydra.sweeper.n_trials=1"]
    assert sweep(*line, "algorithm.learning_rate=1e-4,2e-4")[0] == 0
    for changed, words in {
        "algorithm.learning_rate=1e-4,3e-4": "algorithm.learning_rate",
        "algorithm.learning_rate=1e-4,2e-4 rounds=2": "rounds: 1 → 2",
        "algorithm.learning_rate=1e-4,2e-4 hydra.sweeper.direction=minimize": "maximize → minimize",
        "seed=1,2": "seed",
    }.items():
        code, output = sweep(*line, *changed.split())
        assert code == 2, changed
        assert "hydra.sweeper.study: 'smoke' has trials of a different search" in output
        assert words in output
        assert "hydra.sweeper.study=NAME" in output
        assert "Traceback" not in output
    assert sweep(*line, "algorithm.learning_rate=1e-4,2e-4", "compute=process")[0] == 0
    assert len(runs.done) == 1
    assert sweep(*line, "seed=1,2", "hydra.sweeper.study=other")[0] == 0
    assert len(runs.done) == 2


def test_two_processes_do_not_search_in_one_study(runs, sweep, tmp_path):
    import fcntl

    (tmp_path / "sweeps" / "smoke").mkdir(parents=True)
    with open(tmp_path / "sweeps" / "smoke" / ".study.lock", "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        code, output = sweep("-m", *OPTUNA, "seed=1,2")
    assert (code, runs.done) == (2, [])
    assert "hydra.sweeper.study=NAME" in output


# --- mistakes -------------------------------------------------------------------------------------------------------

WRONG = {
    "hydra/sweeper=optuna seed=1,2 hydra.sweeper.sampler=tp": "hydra.sweeper.sampler: 'tp': expected one of tpe,",
    "hydra/sweeper=optuna seed=1,2 hydra.sweeper.direction=up": "'up': expected one of maximize, minimize",
    "hydra/sweeper=optuna seed=1,2 hydra.sweeper.metric=precision": "'precision': expected one of success, reward,",
    "hydra/sweeper=optuna seed=1,2 hydra.sweeper.metric=loss": "'loss': no held-out rows measure it",
    "hydra/sweeper=optuna seed=1,2 flow=offline data.path=x": "'success': nothing measures it without an environment",
    "hydra/sweeper=optuna seed=1,2 hydra.sweeper.n_jobs=0": "hydra.sweeper.n_jobs: 0: expected at least 1",
    "hydra/sweeper=optuna seed=1,2 hydra.sweeper.n_jobs=2": "hydra/launcher=joblib",
    "hydra/sweeper=optuna seed=1,2 hydra.sweeper.samplr=tpe": "Did you mean 'hydra.sweeper.sampler'?",
    "hydra/sweeper=optuna seed=1,2 hydra.sweeper.pruner={name:median}": "Did you mean 'evaluate.every=1'?",
    "hydra/sweeper=optuna seed=1,2 hydra.sweeper.pruner={name:mean}": "'mean': expected one of median, halving",
    "hydra/sweeper=optuna seed=1,2 hydra.sweeper.pruner={name:median} hydra.sweeper.metric=cost": "success or reward",
    "hydra/sweeper=optuna seed=1": "the search space is empty",
    "hydra/sweeper=optuna algorithm.lerning_rate=1,2": "Did you mean 'algorithm.learning_rate'?",
    "hydra/sweeper=optunaa seed=1,2": "Did you mean 'hydra/sweeper=optuna'?",
    "hydra/launcher=joblib hydra.launcher.n_jobs=0 seed=1,2": "hydra.launcher.n_jobs: 0: expected at least 1",
    "algorithm.learning_rate=interval(0.1,0.2)": "hydra/sweeper=optuna",
}


def test_a_mistake_in_a_sweep_is_named_before_it_starts():
    cases = [(line.split(), re.escape(words)) for line, words in WRONG.items()]
    assert wrong_refusals(cases, lambda lines: compose_points(["+experiment=smoke", *lines], multirun=True)) == []


def test_trials_with_equal_parameters_are_all_in_the_table_but_for_failures_tried_again(tmp_path):
    states = ["finished", "finished", "failed", "failed", "finished"]
    values = ["1", "1", "2", "2", "2"]
    for number, (state, value) in enumerate(zip(states, values, strict=True)):
        Point(number, [f"seed={value}"], state, result={"success": 0.5} if state == "finished" else {}).write(tmp_path)
    assert [point.number for point in read(tmp_path)] == [0, 1, 4]
