"""Tracker against a real MLflow store: its records can be read back through MLflow's own client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from components.artifacts import Artifact
from components.errors import ResourceError, SpecError
from components.tracking.mlflow_tracker import Tracker
from components.tracking.spec import TrackingSpec
from components.trajectories.schema import Failure, History, Message, Scenario, Score, ToolCall, Trajectory
from flows.stages import STAGES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("run root")  # with a space: paths become URIs


@pytest.fixture
def tracker(root) -> Tracker:
    with Tracker.open(root, TrackingSpec(), "shop") as opened:
        yield opened


def artifact(folder: Path, kind: str = "trajectories", stage: str = "collect", **files: bytes) -> Artifact:
    folder.mkdir(parents=True)
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return Artifact(
        key="k" * 64, kind=kind, stage=stage, schema_version=1, digest="d" * 64, path=folder,
        metrics={"episodes": 4.0}, inputs={"policy": "p" * 64}, volatile=(), seconds=12.5,
    )  # fmt: skip


def logged(tracker: Tracker, path: str) -> str:
    return Path(tracker.client.download_artifacts(tracker.run_id, path)).read_text()


def names(tracker: Tracker, path: str) -> set[str]:
    return {info.path for info in tracker.client.list_artifacts(tracker.run_id, path)}


def test_all_files_are_under_the_run_root(root, tracker, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tracker.client.log_text(tracker.run_id, "x", "x.txt")
    assert tracker.uri == f"sqlite:///{root}/mlflow/mlflow.db"
    assert list(tmp_path.iterdir()) == []
    path = Path(tracker.log_report("<p>report</p>"))
    assert path.is_relative_to(root / "mlflow" / "artifacts")
    assert path.read_text() == "<p>report</p>"


def test_config_becomes_parameters_and_files_without_secrets(tracker):
    config = {
        "name": "shop",
        "reward": {"_target_": "mine.judge", "api_key": "hunter2", "max_tokens": 16, "url": "http://me:hunter2@host/x"},
        "list": [1, 2],
        "nothing": None,
        "empty": {},
        "odd key?": 1,
        "long": "x" * 9000,
    }
    tracker.log_config(
        config, ["reward.api_key=hunter2", "algorithm.learning_rate=1e-4"], versions={"torch": "2"}, git_commit="abc"
    )
    run = tracker.client.get_run(tracker.run_id)
    params = run.data.params
    expected = {"reward.max_tokens": "16", "reward.api_key": "***", "list": "[1, 2]", "nothing": "None", "empty": "{}"}
    assert params.items() >= (expected | {"odd key_": "1"}).items()
    assert len(params["long"]) == 6000
    assert "9,000 characters" in params["long"]
    tags = {"version.torch": "2", "mlflow.source.git.commit": "abc"}
    tags["overrides"] = "reward.api_key=*** algorithm.learning_rate=1e-4"
    assert run.data.tags.items() >= tags.items()
    assert "max_tokens: 16" in logged(tracker, "config.yaml")
    assert "x" * 9000 in logged(tracker, "config.yaml")
    assert json.loads(logged(tracker, "versions.json")) == {"torch": "2"}
    everything = json.dumps([params, run.data.tags]) + logged(tracker, "config.yaml") + logged(tracker, "overrides.txt")
    assert "hunter2" not in everything
    tracker.log_config({f"p{index}": index for index in range(250)})
    params = tracker.client.get_run(tracker.run_id).data.params  # more than one request may hold
    assert len([name for name in params if name[0] == "p" and name[1:].isdigit()]) == 250


def test_metrics_keep_their_steps_and_not_a_number(tracker):
    for step in range(3):
        tracker.log_metrics({"train/kl": step / 10, "eval/by type?": 1}, step)
    history = tracker.client.get_metric_history(tracker.run_id, "train/kl")
    assert [(metric.step, metric.value) for metric in history] == [(0, 0.0), (1, 0.1), (2, 0.2)]
    assert "eval/by type_" in tracker.client.get_run(tracker.run_id).data.metrics
    tracker.log_metrics({"train/loss": float("nan")})
    value = tracker.client.get_run(tracker.run_id).data.metrics["train/loss"]
    assert value != value


def test_threads_write_to_their_own_runs(root):
    trackers = [Tracker.open(root, TrackingSpec(), "threads") for _ in range(4)]

    def work(index: int) -> None:
        for step in range(5):
            trackers[index].log_metrics({"train/kl": index}, step)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    for index, tracker in enumerate(trackers):
        history = tracker.client.get_metric_history(tracker.run_id, "train/kl")
        assert [metric.value for metric in history] == [index] * 5


def test_small_files_are_copied_and_large_ones_are_referred_to(tracker, tmp_path):
    stored = artifact(tmp_path / "a", big=b"x" * (1 << 20), sub__small=b"y" * 10)
    tracker.log_stage(stored, "round 1/collect", "ran", 3.0, step=1)
    assert names(tracker, "stages/round-1/collect") == {
        "stages/round-1/collect/artifact.json", "stages/round-1/collect/sub",
    }  # fmt: skip
    assert logged(tracker, "stages/round-1/collect/sub/small") == "y" * 10
    reference = json.loads(logged(tracker, "stages/round-1/collect/artifact.json"))
    expected = {"digest": stored.digest, "key": stored.key, "status": "ran", "uri": stored.path.as_uri()}
    assert reference.items() >= (expected | {"bytes": (1 << 20) + 10}).items()
    assert {item["path"]: item["copied"] for item in reference["files"]} == {"big": False, "sub/small": True}
    assert (stored.path / "sub" / "small").read_bytes() == b"y" * 10
    metrics = tracker.client.get_run(tracker.run_id).data.metrics
    assert (metrics["collect/episodes"], metrics["time/collect"]) == (4, 3)


def test_a_dataset_that_another_run_inserts_at_the_same_moment_is_found(tracker, tmp_path, monkeypatch):
    """Reproduces MLflow 3.17's rejection; tests/faults has eight runs that trigger it."""
    from mlflow.exceptions import MlflowException

    from components.tracking import lineage

    log_inputs, calls = tracker.client.log_inputs, []

    def racing(*arguments, **options):
        calls.append(arguments)
        if len(calls) < 3:
            raise MlflowException("(sqlite3.IntegrityError) UNIQUE constraint failed: datasets.name")
        return log_inputs(*arguments, **options)

    monkeypatch.setattr(tracker.client, "log_inputs", racing)
    lineage.log_dataset(tracker.client, tracker.run_id, artifact(tmp_path / "raced", data=b"1"), "collect[9]", "train")
    assert len(calls) == 3
    names = [
        dataset_input.dataset.name for dataset_input in tracker.client.get_run(tracker.run_id).inputs.dataset_inputs
    ]
    assert names == ["collect[9]"]


