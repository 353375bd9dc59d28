"""Databases of Prefect and MLflow with all tables and no runs, made once and kept between sessions.

The first start in an empty root migrates both: hundreds of steps, 4 s of processor time. Tests that do not ask about a
first start begin with these.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sqlite3
import tempfile
from importlib import metadata
from pathlib import Path

CACHE = Path(__file__).resolve().parents[1] / ".pytest_cache"
PREFECT, MIGRATED = "prefect/prefect.db", "prefect/.migrated"
MLFLOW = "mlflow/mlflow.db"


def give_databases(root: Path) -> None:
    """Put the databases into a root that has none."""
    shutil.copytree(_made(), root, dirs_exist_ok=True)


def give_mlflow_database(database: Path) -> None:
    shutil.copy(_made() / MLFLOW, database)


@functools.cache
def _made() -> Path:
    """Return the folder of the databases of the installed versions, which another process may be making."""
    from components.artifacts import lock_file

    versions = "-".join(metadata.version(name) for name in ("prefect", "mlflow"))
    folder = CACHE / f"databases-{versions}"
    CACHE.mkdir(exist_ok=True)
    with open(f"{folder}.lock", "a+") as lock:
        lock_file(lock, "the databases of the tests", 600)
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as drafts:
                _make(Path(drafts) / "root", Path(drafts) / "databases")
                os.replace(Path(drafts) / "databases", folder)
    return folder


def _make(root: Path, databases: Path) -> None:
    from components.tracking import store
    from flows.orchestration import server

    starting = server.start(root)
    store.connect(store.local_uri(root), root)
    starting.url()
    starting.stop()
    for name in (PREFECT, MLFLOW):
        (databases / name).parent.mkdir(parents=True)
        with (
            contextlib.closing(sqlite3.connect(root / name)) as made,
            contextlib.closing(sqlite3.connect(databases / name)) as copy,
        ):
            made.backup(copy)
    shutil.copy(root / MIGRATED, databases / MIGRATED)
