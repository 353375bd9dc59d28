"""The whole line as a user runs it: `python -m flows.run +experiment=smoke`, in processes of its own, from an installed
wheel and another folder."""

import contextlib
import html
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from flows.history.records import Records
from flows.orchestration import server
from tests.databases import give_databases

CODE = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(1800)

LABELS = [
    "evaluate[start]",
    *(f"{stage}[sft]" for stage in ("collect", "judge", "filter", "train", "evaluate")),
    *(f"{stage}[1]" for stage in ("collect", "judge", "filter", "train")),
    "evaluate[final]",
    "deploy",
]


@dataclass
class FinishedRun:
    result: dict
    """The last line on stdout."""
    lines: list[str]
    """All lines on stdout."""
    errors: str


class Place:
    """A fresh folder for everything: run root, working directory, home."""

    def __init__(self, folder: Path, packages: Path = CODE):
        self.root, self.work, self.home = folder / "root", folder / "work", folder / "home"
        for path in (self.work, self.home):
            path.mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT", "MLFLOW", "XDG"))}
        self.environment = {**kept, "HOME": str(self.home), "PYTHONPATH": str(packages)}

    def start(self, *overrides: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "flows.run", *self.overrides(*overrides)],
            cwd=self.work,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *overrides: str) -> FinishedRun:
        process = self.start(*overrides)
        out, errors = process.communicate(timeout=1500)
        assert process.returncode == 0, errors
        return FinishedRun(json.loads(out.splitlines()[-1]), out.splitlines(), errors)

    def processes(self) -> list[str]:
        """Command lines of processes that have to do with this root."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                line = process.cmdline()
                if process.pid != os.getpid() and any(str(self.root) in part for part in line):
                    found.append(" ".join(line))
        return found

    def states(self) -> list[dict[str, str]]:
        """Of each Prefect flow run, in order: the states of its tasks by name."""
        with contextlib.closing(sqlite3.connect(self.root / "prefect" / "prefect.db")) as database:
            flows = [row[0] for row in database.execute("select id from flow_run order by start_time")]
            query = "select name, state_name from task_run where flow_run_id = ?"
            return [dict(database.execute(query, (flow,)).fetchall()) for flow in flows]

    def overrides(self, *overrides: str) -> tuple[str, ...]:
        """Arguments of a run in this root."""
        return "+experiment=smoke", f"root={self.root}", *overrides

    def mlflow(self):
        from components.tracking.store import connect, local_uri

        return connect(local_uri(self.root), self.root / "mlflow" / "artifacts")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Build a wheel of the checkout, install it without its requirements, and return the folder of its packages."""
    folder = tmp_path_factory.mktemp("installed")
    code = folder / "checkout"
    for name in ("components", "conf", "flows", "hydra_plugins"):
        shutil.copytree(CODE / name, code / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CODE / name, code)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, code]
    subprocess.run(build, check=True, timeout=600)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", folder / "site", wheel], check=True, timeout=600)
    return folder / "site"


@pytest.fixture(scope="module")
def place(tmp_path_factory, installed):
    return Place(tmp_path_factory.mktemp("smoke"), installed)


def test_the_console_script_lists_and_starts_the_commands(place, installed):
    def espalier(*arguments: str) -> subprocess.CompletedProcess:
        line = [sys.executable, installed / "bin" / "espalier", *arguments]
        return subprocess.run(line, cwd=place.work, env=place.environment, capture_output=True, text=True, timeout=600)

    listed = espalier().stdout
    assert re.search(r"^  run +run an experiment", listed, re.MULTILINE)
    assert "did you mean compare?" in espalier("compair").stderr
    runs = espalier("runs")  # without root=DIR: runs/ in the working directory
    assert str(place.work / "runs") in runs.stdout + runs.stderr


@pytest.fixture(scope="module")
def first(place):
    return place.run()


def test_the_last_line_says_everything(first):
    result = first.result
    assert len(first.lines) == 1
    assert list(result["stages"]) == LABELS
    assert set(result["stages"].values()) == {"ran"}
    assert len(result["policy_digest"]) == 64
    for name in ("success", "success_start", "success_sft"):
        low, high = result[f"{name}_interval"]
        assert 0 <= low <= result[name] <= high <= 1
    assert isinstance(result["reward"], float)
    assert result["episodes"] == 3 * 8 + 8 + 4
    assert result["seconds"] > 0
    assert "<!doctype html>" in Path(result["report"]).read_text()


