"""`python -m flows.bisection.step`: a run of a bisection, in a process of its own.

The request is a JSON file with the spec and overrides of the run. The last line on standard output is one JSON object:
`run_id`, or `error`. All other output goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from components.errors import ResourceError
from components.json_text import parse_json, read_json
from flows.terminal.exit_codes import describe_error
from flows.terminal.interrupt import leave


def run_step(spec: Mapping[str, Any], overrides: Sequence[str], log: Path) -> tuple[str | None, str]:
    """Run an experiment in a process of its own. Return the id of its run, or None and the message of its failure.

    log: file that its output is appended to. Raises KeyboardInterrupt if it was interrupted."""
    from flows.execution.executor import environment

    log.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="bisect-") as folder, open(log, "a", encoding="utf-8") as errors:
        request = Path(folder) / "request.json"
        request.write_text(json.dumps({"spec": dict(spec), "overrides": list(overrides)}), encoding="utf-8")
        command = [sys.executable, "-m", "flows.bisection.step", "--request", str(request)]
        completed = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL, env=environment(), check=False
        )
    if completed.returncode == 130:
        raise KeyboardInterrupt
    try:
        answer = parse_json(completed.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        answer = {"error": f"ended with exit code {completed.returncode}"}
    if "run_id" not in answer:
        return None, f"{answer.get('error')} (log: {log})"
    return str(answer["run_id"]), ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return exit code 0 if the run finished, 1 if it failed, 130 if interrupted."""
    parser = argparse.ArgumentParser(prog="python -m flows.bisection.step", description=__doc__.splitlines()[0])
    parser.add_argument("--request", type=Path, required=True, help="JSON file: spec, overrides")
    options = parser.parse_args(arguments)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # all other output goes to the log
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        print(json.dumps({"run_id": _run(read_json(options.request))["run_id"]}), file=out)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if (described := describe_error(error)) is None:
            raise
        print(json.dumps({"error": described[0]}), file=out)
        return 1
    return 0


def _run(request: Mapping[str, Any]) -> dict[str, Any]:
    from components.specs import validate
    from flows.experiment.prerequisites import check_keys
    from flows.experiment.spec import ExperimentSpec
    from flows.session import run

    spec = validate(ExperimentSpec, request["spec"])
    check_keys(spec)
    result = run(spec, overrides=request["overrides"])
    if result["pruned"]:
        raise ResourceError("the run was pruned")
    return result


if __name__ == "__main__":
    leave(main)
