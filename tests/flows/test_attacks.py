"""Records and manifests that somebody has written to, met by the commands that read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from components.artifacts import MANIFEST
from components.errors import SpecError
from components.specs import validate
from flows.experiment.spec import ExperimentSpec
from flows.history.records import Records
from flows.terminal.exit_codes import describe_error
from tests.flows.pretend import pretend
from tests.flows.processes import python
from tests.flows.test_online_rl import DATA

pytestmark = pytest.mark.security

NESTED = b"[" * 200_000
STEER = "\x1b]0;owned\x07\x1b[2J"


def record_path(root: Path) -> Path:
    return next((root / "records").glob("*.json"))


def change(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_record_that_is_no_json_object_is_left_out(tmp_path, caplog):
    run = pretend(tmp_path, rounds=1)
    for text in (NESTED, b'{"stages":' * 50_000, b"[]", b"null", b"\xff", b"5"):
        (tmp_path / "records" / "other.json").write_bytes(text)
        assert [one.id for one in Records(tmp_path).all()] == [run.id], text[:20]
        assert "other.json is not a valid record of a run and is skipped" in caplog.text
        caplog.clear()


def test_a_record_with_values_of_another_form_is_left_out(tmp_path):
    pretend(tmp_path, rounds=1)
    path = record_path(tmp_path)
    record = path.read_text()
    start, *_, end = json.loads(record)["stages"]
    no_paths = [  # a key is no path
        {**start, "key": "../../victim"},
        {**end, "request": {**end["request"], "inputs": {"policy": "/etc"}}},
        {**start, "request": {"stage": "collect"}},
    ]
    for changes in (
        {"id": "../../victim"}, {"id": "other"}, {"id": 5}, {"name": ["x"]}, {"started": "soon"}, {"stages": 5},
        {"stages": [5]}, {"spec": []}, {"notices": [{"kind": "x"}]}, {"version": "1"}, {"version": None},
        *({"stages": [stage]} for stage in no_paths),
    ):  # fmt: skip
        change(path, **changes)
        assert Records(tmp_path).all() == [], changes
        path.write_text(record)
    change(path, stages=[start, end])
    assert len(Records(tmp_path).all()) == 1


def test_what_a_record_or_a_manifest_says_does_not_steer_the_terminal(tmp_path):
    run = pretend(tmp_path, rounds=1)
    change(record_path(tmp_path), name=f"test{STEER}", overrides=[f"a={STEER}"])
    assert STEER[:1] not in Records(tmp_path).describe(Records(tmp_path).all()[0])
    manifest = tmp_path / "artifacts" / run.stage("train[1]").key / MANIFEST
    data = json.loads(manifest.read_text())
    data["spec"]["algorithm"][f"x{STEER}"] = STEER
    manifest.write_text(json.dumps(data))
    done = python("-m", "flows.runs", "lineage", run.id, f"root={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert "owned" in done.stdout


def test_the_name_of_a_deployment_is_no_path():
    """It becomes the name of a file: NAME-f16.gguf, deployments/NAME.json."""
    for name in ("../../victim", "/victim", "a/b", "x\x1b[2J", ".hidden", ""):
        with pytest.raises(SpecError, match=r"deploy\.name"):
            validate(ExperimentSpec, {**DATA, "deploy": {"name": name}})


def test_a_full_disk_has_a_remedy_whoever_met_it():
    for error, words in (
        (OSError(28, "No space left on device"), "no space left on the disk of root"),
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), "no space left"),
        (OSError(27, "File too large"), "`ulimit -f`"),
        (RuntimeError("database or disk is full"), "no space left on the disk of root"),
    ):
        raised = ValueError("the stage failed")
        raised.__cause__ = error
        message, code = describe_error(raised)
        assert (code, words in message, "run the same command again to resume" in message) == (1, True, True), message