def test_the_end_is_readable(first, place):
    for words in (
        "loading packages and starting Prefect; the first stage also loads the model",
        "after SFT",
        "after GRPO",
        "round 1/1",
        "mlflow ui",
        "flows.runs ui root=",
        first.result["export"],
    ):
        assert words in first.errors
    assert "Traceback" not in first.errors
    (log,) = (place.root / "logs").glob("smoke-*.log")
    assert "evaluate[final] ran" in log.read_text()


def test_the_log_in_prefect_has_the_lines_of_the_console(first, place):
    with contextlib.closing(sqlite3.connect(place.root / "prefect" / "prefect.db")) as database:
        lines = [row[0] for row in database.execute("select message from log")]
    for words in ("loading packages and starting Prefect", "evaluate[final] ran", "after GRPO"):
        assert any(words in line for line in lines)


def test_everything_lies_under_the_root_and_nothing_runs_on(first, place):
    assert list(place.work.iterdir()) == []
    assert [str(path) for path in place.home.rglob("*") if path.is_file()] == []
    assert place.processes() == []


@pytest.mark.usefixtures("first")
def test_artifacts_have_the_files_and_inputs_that_their_stages_declare(place):
    from tests.flows.declarations import check_artifact

    stages = {check_artifact(path.parent) for path in (place.root / "artifacts").glob("*/manifest.json")}
    assert len(stages) == 6


def test_the_export_loads_as_a_model_of_its_own(first):
    folder = Path(first.result["export"])
    assert {"config.json", "model.safetensors", "tokenizer_config.json", "README.md"} <= set(os.listdir(folder))


def test_mlflow_holds_the_run(first, place):
    client = place.mlflow()
    run = client.get_run(first.result["run_id"])
    assert run.info.status == "FINISHED"
    prefixes = {name.partition("/")[0] for name in run.data.metrics}
    assert {"collect", "judge", "filter", "train", "eval", "time", "cost"} <= prefixes
    steps = [metric.step for metric in client.get_metric_history(run.info.run_id, "eval/success")]
    assert steps == [-1, 0, 1]
    assert run.data.params["seed"] == "0"
    files = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert {"config.yaml", "overrides.txt", "report.html", "stages"} <= files
    assert client.search_model_versions("name='smoke'") == []  # size=tiny registers nothing
    models = [client.get_logged_model(output.model_id) for output in run.outputs.model_outputs]
    warmed, trained = (model.tags for model in sorted(models, key=lambda model: "parent_digest" in model.tags))
    assert trained["made_by"] == warmed["made_by"] == run.info.run_id
    assert trained["parent_digest"] == warmed["digest"]
    assert trained["reward"] == "reward.outcome"
    assert 'id="lineage"' in Path(first.result["report"]).read_text()


def test_again_nothing_runs_and_nothing_is_written_but_a_log(first, place):
    """The run that is there is shown; what running and tracking need is neither started nor imported."""
    before = {path: path.stat().st_mtime_ns for path in place.root.rglob("*") if path.is_file()}
    code = "import sys, flows.run; flows.run.main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    line = [sys.executable, "-c", code, "+experiment=smoke", f"root={place.root}"]
    again = subprocess.run(line, cwd=place.work, env=place.environment, capture_output=True, text=True, timeout=1500)
    assert again.returncode == 0, again.stderr
    *lines, modules = again.stderr.splitlines()
    heavy = {"torch", "transformers", "peft", "trl", "mlflow", "prefect", "litellm", "sqlalchemy"}
    assert heavy & set(modules.split()) == set()
    after = {path: path.stat().st_mtime_ns for path in place.root.rglob("*") if path.is_file()}
    (log,) = set(after) - set(before)
    assert log.parent == place.root / "logs"
    assert {path: time for path, time in after.items() if path != log} == before
    result = json.loads(again.stdout)
    assert result["stages"] == dict.fromkeys(LABELS, "cached")
    differing = {"seconds", "stage_seconds", "cached_seconds", "peak_memory_gb", "stages"}
    assert {name for name, value in result.items() if value != first.result[name]} <= differing
    assert any(f"nothing has changed since run {result['run_id'][:8]}" in line for line in lines)
    assert any("round 1/1" in line and "cached" in line for line in lines)
    assert f"report:  {result['report']}" in lines


def test_a_report_that_is_gone_is_written_again_and_its_run_tracked_without_a_server(
    first, place, finished, monkeypatch
):
    """Nothing runs, so there is nothing to show in Prefect."""
    monkeypatch.setattr(server, "for_run", lambda *_, **__: pytest.fail("a Prefect server was asked for"))
    report = Path(first.result["report"])
    text = report.read_text()
    report.unlink()
    again = finished(place)
    assert again.result["stages"] == dict.fromkeys(LABELS, "cached")
    assert again.result["run_id"] != first.result["run_id"]
    same = ("policy_digest", "success", "success_interval", "reward", "episodes")
    assert {name: again.result[name] for name in same} == {name: first.result[name] for name in same}
    assert place.states() == [dict.fromkeys(LABELS, "Completed")]
    assert place.mlflow().get_run(again.result["run_id"]).info.status == "FINISHED"
    assert Path(again.result["report"]).is_file()
    report.write_text(text)


