"""The MLflow run of a flow run: one each, children only in sweeps."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from components.artifacts import lock_file
from components.errors import ResourceError
from components.redaction import mask_text
from flows.experiment.spec import CODE, ExperimentSpec
from flows.history.records import Records, RunRecord

if TYPE_CHECKING:
    from components.tracking.mlflow_tracker import Tracker

logger = logging.getLogger(__name__)

PARENT_LIMIT = 120.0
"""Seconds to wait for another run of the sweep that makes the parent."""


@contextmanager
def track(spec: ExperimentSpec, overrides: Sequence[str], sweep: str | None) -> Iterator[Tracker]:
    """Opens the run with its config, versions and git commit. It ends FINISHED, FAILED, or KILLED by Ctrl-C; a run of a
    sweep is a child of the sweep's run, which the first of them makes."""
    from components.tracking.mlflow_tracker import Tracker
    from components.tracking.provenance import git_commit, package_versions

    root = Path(spec.root)
    parent = parent_run(root, spec, sweep) if sweep else None
    tags = {"seed": str(spec.seed), **({"sweep": sweep} if sweep else {})}
    name = " ".join(overrides) if sweep and overrides else None
    with Tracker.open(root, spec.tracking, spec.name, parent_run_id=parent, tags=tags, run_name=name) as tracker:
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
            if parent is not None:  # each run of the sweep says so, the last one stands
                tracker.client.set_terminated(parent, status)


def close_dead(records: Records, tracker: Tracker) -> list[RunRecord]:
    """Ends the runs that were killed before they could say so, in MLflow. Returns those that Prefect knows: their
    records are to be closed when it has been told; the others are closed here."""
    from mlflow.exceptions import MlflowException

    known = []
    for run in records.dead():
        logger.info("run %s was killed; what it had finished is used", run.id)
        try:
            tracker.client.set_terminated(run.id, "KILLED", end_time=int(records.last_sign(run) * 1000))
        except MlflowException as error:  # deleted by hand, or in another store
            logger.info("MLflow does not know run %s: %s", run.id, error)
        if run.prefect_flow_run:
            known.append(run)
        else:
            records.close(run)
    return known


def conclude_sweep(
    root: Path, spec: ExperimentSpec, sweep: str, *, failed: bool, metrics: Mapping[str, float], files: Sequence[Path]
) -> None:
    """What became of a sweep, into its own run: FINISHED or FAILED, figures, files. A store that fails costs a warning;
    of a sweep none of whose runs came as far as MLflow, nothing is said."""
    note = root / "sweeps" / sweep / "mlflow_run_id"
    if not note.is_file():
        return
    from mlflow.exceptions import MlflowException

    from components.tracking.store import connect, local_uri

    parent = note.read_text()
    try:
        client = connect(spec.tracking.resolved_uri() or local_uri(root), root / "mlflow" / "artifacts")
        for name, value in metrics.items():
            client.log_metric(parent, name, value)
        for file in files:
            client.log_artifact(parent, str(file))
        client.set_terminated(parent, "FAILED" if failed else "FINISHED")
    except (MlflowException, ResourceError) as error:
        logger.warning("MLflow was not told what became of the sweep: %s", mask_text(str(error)))


def parent_run(root: Path, spec: ExperimentSpec, sweep: str) -> str:
    """Id of the sweep's own run, made by whichever of its runs comes first; also when they start at the same time."""
    from components.tracking.mlflow_tracker import Tracker

    folder = root / "sweeps" / sweep
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / "mlflow_run_id"
    with open(folder / ".lock", "a+") as lock:
        lock_file(lock, f"the MLflow run of sweep {sweep}", PARENT_LIMIT)
        if not note.is_file():
            parent = Tracker.open(root, spec.tracking, spec.name, tags={"sweep": sweep}, run_name=f"sweep {sweep}")
            note.write_text(parent.run_id)
        return note.read_text()
