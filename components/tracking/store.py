"""Default MLflow store without a server: SQLite under the run root.

Creating the tables runs about a hundred migrations, and two processes that run them on one file corrupt it. So the
database is created under a lock in a temporary file and renamed when it is complete: an existing database is complete,
and opening it needs no lock.

MLflow's side effects are disabled here too: no usage statistics are sent, and its log messages reach the console only
as warnings, through the handlers of the calling program.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import socket
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from components.artifacts import lock_file
from components.errors import ResourceError
from components.redaction import mask_text
from components.tracking.provenance import command_path

if TYPE_CHECKING:
    from mlflow import MlflowClient

_SQLITE = "sqlite:///"
_UI = "LITELLM_LOCAL_MODEL_COST_MAP=True MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false {mlflow} ui --workers 1"
"""Command of MLflow's UI. MLflow 3.17 imports litellm for its job runner, and that import hangs without a network."""
_CREATION_LIMIT = 180.0
"""Seconds to wait for another process that creates the database."""
_CONNECT_LIMIT = 10.0
"""Seconds for a connection to a tracking server."""


def local_uri(root: Path) -> str:
    """Return the URI of the run root's own database; absolute, so that it is valid in every working directory."""
    return f"{_SQLITE}{root.absolute()}/mlflow/mlflow.db"


def ui_command(uri: str) -> str:
    """Return the command that shows the runs of a store in a browser."""
    if not uri.startswith(_SQLITE):
        return f"open {mask_text(uri)}"
    mlflow = shlex.quote(command_path("mlflow"))
    return f"{_UI.format(mlflow=mlflow)} --backend-store-uri {shlex.quote(mask_text(uri))}"


def connect(uri: str, artifacts: Path) -> MlflowClient:
    """Return a client of the store at `uri`; create a SQLite database that does not exist, with `artifacts` as its
    default folder for files. Raise ResourceError if the store cannot be used, WaitTimeout if another process does not
    finish creating it."""
    quiet()
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    if uri.startswith(_SQLITE):
        database = Path(uri.removeprefix(_SQLITE)).absolute()
        uri = f"{_SQLITE}{database}"
        _ensure_database(database, artifacts)
    elif uri.startswith(("http://", "https://")):
        _check_reachable(uri)
    try:
        return MlflowClient(tracking_uri=uri, registry_uri=uri)
    except MlflowException as error:
        raise ResourceError(mask_text(f"The MLflow store at {uri} cannot be used: {error}")) from error


def check(uri: str) -> None:
    """Raise ResourceError if `uri` names an existing SQLite database that cannot be used. Does not import
    MLflow."""
    if uri.startswith(_SQLITE) and (database := Path(uri.removeprefix(_SQLITE)).absolute()).exists():
        _check_database(database)


def _check_database(database: Path) -> None:
    try:
        with contextlib.closing(
            sqlite3.connect(f"file:{quote(str(database))}?mode=rw", uri=True, timeout=30)
        ) as connection:
            problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if problem == "ok":
                connection.execute("SELECT version_num FROM alembic_version").fetchall()
                return
    except sqlite3.OperationalError as error:
        if "locked" in str(error):  # another process is writing to it
            return
        problem = str(error)
    except sqlite3.DatabaseError as error:
        problem = str(error)
    raise ResourceError(
        f"MLflow's database {database} cannot be used: {' '.join(problem.split())[:300]}. It holds MLflow's records of "
        f"past runs, but no results. Restore a copy, or move it away (mv {database} {database}.damaged): the next run "
        "creates a new one"
    )


def quiet() -> None:
    """Disable usage statistics, progress bars and links on stdout, and pass MLflow's warnings to the program's own log
    handlers. Environment variables set by the user take precedence."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # `outbox` retries, without blocking a run
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    import mlflow.telemetry  # installs log handlers, which are removed below

    mlflow.telemetry.set_telemetry_client()  # drops a client created by an earlier import of mlflow
    for name in ("mlflow", "alembic"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.setLevel(logging.WARNING)
        logger.propagate = True


def _ensure_database(database: Path, artifacts: Path) -> None:
    if database.exists():
        _check_database(database)
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    with database.with_suffix(".lock").open("a+") as file:  # closing the file releases the lock
        lock_file(file, f"the creation of {database}", _CREATION_LIMIT)
        if not database.exists():
            _create_database(database, artifacts)


def _create_database(database: Path, artifacts: Path) -> None:
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
    from sqlalchemy import Engine, event

    def unsynced(connection: object, _record: object) -> None:
        if isinstance(connection, sqlite3.Connection):
            (_, _, file), *_ = connection.execute("PRAGMA database_list")
            if file == str(draft.absolute()):
                connection.execute("PRAGMA synchronous = OFF")

    draft = database.with_suffix(".draft")
    draft.unlink(missing_ok=True)  # left by a process that died while creating it
    event.listen(Engine, "connect", unsynced)  # each migration would wait for the disk: seconds in all
    try:
        store = SqlAlchemyStore(f"{_SQLITE}{draft}", artifacts.absolute().as_uri())
    finally:
        event.remove(Engine, "connect", unsynced)
    store.engine.dispose()
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(draft, database)


def _check_reachable(uri: str) -> None:
    """Raise ResourceError at once if no server listens: MLflow itself would retry for minutes."""
    parts = urlsplit(uri)
    address = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
    try:
        socket.create_connection(address, timeout=_CONNECT_LIMIT).close()
    except OSError as error:
        raise ResourceError(
            f"No MLflow server responds at {mask_text(uri)} ({mask_text(str(error))}). Start it, correct tracking.uri, "
            "or leave tracking.uri out to store the run's records under the run root."
        ) from error
