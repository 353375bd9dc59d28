"""Points on SkyPilot machines: SkyPilot and the runs are simulated; task, log, driver, store and results are real.
tests/slurm runs them on a Slurm cluster."""

import json
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from components.artifacts import Store
from components.compute.runners import StageResult, error_from_json, error_to_json
from components.compute.sky.driver import Driver
from components.compute.sky.spec import SkyPlace
from components.compute.sky.task import REQUEST, TaskTemplate
from components.errors import EnvironmentFailed, EspalierError
from flows.experiment.compose import compose_points
from flows.history.records import Records, RunRecord, recording
from flows.sweeps import elsewhere
from flows.sweeps.points import read
from tests.refusals import wrong_refusals


class Sky:
    """Simulated SkyPilot of one machine, which runs the job's request while its log is read."""

    Task = SimpleNamespace(from_yaml_config=lambda config, secrets_overrides: config)
    calls: list = []

    def __init__(self, node: Path):
        self._node = node
        self._task: dict = {}

    def _job(self, how, task, name):
        assert task["run"].count("-m flows.sweeps.elsewhere --request") == 1
        self._task = task
        self.calls.append((how, name))
        return how

    def launch(self, task, cluster_name, fast):
        return self._job("launch", task, cluster_name)

    def exec(self, task, cluster_name):
        return self._job("exec", task, cluster_name)

    def stream_and_get(self, request_id, output_stream):
        return 7, None

    def tail_logs(self, cluster_name, job_id, follow, output_stream):
        try:
            kept = elsewhere.play(json.loads(self._task["envs"][REQUEST]), self._node)
        except SystemExit:
            output_stream.write("killed\n")
            return
        line = {"key": kept.key, "digest": kept.digest, "status": "ran"}
        output_stream.write(f"(point, pid=1) {json.dumps(line)}\n")

    def job_status(self, name, job_ids):
        return {7: SimpleNamespace(value="FAILED_SETUP")}

    def get(self, found):
        return found

    def down(self, name):
        self.calls.append(("down", name))


class Machine:
    """Replacement for `SkyRunner` whose driver runs in this process."""

    node: Path

    def __init__(self, place, name, code, packages, process):
        self.name = name
        self._driver = Driver(Sky(self.node), TaskTemplate(place, name, process.root, process.options, process.module))

    def run(self, request, on_event):
        try:
            last = self._driver.run(request, on_event)
        except EspalierError as error:
            self.close()
            raise error_from_json(error_to_json(error)) from None
        return StageResult(last["key"], last["digest"], last["status"])

    def close(self):
        self._driver.end()


class Runs:
    """Replacement for `flows.session.run` that writes a record, a report and a result."""

    def __init__(self):
        self.does = lambda rate: rate
        self.together = 0
        self._lock = threading.Lock()
        self._barrier = None

    def at_once(self, number):
        self._barrier = threading.Barrier(number)

    def __call__(self, spec, *, overrides, sweep=None):
        rate = spec.algorithm.learning_rate
        root = Path(spec.root)
        if self._barrier is not None:
            self._barrier.wait(600)
        settings = {"spec": spec.model_dump(mode="json"), "overrides": overrides, "sweep": sweep}
        run = RunRecord(f"{int(rate * 1e6):08}", spec.name, spec.seed, time.time(), **settings)
        with recording(root, run) as writer:
            found = self.does(rate)
            if isinstance(found, BaseException):
                raise found
            page = root / "page.html"
            page.write_text(f"rate {rate}")
            writer.run.result = {
                "run_id": writer.run.id, "success": found, "reward": 1.0, "pruned": None, "report": str(page),
                "export": str(root),
            }  # fmt: skip
        return writer.run.result


@pytest.fixture
def runs(monkeypatch, tmp_path):
    runs = Runs()
    monkeypatch.setattr("flows.session.run", runs)
    monkeypatch.setattr("flows.sweeps.launcher.SkyRunner", Machine)
    monkeypatch.setattr(Machine, "node", tmp_path / "node", raising=False)
    monkeypatch.setattr(Sky, "calls", [])
    return runs


@pytest.fixture
def sweep(tmp_path, answered):
    def run(*arguments: str) -> tuple[object, str]:
        places = [f"root={tmp_path / 'here'}", f"store={(tmp_path / 'store').as_uri()}"]
        launcher = ["hydra/launcher=sky", "hydra.launcher.place=sky_slurm"]
        code, _, said = answered("-m", *launcher, "+experiment=smoke", *places, *arguments)
        return code, said

    return run


