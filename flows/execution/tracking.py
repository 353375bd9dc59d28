"""MLflow runs: one for each run of a flow, and a parent run for each sweep."""

from __future__ import annotations

import fcntl
import logging
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.artifacts import lock_file
from components.errors import ResourceError
from components.redaction import mask_text
from flows.experiment.spec import ExperimentSpec
from flows.history.records import Records, RecordWriter, RunRecord, recording
from flows.terminal.arguments import CODE

if TYPE_CHECKING:
    from components.tracking.mlflow_tracker import Tracker

logger = logging.getLogger(__name__)

OWNER = "espalier.owner"
"""Tag of an MLflow run: the process that must end it."""
OWNERS = "mlflow/owners"
"""Folder of the lock files of owners, below the root."""
_OWNED: dict[tuple[str, str, int], str] = {}
"""Names of this process, by root, store and process id: a forked process owns nothing yet."""
PARENT_LIMIT = 120.0
"""Seconds to wait for another run of the sweep that creates the parent run."""


@contextmanager
def recorded(
    spec: ExperimentSpec, overrides: Sequence[str], resumed: str = ""
) -> Iterator[tuple[Tracker, RecordWriter]]:
    """Open the MLflow run and the record of a run without Prefect. resumed: id of an earlier run to continue."""
    records = Records(spec.root)
    with track(spec, overrides, None, resumed) as tracker:
        if resumed:
            record = records.get(resumed)
            record.status, record.ended = "RUNNING", None
        else:
            close_dead(records, tracker, spec.tracking.uri)
            record = new_record(spec, overrides, tracker.run_id)
        with recording(Path(spec.root), record) as writer:
            yield tracker, writer


def new_record(spec: ExperimentSpec, overrides: Sequence[str], run_id: str, **fields: Any) -> RunRecord:
    """Return the record of a run at its start. fields: further ones of the record."""
    from components.tracking.provenance import git_commit, package_versions

    return RunRecord(
        run_id,
        spec.name,
        spec.seed,
        time.time(),
        spec=spec.model_dump(mode="json", by_alias=True),
        overrides=list(overrides),
        git_commit=git_commit(CODE),
        packages=package_versions(),
        **fields,
    )


@contextmanager
def track(spec: ExperimentSpec, overrides: Sequence[str], sweep: str | None, resumed: str = "") -> Iterator[Tracker]:
    """Open the MLflow run with its config, versions and git commit. It ends as FINISHED, FAILED, or KILLED after
    Ctrl-C. A run of a sweep is a child of the sweep's run, which the first run of the sweep creates. resumed: id of an
    earlier run to continue."""
    from components.tracking.mlflow_tracker import Tracker
    from components.tracking.provenance import git_commit, package_versions

    root = Path(spec.root)
    parent = parent_run(root, spec, sweep) if sweep else None
    tags = {"seed": str(spec.seed), OWNER: owner(root, spec), **({"sweep": sweep} if sweep else {})}
    name = " ".join(overrides) if sweep and overrides else None
    with Tracker.open(
        root, spec.tracking, spec.name, parent_run_id=parent, tags=tags, run_name=name, resumed=resumed
    ) as tracker:
        if resumed:
            tracker.client.update_run(resumed, "RUNNING")
            tracker.set_tags(tags)
        else:
            tracker.log_config(
                spec.model_dump(mode="json", by_alias=True),
                overrides,
                versions=package_versions(),
                git_commit=git_commit(CODE),
            )
        status = "FAILED"
        try:
            yield tracker
            status = "FINISHED"
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            if parent is not None:  # each run of the sweep sets it; the last one wins
                tracker.client.set_terminated(parent, status)


