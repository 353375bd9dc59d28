"""`python -m flows.lineage KEY|RUN@STEP|RUN`: ancestors and descendants of an artifact.

KEY is a prefix of any artifact's key. RUN@STEP is the checkpoint of a run after round STEP (0: after its warmup). RUN
alone is the run's final policy, which it deploys and which its `evaluate[final]` measured: with `deploy.policy=best`
the selected checkpoint. For a run without a final policy yet, RUN is its last checkpoint.
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
    """Run the command. Return exit code 0; 2 for an error in the command."""
    parser = RootParser(
        prog="python -m flows.lineage", description="Shows the ancestors and the descendants of an artifact."
    )
    parser.add_argument(
        "artifact",
        metavar="KEY|RUN@STEP|RUN",
        help="prefix of an artifact's key; a run's checkpoint after round STEP; or a run's final policy, which it "
        "deploys: with deploy.policy=best the selected one (the last checkpoint if there is no final policy yet)",
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
    for problem in lineage.unread:
        print(f"cannot read this store; artifacts that only it has count as deleted: {problem}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