@pytest.mark.usefixtures("first")
def test_rounds_end_early_and_the_best_policy_is_the_result_and_nothing_else_runs(place, finished):
    course = ("rounds=3", "evaluate.every=1", "early_stopping={patience: 1}", "deploy.policy=best")
    found = finished(place, *course)
    assert [found.result[name] for name in ("step", "rounds", "stopped_early")] == [0, 1, True]  # it never succeeds
    assert found.result["success_by_round"] == {"1": found.result["success"]}
    assert [label for label, status in found.result["stages"].items() if status == "ran"] == ["deploy"]
    words = ("the rounds end after round 1: held-out success", "the final policy is the one at the start of the rounds")
    report = Path(found.result["report"]).read_text()
    tags = place.mlflow().get_run(found.result["run_id"]).data.tags
    assert all(text in found.errors and text[4:] in report for text in words)
    assert (tags["notice.early_stopping"].startswith(words[0]), tags["final_step"]) == (True, "0")
    assert "start of the rounds (best)" in found.errors
    assert "chosen as the best" in (Path(found.result["export"]) / "README.md").read_text()


@pytest.mark.usefixtures("first")
def test_a_guard_that_stops_ends_the_run_with_its_reason(place, command):
    code, out, errors = command(*place.overrides("filter=successful", "guards.no_signal=stop"))
    assert (code, out, "Traceback" in errors) == (1, "", False)
    found = "filter[1] left nothing to train on: none of 4 episodes was kept (4 no_success)"
    assert f"GuardTriggered: {found}" in errors
    report = Path(re.search(r"^report:  (.+)$", errors, re.MULTILINE)[1]).read_text()
    assert f"guard ended the run: {found}" in html.unescape(report)
    assert [title in report for title in ("after SFT", "after GRPO")] == [True, False]


SLOW = ("rounds=0", "deploy=none", "evaluate.scenarios=16", "agent.max_tokens=120", "evaluate.concurrency=2")
"""Long enough evaluations to be stopped in the middle."""


def stopped(place: Place, number: int):
    """A run that got a signal in the middle of its first evaluation; returns MLflow's client."""
    give_databases(place.root)
    process = place.start(*SLOW)
    limit = time.monotonic() + 600
    while not list(place.root.glob("artifacts/.scratch/*/episodes-*.parquet")):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < limit
        time.sleep(0.05)
    process.send_signal(number)
    out, errors = process.communicate(timeout=600)
    assert process.returncode == 130, errors
    assert (out, "Traceback" in errors) == ("", False)
    assert place.processes() == []
    client = place.mlflow()
    (experiment,) = [found for found in client.search_experiments() if found.name == "smoke"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "KILLED"
    return client


def test_terminated_it_ends_at_once_and_leaves_no_process(tmp_path):
    place = Place(tmp_path)
    stopped(place, signal.SIGTERM)
    assert place.states() == [{"evaluate[start]": "Crashed"}]


def test_interrupted_it_ends_at_once_and_goes_on_later(tmp_path, finished):
    place = Place(tmp_path)
    client = stopped(place, signal.SIGINT)
    after = finished(place, *SLOW)
    assert after.result["stages"]["evaluate[start]"] == "ran"
    resumed = [metric.value for metric in client.get_metric_history(after.result["run_id"], "eval/resumed")]
    assert 0 < resumed[0] < 16  # what was finished was not played again
    assert resumed[1] == 0


def test_in_processes_of_their_own_the_stages_give_the_same(first, place, tmp_path, finished):
    """The stages of the round and its evaluation, each in a process; what they begin with is there."""
    round_and_end = {"collect[1]", "judge[1]", "filter[1]", "train[1]", "evaluate[final]"}
    recorded = Records(place.root).get(first.result["run_id"]).stages
    keys = {stage.key for stage in recorded if stage.label in round_and_end}
    elsewhere = Place(tmp_path)
    shutil.copytree(place.root / "artifacts", elsewhere.root / "artifacts", ignore=lambda _, names: keys & {*names})
    there = finished(elsewhere, "compute=process", "deploy=none").result
    assert {label for label, status in there["stages"].items() if status == "ran"} == round_and_end
    assert there["policy_digest"] == first.result["policy_digest"]
    assert elsewhere.processes() == []
