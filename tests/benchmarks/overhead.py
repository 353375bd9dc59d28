"""What orchestration costs: the same stages as a run of the flow, and as plain calls.

    python tests/benchmarks/overhead.py [--experiment smoke] [--json] [OVERRIDES]

Two fresh processes, one after the other, each with an empty store and the converted weights at hand. `flow` is
`python -m flows.run`: Hydra, Prefect with its server, MLflow, the report. `plain` composes the same spec and calls the
same stage functions in the same order, writing into plain folders: no store, no keys, no Prefect, no MLflow. Both are
wall-clock times of a process, start and imports included. `overhead_seconds` is the difference, `overhead_fraction`
that difference over the plain time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CODE = Path(__file__).resolve().parents[2]

PLAIN = """
import sys
from dataclasses import replace
from pathlib import Path

from components.artifacts import Artifact, Draft
from components.specs import validate
from flows.experiment.compose import compose
from flows.terminal.console import hush
from flows.recipes.run import Run
from flows.stages import STAGES
from flows.stages.base import Context

hush()
spec = compose(sys.argv[1:])
context = Context.at(spec.root)
made = {}

def call(label, step, request):
    stage = STAGES[request.stage]
    folder = Path(spec.root) / "plain" / label
    scratch = folder / "scratch"
    scratch.mkdir(parents=True)
    part = validate(stage.spec, request.spec, allow=request.allow)
    inputs = {name: made[key] for name, key in request.inputs.items()}
    own = replace(context, key=label, seed=request.seed, scratch=scratch)
    draft = Draft(folder)
    metrics = stage.function(part, inputs, draft, own)
    made[label] = Artifact(label, stage.kind, stage.name, 1, label, folder, metrics, {}, (), 0.0)
    return made[label]

Run(spec, call).execute()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures what Prefect, MLflow, specs and artifacts cost.")
    parser.add_argument("--experiment", default="smoke", help="smoke or quickstart, or any other experiment")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line, nothing else")
    options, overrides = parser.parse_known_args()
    overrides = [f"+experiment={options.experiment}", *overrides]
    with tempfile.TemporaryDirectory(prefix="espalier-overhead-") as folder:
        _prepare(Path(folder), overrides)
        plain = _timed([sys.executable, "-c", PLAIN, *overrides, f"root={folder}/a"])
        flow = _timed([sys.executable, "-m", "flows.run", *overrides, f"root={folder}/b"])
    result = {
        "experiment": options.experiment,
        "flow_seconds": round(flow, 2),
        "plain_seconds": round(plain, 2),
        "overhead_seconds": round(flow - plain, 2),
        "overhead_fraction": round((flow - plain) / plain, 4),
    }
    if not options.json:
        print(f"plain calls {plain:.1f} s, flow {flow:.1f} s: {flow - plain:+.1f} s, {(flow - plain) / plain:+.1%}")
    print(json.dumps(result))


def _prepare(folder: Path, overrides: list[str]) -> None:
    """Converts the weights once for both, which is no orchestration."""
    code = (
        "import sys; from pathlib import Path; from flows.experiment.compose import compose; "
        "from components.models import weights;"
        "weights.prepare(compose(sys.argv[2:]).model, Path(sys.argv[1]))"
    )
    _timed([sys.executable, "-c", code, f"{folder}/models", *overrides])
    for root in ("a", "b"):
        (folder / root).mkdir()
        (folder / root / "models").symlink_to(folder / "models")


def _timed(command: list[str]) -> float:
    start = time.monotonic()
    done = subprocess.run(command, cwd=CODE, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command[:3])} failed:\n{done.stderr[-4000:]}")
    return time.monotonic() - start


if __name__ == "__main__":
    main()