def test_trajectories_are_listed_as_datasets_and_checkpoints_as_models(tracker, tmp_path):
    stages = [
        (artifact(tmp_path / "t", trajectories=b"t"), "round 1/collect", "ran", 1.0, 1),
        (artifact(tmp_path / "e", "evaluation", "evaluate", s=b"s"), "evaluate base", "cached", 0.0, 0),
        (artifact(tmp_path / "c", "checkpoint", "train", w=b"w"), "round 1/train", "ran", 1.0, 1),
    ]
    for stage in stages:
        tracker.log_stage(*stage, tracking=STAGES[stage[0].stage].tracking)
    run = tracker.client.get_run(tracker.run_id)
    inputs = {item.dataset.name: (item.dataset.digest, item.tags[0].value) for item in run.inputs.dataset_inputs}
    assert inputs == {"round 1/collect": ("d" * 36, "train"), "evaluate base": ("d" * 36, "evaluation")}
    (output,) = run.outputs.model_outputs
    model = tracker.client.get_logged_model(output.model_id)
    assert (output.step, model.status, model.source_run_id) == (1, "READY", tracker.run_id)
    assert (model.tags["uri"], model.tags["input.policy"]) == ((tmp_path / "c").as_uri(), "p" * 64)
    assert run.data.tags["checkpoint.round 1/train"] == "d" * 64
    assert run.data.metrics["eval/episodes"] == 4


def test_model_of_a_checkpoint_has_its_origin(tracker, tmp_path):
    origin = {
        "git_commit": "c" * 40,
        "reward": "mine.reward",
        "parent_digest": "9" * 64,
        "where": "http://me:hush@host",
    }
    checkpoint = artifact(tmp_path / "c", "checkpoint", "train", w=b"w")
    tracker.log_stage(checkpoint, "train[1]", "ran", 1.0, step=1, origin=origin, tracking=STAGES["train"].tracking)
    (output,) = tracker.client.get_run(tracker.run_id).outputs.model_outputs
    tags = tracker.client.get_logged_model(output.model_id).tags
    assert origin | {"where": "http://me:***@host"} == {name: tags[name] for name in origin}


