"""`python -m flows.sweeps.elsewhere`: one point of a sweep, on the machine that `flows.sweeps.launcher` sent it to.

The point runs as with `flows.run`, below `<root>/points/<digest of the point>`, so that a repeated point resumes. Its
outcome, success or failure, is stored as an artifact of kind `point`:

    outcome.json        {"result": the result line} or {"error": type, message}
    records/ID.json     the record of the run, complete or partial
    report.html         the report, if MLflow stores it on this machine

The last line on standard output names the artifact, in the format of `flows.stage`.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from components.artifacts import Artifact, Store, stage_key
from components.artifacts.keys import json_digest
from components.compute.runners import error_to_json
from components.errors import EspalierError
from components.json_text import read_json
from components.specs import validate
from flows.experiment.spec import ExperimentSpec
from flows.history.records import FOLDER, Records
from flows.terminal.arguments import RootParser
from flows.terminal.interrupt import leave

VERSION = 1
OUTCOME, REPORT = "outcome.json", "report.html"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return exit code 0 if the outcome is stored, 1 if it could not be stored, 130 if interrupted."""
    parser = RootParser(prog="python -m flows.sweeps.elsewhere", description=__doc__.splitlines()[0], default=None)
    parser.add_argument("--request", type=Path, required=True, help="JSON file: spec, overrides, sweep, parent")
    options = parser.parse_args(arguments)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # all other output goes to the job's log
    try:
        artifact = play(read_json(options.request), options.root)
    except KeyboardInterrupt:
        return 130
    except EspalierError as error:
        print(json.dumps({"error": error_to_json(error)}), file=out)
        return 1
    print(json.dumps({"key": artifact.key, "digest": artifact.digest, "status": "ran"}), file=out)
    return 0


def play(request: Mapping[str, Any], root: Path) -> Artifact:
    """Run the point and return the stored artifact of its outcome. Raises KeyboardInterrupt and errors of the store."""
    root = root / "points" / json_digest({**request["spec"], "root": None})[:16]
    spec = validate(ExperimentSpec, {**request["spec"], "root": str(root)})
    if request["parent"] is not None:  # the sweep's run on an MLflow server
        id_file = root / "sweeps" / request["sweep"] / "mlflow_run_id"
        id_file.parent.mkdir(parents=True, exist_ok=True)
        id_file.write_text(request["parent"])
    records = Records(root)
    before = {run.id for run in records.all()}
    outcome = _outcome(spec, request)
    key = stage_key("point", VERSION, {"attempt": uuid.uuid4().hex}, {}, spec.seed)
    store = Store(root / "artifacts", spec.store)
    with store.draft(key, stage="point", kind="point", schema_version=VERSION, inputs={}) as draft:
        (draft.path / OUTCOME).write_text(json.dumps(outcome) + "\n", encoding="utf-8")
        (draft.path / FOLDER).mkdir()
        for run in records.all():
            if run.id not in before:
                shutil.copy(records.folder / f"{run.id}.json", draft.path / FOLDER)
        if (report := Path(outcome.get("result", {}).get("report", ""))).is_file():
            shutil.copy(report, draft.path / REPORT)
    artifact = store.find(key)
    assert artifact is not None
    return artifact


def _outcome(spec: ExperimentSpec, request: Mapping[str, Any]) -> dict[str, Any]:
    from flows.session import run

    try:
        return {"result": run(spec, overrides=request["overrides"], sweep=request["sweep"])}
    except EspalierError as error:
        return {"error": error_to_json(error)}
    except Exception as error:  # the outcome gets the message, the log gets the stack trace
        logging.getLogger(__name__).exception("the point failed")
        return {"error": {"type": type(error).__name__, "message": str(error)}}


if __name__ == "__main__":
    leave(main)
