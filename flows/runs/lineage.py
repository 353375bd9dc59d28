"""`python -m flows.runs lineage KEY|RUN@STEP|RUN`: ancestors and descendants of an artifact. With `--why` and RUN:
the reasons why the stages of a run were computed and not cached.

KEY is a prefix of any artifact's key. RUN@STEP is the checkpoint of a run after round STEP (0: after its warmup). RUN
alone is the run's final policy, which it deploys and which its `evaluate[final]` measured: with `deploy.policy=best`
the selected checkpoint. For a run without a final policy yet, RUN is its last checkpoint.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from components.errors import EspalierError
from flows.history.lineage_graph import Lineage
from flows.history.records import Records
from flows.history.trust import recorded_reader
from flows.planning.earlier_stages import explain
from flows.reporting.lineage import show, to_json
from flows.terminal.arguments import RootParser, add_store_trust
from flows.terminal.console import printable
from flows.terminal.exit_codes import print_message


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return exit code 0; 2 for an error in the command."""
    parser = RootParser(
        prog="python -m flows.runs lineage", description="Shows the ancestors and the descendants of an artifact."
    )
    parser.add_argument(
        "artifact",
        metavar="KEY|RUN@STEP|RUN",
        help="prefix of an artifact's key; a run's checkpoint after round STEP; or a run's final policy, which it "
        "deploys: with deploy.policy=best the selected one (the last checkpoint if there is no final policy yet)",
    )
    parser.add_argument(
        "--why",
        action="store_true",
        help="for RUN: why each of its stages ran and was not cached, as differences from the most similar stage of an "
        "earlier run",
    )
    add_store_trust(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    try:
        if options.why:
            return _print_reasons(options.root, options.artifact, options.json, options.trust)
        lineage = Lineage(options.root, through=True, trust=options.trust)
        key = lineage.resolve(options.artifact)
    except EspalierError as error:
        print_message(error)
        return 2
    print(json.dumps(to_json(lineage, key)) if options.json else show(lineage, key), end="\n" if options.json else "")
    for problem in lineage.unread:
        print(f"cannot read this store; artifacts that only it has count as deleted: {problem}", file=sys.stderr)
    return 0


def _print_reasons(root: Path, reference: str, as_json: bool, trust: bool) -> int:
    """Print why the stages of a run ran. Return the exit code."""
    records = Records(root)
    run = records.get(reference)
    reader = recorded_reader(records.root, run, trust)
    stages = explain(records, reader, run)
    if as_json:
        print(json.dumps({"run": run.id, "stages": [asdict(stage) for stage in stages]}))
    else:
        print(printable(f"run {run.short} {run.name} seed {run.seed}"))
        width = max((len(stage.label) for stage in stages), default=0)
        for stage in stages:
            against = f" (against {stage.compared})" if stage.compared else ""
            why = f": {'; '.join(stage.why)}{against}" if stage.why else ""
            print(printable(f"  {stage.label:{width}}  {stage.status}{why}"))
    if reader.unread:
        print(f"cannot read this store; artifacts that only it has count as deleted: {reader.unread}", file=sys.stderr)
    return 0
