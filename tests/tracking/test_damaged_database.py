"""Damaged MLflow database: one sentence that says what to do."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from components.errors import ResourceError
from components.tracking.spec import TrackingSpec
from components.tracking.store import local_uri
from tests.flows.processes import python

pytestmark = pytest.mark.security


def other_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as opened:
        opened.execute("CREATE TABLE t (a TEXT)")
        opened.executemany("INSERT INTO t VALUES (?)", [("x" * 500,)] * 200)
        opened.commit()


def broken_pages(path: Path) -> None:
    other_database(path)
    data = bytearray(path.read_bytes())
    data[4096 : 4096 * 3] = b"\xff" * 8192
    path.write_bytes(data)


DAMAGE = {
    "no database": lambda path: path.write_bytes(b"no database at all" * 1000),
    "nested text": lambda path: path.write_bytes(b"[" * 100_000),
    "empty": lambda path: path.write_bytes(b""),
    "cut off": lambda path: (other_database(path), path.write_bytes(path.read_bytes()[:5000])),
    "broken pages": broken_pages,
    "another database": other_database,
    "folder": lambda path: path.mkdir(),
}


def test_a_damaged_database_is_named_with_a_remedy(tmp_path):
    from components.tracking.mlflow_tracker import Tracker

    for name, damage in DAMAGE.items():
        path = tmp_path / name / "mlflow" / "mlflow.db"
        path.parent.mkdir(parents=True)
        damage(path)
        with pytest.raises(ResourceError, match=r"MLflow's database .*mlflow\.db cannot be used: .*move it away"):
            Tracker.open(tmp_path / name, TrackingSpec(), "shop")


def test_damaged_database_is_reported_before_the_run(tmp_path):
    path = Path(local_uri(tmp_path).removeprefix("sqlite:///"))
    path.parent.mkdir()
    broken_pages(path)
    done = python("-m", "flows.run", "+experiment=smoke", f"root={tmp_path}")
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "cannot be used" in done.stderr
    assert "move it away" in done.stderr
    assert not (tmp_path / "logs").exists()
