"""List of runs with its filters, and tags and notes beside the records and in MLflow."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from components.errors import ResourceError
from components.tracking.mlflow_tracker import Tracker
from components.tracking.spec import TrackingSpec
from flows.history.labels import Labels
from flows.history.records import Records, RunRecord
from flows.runs.__main__ import RUNS
from flows.runs.listing import Condition, parse_since

DAY = 86400.0


def record(root: Path, number: int, name: str = "shop", status: str = "FINISHED", **more) -> RunRecord:
    """Write the record of a run that started `number` days ago."""
    run = RunRecord(f"{number:08}abcdef", name, more.pop("seed", 0), time.time() - DAY * number, status, **more)
    Records(root).write(run)
    return run


@pytest.fixture
def root(tmp_path):
    lines = ["+experiment=shop", f"root={tmp_path}"]
    record(tmp_path, 1, overrides=[*lines, "rounds=4", "lr=1e-4"], result={"success": 0.5, "seconds": 90, "seed": 0})
    record(tmp_path, 2, overrides=[*lines, "rounds=4", "lr=3e-4"], result={"success": 0.75, "seconds": 60.0}, seed=1)
    record(tmp_path, 3, "other", "FAILED", overrides=["+experiment=other", "rounds=4"])
    return tmp_path


def listed(root: Path, capsys, *arguments: str) -> dict:
    assert RUNS.main([*arguments, f"root={root}", "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], [1, 2, 3]),
        (["--experiment", "shop"], [1, 2]),
        (["--since", "60h"], [1, 2]),
        (["--state", "failed"], [3]),
        (["--state", "failed", "--state", "finished"], [1, 2, 3]),
        (["--metric", "success>=0.6"], [2]),
        (["--metric", "success>=0.5", "--metric", "seconds<90"], [2]),
        (["--metric", "success"], [1, 2]),
        (["--best", "success"], [2, 1]),
        (["--best", "seconds", "--limit", "1"], [2]),
        (["--tag", "good"], [2]),
    ],
)
def test_filters_and_order(root, capsys, arguments, expected):
    Labels(root).tag(Records(root).get("00000002"), ["good"])
    assert [int(run["id"][:8]) for run in listed(root, capsys, *arguments)["runs"]] == expected


def test_only_the_overrides_that_differ_are_columns(root, capsys):
    data = listed(root, capsys, "--experiment", "shop")
    assert data["changed"] == ["lr"]
    assert [run["changed"] for run in data["runs"]] == [{"lr": "1e-4"}, {"lr": "3e-4"}]
    assert data["runs"][1]["metrics"] == {"success": 0.75, "seconds": 60.0}
    assert RUNS.main([f"root={root}", "--experiment", "shop"]) == 0
    head, first, *_ = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "started", "experiment", "seed", "state", "success", "lr"]
    assert first.split()[-2:] == ["0.5", "1e-4"]


def test_columns_fit_the_width_and_wide_shows_all(tmp_path, capsys):
    keys = [f"algorithm.section.key_{index}" for index in range(30)]
    for number in range(1, 31):
        lines = [f"{key}={number}" for key in dict.fromkeys((keys[0], keys[number - 1]))]
        record(tmp_path, number, overrides=["+experiment=shop", f"model.name={'x' * 80}{number}", *lines])
    assert RUNS.main([f"root={tmp_path}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 30 + 2  # no cell is wrapped
    assert max(map(len, lines)) <= 120
    assert keys[0] in lines[0]
    assert re.search(r"\d+ more differ: .*; --wide shows all", lines[-2])
    assert RUNS.main([f"root={tmp_path}", "--wide"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 30 + 1
    assert set(keys) <= set(lines[0].split())
    assert f"{'x' * 80}7" in lines[7]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--experiment", "shpo"], "no run has it (did you mean shop?)"),
        (["--tag", "x"], "--tag 'x': no run has it; known: none"),
        (["--best", "sucess"], "did you mean success?"),
        (["--metric", "success>high"], "expected a metric"),
        (["--metric", "success>1.2.3"], "expected a metric"),
        (["--since", "soon"], "expected a duration such as 90m"),
        (["tag", "shop", "a b"], "tag 'a b' is invalid"),
        (["tag", "shop", "../x"], "is invalid"),
        (["tag", "shop", "--remove", "x"], "has no tag 'x'; it has: none"),
        (["tag", "nothing", "x"], "there is no run 'nothing'"),
        (["note", "shop", " "], "the note has 0 characters"),
    ],
)
def test_mistakes_are_answered(root, arguments, message, capsys):
    assert RUNS.main([*arguments, f"root={root}"]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_runs(tmp_path, capsys):
    assert RUNS.main([f"root={tmp_path}"]) == 2
    assert "there is no run below" in capsys.readouterr().err


def test_times_and_conditions():
    assert parse_since("90m", 10_000.0) == 10_000.0 - 5400
    assert parse_since("2026-11-25", 0.0) == time.mktime((2026, 11, 25, 0, 0, 0, 0, 0, -1))
    assert Condition.parse("success >= 0.5") == Condition("success", ">=", 0.5)


def test_tags_and_notes_are_stored_and_mirrored_to_mlflow(tmp_path, capsys):
    with Tracker.open(tmp_path, TrackingSpec(), "shop") as tracker:
        pass
    run = RunRecord(tracker.run_id, "shop", 0, time.time(), "FINISHED")
    Records(tmp_path).write(run)
    place = f"root={tmp_path}"
    assert RUNS.main(["tag", run.short, "baseline", "v2", place]) == 0
    assert RUNS.main(["note", run.short, "same data", place]) == 0
    assert RUNS.main(["note", run.short, "more rounds", place, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {
        "run": run.id, "tags": ["baseline", "v2"], "notes": ["same data", "more rounds"], "mlflow": "updated",
    }  # fmt: skip
    tags = tracker.client.get_run(run.id).data.tags
    assert (tags["tag.baseline"], tags["tag.v2"]) == ("true", "true")
    assert tags["mlflow.note.content"] == "same data\n\nmore rounds"
    assert RUNS.main(["tag", run.short, "--remove", "v2", place]) == 0
    assert RUNS.main(["note", run.short, "--clear", place]) == 0
    tags = tracker.client.get_run(run.id).data.tags
    assert "tag.baseline" in tags
    assert not {"tag.v2", "mlflow.note.content"} & tags.keys()
    assert Labels(tmp_path).of(run).tags == ["baseline"]
    Records(tmp_path).forget(run)
    assert Labels(tmp_path).of(run).tags == []


def test_without_mlflow_the_labels_are_stored_and_the_reason_is_printed(root, capsys):
    assert RUNS.main(["tag", "shop", "baseline", f"root={root}"]) == 0
    assert "the tags are stored, but not in MLflow: there is no MLflow store below" in capsys.readouterr().err
    assert Labels(root).of(Records(root).get("shop")).tags == ["baseline"]


def test_a_note_needs_a_text(root, capsys):
    with pytest.raises(SystemExit):
        RUNS.main(["note", "shop", f"root={root}"])
    assert "--clear to remove the notes" in capsys.readouterr().err


def test_an_invalid_file_is_named(root):
    run = Records(root).get("shop")
    Labels(root).tag(run, ["x"])
    (root / "records" / "labels" / f"{run.id}.json").write_text("[1]")
    with pytest.raises(ResourceError, match="holds no valid tags"):
        Labels(root).of(run)
