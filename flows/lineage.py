"""`python -m flows.lineage KEY|RUN@STEP|RUN`: what made an artifact, back to the start, and what was made from it.

RUN@STEP is the checkpoint that a run had after round STEP (0: after its warmup), KEY any artifact by the beginning of
its key. RUN alone is the final policy of the run, the one that it deploys: what its `evaluate[final]` measured, so with
`deploy.policy=best` the one that was chosen. Of a run that has not come so far it is the last checkpoint.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from components.errors import EspalierError
from flows.history.lineage_graph import Lineage
from flows.reporting.lineage import show, to_json
from flows.terminal.arguments import RootParser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 2 for a mistake in the command."""
    parser = RootParser(
        prog="python -m flows.lineage", description="Says what made an artifact, and what was made from it."
    )
    parser.add_argument(
        "artifact",
        metavar="KEY|RUN@STEP|RUN",
        help="an artifact by the beginning of its key; a run's checkpoint after round STEP; or a run's final policy, "
        "which it deploys: with deploy.policy=best the one that was chosen (its last checkpoint if it has none yet)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    try:
        lineage = Lineage(options.root, through=True)
        key = lineage.resolve(options.artifact)
    except EspalierError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(to_json(lineage, key)) if options.json else show(lineage, key), end="\n" if options.json else "")
    for why in lineage.unread:
        print(f"what is only in this store counts as gone: {why}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