def test_an_export_is_registered_once_and_by_reference(tracker, root, tmp_path):
    export = artifact(tmp_path / "x", "export", "deploy", weights=b"w" * (1 << 20))
    version = tracker.register_model("shop", export, policy_digest="f" * 64, tags={"success": "0.7"})
    assert tracker.register_model("shop", export, policy_digest="f" * 64) == version
    model_version = tracker.client.get_model_version("shop", version)
    found = (model_version.source, model_version.run_id, model_version.status)
    assert found == (export.path.as_uri(), tracker.run_id, "READY")
    assert (model_version.tags["stage_key"], model_version.tags["policy_digest"]) == (export.key, "f" * 64)
    assert tracker.client.get_model_version_download_uri("shop", version) == export.path.as_uri()
    assert not [path for path in (root / "mlflow").rglob("*") if path.name == "weights"]


def episode(sample: int, reward: float | None, failure: Failure | None = None) -> Trajectory:
    call = ToolCall("c1", "look_up", '{"order": "A1"}')
    messages = [
        Message("system", "You help."),
        Message("user", "Where is my order?"),
        Message("assistant", "", tool_calls=[call], span=(10, 14), finish_reason="tool_calls"),
        Message("tool", "shipped", tool_call_id="c1"),
        Message("assistant", "It was shipped. ✓", span=(20, 25), finish_reason="stop"),
    ]
    return Trajectory(
        id=f"s1/{sample}", scenario=Scenario("s1", {"order": "A1"}, "heldout", "status", 2), sample=sample,
        histories=[History(messages, token_ids=list(range(25)), logprobs=[-0.5] * 25)],
        tools=[{"type": "function", "function": {"name": "look_up"}}], outcome={"success": reward == 1.0},
        metrics={"turns": 2.0}, failure=failure, policy="abc", reward=reward,
    )  # fmt: skip


def test_the_parts_of_a_reward_are_assessments_of_their_own(tracker):
    parts = {"task": 1.0, "task/success": 1.0, "style": 0.25}
    failure = Failure("judge", "Timeout", "style: no answer in 60 s")
    scores = {
        "s1/0": Score("s1/0", 1.5, parts, explanation="style: short"),
        "s1/1": Score("s1/1", None, {"task": 1.0}, failure=failure),
    }
    episodes = [episode(0, 1.5), episode(1, None), replace(episode(2, 0.5), outcome={"success": None})]
    ids = tracker.log_trajectories(episodes, "evaluate base", scores)
    assessments = [
        {item.name: item for item in tracker.client.get_trace(trace_id).info.assessments} for trace_id in ids
    ]
    good, bad, silent = sorted(assessments, key=len, reverse=True)
    assert list(silent) == ["reward"], "no episode without a stated success is a failure"
    assert {name: item.value for name, item in good.items()} == {
        "reward": 1.5,
        "success": False,
        **{f"reward/{name}": value for name, value in parts.items()},
    }
    assert good["reward"].rationale == "style: short"
    assert bad["reward"].error.error_message == "style: no answer in 60 s"
    assert bad["reward/task"].value == 1.0


def test_episodes_become_traces_with_spans_and_assessments(tracker):
    failure = Failure("engine", "EngineError", "out of memory")
    ids = tracker.log_trajectories([episode(0, 1.0), episode(1, None, failure)], "evaluate base")
    trace_by_id = {trace_id: tracker.client.get_trace(trace_id) for trace_id in ids}
    good = next(trace for trace in trace_by_id.values() if trace.info.state == "OK")
    bad = next(trace for trace in trace_by_id.values() if trace.info.state == "ERROR")

    assert good.info.trace_metadata["mlflow.sourceRun"] == tracker.run_id
    assert good.info.request_preview == "Where is my order?"
    assert good.info.response_preview == "It was shipped. ✓"
    assert {item.name: item.value for item in good.info.assessments} == {"reward": 1.0, "success": True}
    spans = {(span.name, span.span_type) for span in good.data.spans}
    assert spans == {("episode s1/0", "AGENT"), ("generation", "CHAT_MODEL"), ("look_up", "TOOL")}
    tool = next(span for span in good.data.spans if span.span_type == "TOOL")
    assert tool.inputs == {"arguments": '{"order": "A1"}'}
    assert tool.outputs == "shipped"
    last = [span for span in good.data.spans if span.span_type == "CHAT_MODEL"][-1]
    assert last.outputs["choices"][0]["message"]["content"] == "It was shipped. ✓"
    assert last.attributes["mlflow.chat.tokenUsage"]["output_tokens"] == 5
    assert len(last.inputs["messages"]) == 4
    root = next(span for span in good.data.spans if span.parent_id is None)
    assert all(
        root.start_time_ns <= span.start_time_ns <= span.end_time_ns <= root.end_time_ns for span in good.data.spans
    )

    reward = next(item for item in bad.info.assessments if item.name == "reward")
    assert reward.value is None
    assert reward.error.error_message == "out of memory"
    traced = tracker.client.search_traces(locations=[tracker.experiment_id], run_id=tracker.run_id)
    assert {trace.info.trace_id for trace in traced} == set(ids)