def test_points_come_back_as_if_they_had_run_here(runs, sweep, tmp_path):
    runs.does = lambda rate: {1e-4: 0.5, 2e-4: EnvironmentFailed("it broke"), 3e-4: KeyError("a bug"), 4e-4: 0.7}[rate]
    code, output = sweep("algorithm.learning_rate=1e-4,2e-4,3e-4,4e-4")
    assert code == 1, output
    here = tmp_path / "here"
    (folder,) = (here / "sweeps").iterdir()
    points = read(folder)
    assert [point.status for point in points] == ["finished", "failed", "failed", "finished"]
    assert [point.value("success") for point in points] == [0.5, None, None, 0.7]
    assert (points[1].error, points[2].error) == ("EnvironmentFailed: it broke", "EspalierError: KeyError: 'a bug'")
    assert Path(points[3].result["report"]).read_text() == "rate 0.0004"
    records = {run.id: run for run in Records(here).all()}
    assert {run.status for run in records.values()} == {"FINISHED", "FAILED"}
    assert {run.spec["root"] for run in records.values()} == {str(here)}
    assert records["00000400"].sweep == folder.name
    assert records["00000400"].result["report"] == points[3].result["report"]
    assert json.loads((folder / "summary.json").read_text())["best"] == 3
    assert "comparison: " in output  # by the records
    assert "run it alone: python -m flows.run +experiment=smoke" in output
    assert "MLflow's runs and model registry stay on the machines" in output
    hows, names = zip(*Sky.calls, strict=True)
    assert hows == ("launch", "exec", "exec", "exec", "down")  # a point that fails leaves the machine up
    assert len(set(names)) == 1


def test_points_at_a_time_have_machines_of_their_own(runs, sweep):
    runs.at_once(2)
    code, output = sweep("algorithm.learning_rate=1e-4,2e-4", "hydra.launcher.n_jobs=2")
    assert code == 0, output
    assert sorted(how for how, _ in Sky.calls) == ["down", "down", "launch", "launch"]
    assert len({name for _, name in Sky.calls}) == 2


def test_a_job_that_says_nothing_is_a_failed_point_and_the_next_gets_another_machine(runs, sweep, tmp_path):
    runs.does = lambda rate: SystemExit(1) if rate == 1e-4 else 0.5
    code, output = sweep("algorithm.learning_rate=1e-4,2e-4")
    assert code == 1
    assert "ended on espalier-" in output
    assert "as FAILED_SETUP without a result" in output
    assert [how for how, _ in Sky.calls] == ["launch", "down", "launch", "down"]
    assert len({name for _, name in Sky.calls}) == 2


def test_optuna_searches_with_them(runs, sweep, tmp_path):
    line = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "algorithm.learning_rate=interval(1e-4,1e-3)"]
    code, output = sweep(*line)
    assert code == 0, output
    points = read(tmp_path / "here" / "sweeps" / "smoke")
    assert [point.status for point in points] == ["finished"] * 3
    assert len({point.value("success") for point in points}) == 3


def test_the_runs_of_an_mlflow_server_get_the_parent_of_the_sweep(runs, tmp_path):
    spec, _ = compose_points(["+experiment=smoke", f"store={(tmp_path / 'store').as_uri()}"])
    data = spec[0].model_dump(mode="json", by_alias=True)
    kept = elsewhere.play({"spec": data, "overrides": [], "sweep": "s", "parent": "abc"}, tmp_path / "node")
    (note,) = (tmp_path / "node" / "points").glob("*/sweeps/s/mlflow_run_id")
    assert note.read_text() == "abc"
    assert Store(tmp_path / "other", spec[0].store).find(kept.key) is not None


WRONG = {
    "": "store: null, but the points of the sweep run on remote machines (sky_h100)",
    "store=file:///tmp/x": "expected an object store",
    "store=s3://b hydra.launcher.place=sky_h10": "Did you mean 'sky_h100'?",
    "store=s3://b hydra.launcher.n_jobs=0": "hydra.launcher.n_jobs: 0: expected at least 1",
    "store=s3://b +hydra.launcher.places.p={name:process} hydra.launcher.place=p": "hydra.launcher.places.p.name",
    "store=s3://b hydra.launcher.places.sky_cpu.cluster=ours hydra.launcher.place=sky_cpu hydra.launcher.n_jobs=2": (
        "hydra.launcher.places.sky_cpu.cluster: 'ours': 2 concurrent points"
    ),
    "store=s3://b hydra.launcher.places.sky_h100.nodes=2": "hydra.launcher.places.sky_h100.nodes: 2:",
    "store=s3://b hydra.launcher.places.sky_h100.processes=8": "hydra.launcher.places.sky_h100.processes: 8:",
    "store=s3://b compute=sky": "compute: sends stages to remote machines",
    "store=s3://b tracking.uri=sqlite:////tmp/x.db": "tracking.uri: 'sqlite:////tmp/x.db' is on this machine",
    "store=s3://b fork=abcd@1": "fork: 'abcd@1': its record is below root on this machine",
    "store=s3://b deploy=local deploy.register_model=true": "deploy.target: 'local' serves on the machine of the run",
    "store=s3://b deploy.approve=true": "deploy.approve: true: approval needs a user at the run",
    "store=s3://b hydra/sweeper=optuna hydra.sweeper.pruner={name:median} evaluate.every=1": "hydra.sweeper.pruner",
}


def test_what_cannot_run_elsewhere_is_named_before_it_starts():
    base = ["+experiment=smoke", "hydra/launcher=sky", "seed=1,2"]
    cases = [(line.split(), re.escape(words)) for line, words in WRONG.items()]
    assert wrong_refusals(cases, lambda lines: compose_points([*base, *lines], multirun=True)) == []


def test_every_key_of_the_launcher_is_in_its_file():
    _, found = compose_points(["+experiment=smoke", "hydra/launcher=sky", "seed=1,2", "store=s3://b"], multirun=True)
    assert set(found.hydra["launcher"]) == {"_target_", "place", "places", "n_jobs"}
    assert {SkyPlace(**place).name for place in found.hydra["launcher"]["places"].values()} == {"sky"}
