"""`python -m flows.sweeps.elsewhere`: one point of a sweep on the machine that `flows.sweeps.launcher` sent it to.

The run is that of `flows.run`, below `<root>/points/<digest of the point>`, where the same point finds what it left
unfinished. What became of it, also where it failed, goes into the store as an artifact of the kind `point`:

    outcome.json        {"result": the result line} or {"error": type, message}
    records/ID.json     the record of the run, as far as it came
    report.html         where MLflow keeps the report on this machine

The last line on standard output names the artifact, as `flows.stage` does for a stage.
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
    """Exit code 0 where the outcome is in the store, 1 where it could not be kept there, 130 where it was stopped."""
    parser = RootParser(prog="python -m flows.sweeps.elsewhere", description=__doc__.splitlines()[0], default=None)
    parser.add_argument("--request", type=Path, required=True, help="JSON file: spec, overrides, sweep, parent")
    options = parser.parse_args(arguments)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever else is said goes to the log of the job
    try:
        kept = play(read_json(options.request), options.root)
    except KeyboardInterrupt:
        return 130
    except EspalierError as error:
        print(json.dumps({"error": error_to_json(error)}), file=out)
        return 1
    print(json.dumps({"key": kept.key, "digest": kept.digest, "status": "ran"}), file=out)
    return 0


def play(request: Mapping[str, Any], root: Path) -> Artifact:
    """Runs the point and keeps what became of it. Raises what the store raises, and KeyboardInterrupt."""
    root = root / "points" / json_digest({**request["spec"], "root": None})[:16]
    spec = validate(ExperimentSpec, {**request["spec"], "root": str(root)})
    if request["parent"] is not None:  # the run of the sweep, on an MLflow server
        note = root / "sweeps" / request["sweep"] / "mlflow_run_id"
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(request["parent"])
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
    kept = store.find(key)
    assert kept is not None
    return kept


def _outcome(spec: ExperimentSpec, request: Mapping[str, Any]) -> dict[str, Any]:
    from flows.session import run

    try:
        return {"result": run(spec, overrides=request["overrides"], sweep=request["sweep"])}
    except EspalierError as error:
        return {"error": error_to_json(error)}
    except Exception as error:  # whatever ends the point is told; the log has the whole story
        logging.getLogger(__name__).exception("the point failed")
        return {"error": {"type": type(error).__name__, "message": str(error)}}


if __name__ == "__main__":
    leave(main)