def test_the_sample_of_traces_is_bounded_and_mixed(root):
    episodes = [episode(index, float(index % 2)) for index in range(20)]
    episodes += [episode(index, None, Failure("agent", "AgentError", "no")) for index in range(20, 30)]
    with Tracker.open(root, TrackingSpec(traces=6), "sample") as tracker:
        ids = tracker.log_trajectories(episodes, "evaluate")
        states = [tracker.client.get_trace(trace_id).info.state for trace_id in ids]
        assert len(ids) == 6
        assert states.count("ERROR") == 2
    with Tracker.open(root, TrackingSpec(traces=0), "sample") as tracker:
        assert tracker.log_trajectories(episodes, "evaluate") == []


def test_a_child_run_and_how_runs_end(root):
    with Tracker.open(root, TrackingSpec(experiment="other"), "shop", tags={"sweep": "1"}) as parent:
        pass
    with pytest.raises(KeyError), Tracker.open(root, TrackingSpec(), "shop", parent_run_id=parent.run_id) as failed:
        raise KeyError
    with pytest.raises(KeyboardInterrupt), Tracker.open(root, TrackingSpec(), "shop") as killed:
        raise KeyboardInterrupt
    runs = {name: parent.client.get_run(run.run_id) for name, run in
            {"parent": parent, "failed": failed, "killed": killed}.items()}  # fmt: skip
    assert {name: run.info.status for name, run in runs.items()} == {
        "parent": "FINISHED", "failed": "FAILED", "killed": "KILLED",
    }  # fmt: skip
    assert runs["parent"].data.tags["sweep"] == "1"
    assert runs["failed"].data.tags["mlflow.parentRunId"] == parent.run_id
    assert parent.client.get_experiment_by_name("other").experiment_id == parent.experiment_id


def test_the_command_for_the_ui_names_this_store(root, tracker):
    assert tracker.ui_command.endswith(f"mlflow ui --workers 1 --backend-store-uri '{tracker.uri}'")  # it has a space


def test_a_deleted_experiment_is_named(root):
    with Tracker.open(root, TrackingSpec(), "gone") as tracker:
        pass
    tracker.client.delete_experiment(tracker.experiment_id)
    with pytest.raises(SpecError, match="'gone' was deleted"):
        Tracker.open(root, TrackingSpec(), "gone")


def test_a_server_that_does_not_answer_is_refused_at_once(tmp_path):
    with pytest.raises(ResourceError, match="Start it, correct") as error:
        Tracker.open(tmp_path, TrackingSpec(uri="http://user:hunter2@127.0.0.1:9"), "shop")
    assert "hunter2" not in str(error.value)


@pytest.mark.timeout(1800)
def test_processes_that_race_for_a_fresh_store_all_get_a_working_one_and_print_nothing(tmp_path):
    program = (
        "import sys; from components.tracking.mlflow_tracker import Tracker; "
        "from components.tracking.spec import TrackingSpec; "
        "tracker = Tracker.open(sys.argv[1], TrackingSpec(), 'race'); tracker.log_metrics({'a': 1}); "
        "tracker.log_report('x'); tracker.finish()"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "runs")]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW")}
    running = [
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in running:
        out, err = process.communicate(timeout=150)
        assert (process.returncode, out, err) == (0, "", "")
    with Tracker.open(tmp_path / "runs", TrackingSpec(), "race") as tracker:
        assert len(tracker.client.search_runs([tracker.experiment_id])) == 3