def close_dead(records: Records, tracker: Tracker, uri: str | None = None) -> list[RunRecord]:
    """Mark runs of killed processes as KILLED in MLflow, also those without a record: parents of sweeps, and runs
    killed before the record was written. Close the records, except those of Prefect runs, which are returned: the
    caller closes them after it has updated Prefect. uri: `tracking.uri`."""
    from mlflow.exceptions import MlflowException

    prefect_runs = []
    for run in records.dead():
        logger.info("run %s was killed; its finished stages are reused", run.id)
        try:
            tracker.client.set_terminated(run.id, "KILLED", end_time=int(records.last_sign(run) * 1000))
        except MlflowException as error:  # deleted manually, or in another store
            logger.info("run %s is not in MLflow: %s", run.id, error)
        if run.prefect_flow_run:
            prefect_runs.append(run)
        else:
            records.close(run)
    _close_owned(records.root, tracker, uri)
    return prefect_runs


def owner(root: Path, spec: ExperimentSpec) -> str:
    """Return the name of this process as the owner of MLflow runs. It holds a lock file of this name until it ends, and
    the file has the address of the store."""
    uri = spec.tracking.uri or ""
    key = (str(root), uri, os.getpid())
    if key not in _OWNED:
        folder = root / OWNERS
        folder.mkdir(parents=True, exist_ok=True)
        name = uuid.uuid4().hex
        part = folder / f".{name}"
        lock = os.open(part, os.O_WRONLY | os.O_CREAT, 0o600)  # held until the process ends
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, mask_text(uri).encode())
        part.rename(folder / name)  # appears locked
        _OWNED[key] = name
    return _OWNED[key]


def _close_owned(root: Path, tracker: Tracker, uri: str | None) -> None:
    """Mark the RUNNING runs of processes that have ended as KILLED. Runs in another store wait for a run there."""
    from mlflow.exceptions import MlflowException

    for path in sorted((root / OWNERS).glob("[0-9a-f]*")):
        try:
            with open(path, encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if file.read() != mask_text(uri or ""):
                    continue
            for run in tracker.running(OWNER, path.name):
                tracker.client.set_terminated(run, "KILLED", end_time=int(path.stat().st_mtime * 1000))
            path.unlink(missing_ok=True)
        except BlockingIOError:
            continue  # the process is alive
        except (OSError, MlflowException) as error:
            logger.info("runs of %s are not closed in MLflow: %s", path.name, mask_text(str(error)))


def conclude_sweep(
    root: Path, spec: ExperimentSpec, sweep: str, *, failed: bool, metrics: Mapping[str, float], files: Sequence[Path]
) -> None:
    """Write the status (FINISHED or FAILED), metrics and files of a sweep to its MLflow run. Do nothing if no run of
    the sweep reached MLflow. Errors of the store are logged as a warning."""
    id_file = root / "sweeps" / sweep / "mlflow_run_id"
    if not id_file.is_file():
        return
    from mlflow.exceptions import MlflowException

    from components.tracking.store import connect, local_uri

    parent = id_file.read_text()
    try:
        client = connect(spec.tracking.resolved_uri() or local_uri(root), root / "mlflow" / "artifacts")
        for name, value in metrics.items():
            client.log_metric(parent, name, value)
        for file in files:
            client.log_artifact(parent, str(file))
        client.set_terminated(parent, "FAILED" if failed else "FINISHED")
    except (MlflowException, ResourceError) as error:
        logger.warning("the result of the sweep could not be written to MLflow: %s", mask_text(str(error)))


def parent_run(root: Path, spec: ExperimentSpec, sweep: str) -> str:
    """Return the id of the sweep's MLflow run. The first run of the sweep creates it; safe for concurrent starts."""
    from components.tracking.mlflow_tracker import Tracker

    folder = root / "sweeps" / sweep
    folder.mkdir(parents=True, exist_ok=True)
    id_file = folder / "mlflow_run_id"
    with open(folder / ".lock", "a+") as lock:
        lock_file(lock, f"the MLflow run of sweep {sweep}", PARENT_LIMIT)
        if not id_file.is_file():
            parent = Tracker.open(
                root,
                spec.tracking,
                spec.name,
                tags={"sweep": sweep, OWNER: owner(root, spec)},
                run_name=f"sweep {sweep}",
            )
            id_file.write_text(parent.run_id)
        return id_file.read_text()
