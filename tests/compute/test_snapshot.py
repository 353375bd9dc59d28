"""Code snapshot for another machine."""

import json
import subprocess

import pytest

from components.compute import snapshot
from components.errors import ResourceError


@pytest.fixture
def code(tmp_path):
    folder = tmp_path / "code"
    (folder / "flows").mkdir(parents=True)
    (folder / "flows" / "a.py").write_text("A = 1\n")
    (folder / ".gitignore").write_text("runs/\n*.secret\n")
    (folder / "runs").mkdir()
    (folder / "runs" / "big").write_text("x")
    (folder / "key.secret").write_text("hidden")
    git = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "first"], check=True)
    return folder


def test_snapshot_contains_tracked_files_and_changes(code, tmp_path):
    clean = snapshot.take_snapshot(code, [], tmp_path / "out")
    assert {path.name for path in clean.path.rglob("*") if path.is_file()} == {".gitignore", "a.py", "snapshot.json"}
    assert clean.changed == ()
    (code / "flows" / "a.py").write_text("A = 2\n")
    (code / "flows" / "new.py").write_text("B = 1\n")
    changed = snapshot.take_snapshot(code, [], tmp_path / "out")
    assert changed.digest != clean.digest
    assert changed.commit == clean.commit
    assert changed.changed == ("flows/a.py", "flows/new.py")
    assert (changed.path / "flows" / "new.py").is_file()
    record = json.loads((changed.path / "snapshot.json").read_text())
    assert "+A = 2" in record["diff"]


def test_equal_code_is_copied_once(code, tmp_path):
    first = snapshot.take_snapshot(code, [], tmp_path / "out")
    stamp = first.path.stat().st_mtime_ns
    assert snapshot.take_snapshot(code, [], tmp_path / "out") == first
    assert first.path.stat().st_mtime_ns == stamp


def test_snapshot_contains_user_packages(code, tmp_path, monkeypatch):
    (tmp_path / "mine" / "my_worlds").mkdir(parents=True)
    (tmp_path / "mine" / "my_worlds" / "__init__.py").write_text("C = 3\n")
    (tmp_path / "mine" / "my_module.py").write_text("D = 4\n")
    monkeypatch.syspath_prepend(str(tmp_path / "mine"))
    uploaded = snapshot.take_snapshot(code, ["my_worlds.inner", "my_module", "json"], tmp_path / "out")
    assert (uploaded.path / "my_worlds" / "__init__.py").read_text() == "C = 3\n"
    assert (uploaded.path / "my_module.py").is_file()


def test_large_data_in_the_code_is_rejected(code, tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "LIMIT", 100)
    (code / "data.bin").write_bytes(b"x" * 200)
    with pytest.raises(ResourceError, match=r"largest file is data\.bin: list files that are not code in \.gitignore"):
        snapshot.take_snapshot(code, [], tmp_path / "out")
