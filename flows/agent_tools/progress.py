"""Progress of a run for an agent, from its record: stages, rounds, decisions, result."""

from __future__ import annotations

import socket
from typing import Any

from components.errors import ResourceError
from components.redaction import mask
from flows.agent_tools.jobs import Job
from flows.history.records import Records, RunRecord


def records_of(job: Job) -> list[RunRecord]:
    """Return the records of a job's runs, latest first: several of a sweep, none before the first run and of an
    evaluation."""
    process = f"process {job.pid} on {socket.gethostname()}"
    return [run for run in Records(job.root).all() if run.process == process and run.started >= job.started - 1]


def run_of(job: Job) -> str:
    """Return the id of a job's run. Raises ResourceError if it has none."""
    if records := records_of(job):
        return records[0].id
    result = job.result()
    if result is not None and isinstance(result.get("run_id"), str):
        return str(result["run_id"])  # nothing has changed since that run
    raise ResourceError(f"{job.id} has no run to compare: it is {job.state}")


def progress(run: RunRecord, records: Records) -> dict[str, Any]:
    """Return the progress of a run as JSON data."""
    data: dict[str, Any] = {
        "run": run.id,
        "experiment": run.name,
        "seed": run.seed,
        "state": records.status(run),
        "round": max((stage.step for stage in run.stages), default=0),
        "rounds": run.spec.get("rounds"),
        "stages": {stage.label: f"{stage.status}, {stage.seconds:.1f} s" for stage in run.stages},
        "decisions": [{"kind": notice.kind, "round": notice.step, "message": notice.message} for notice in run.notices],
        "result": run.result,
    }
    masked: dict[str, Any] = mask(data)
    return masked
