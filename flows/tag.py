"""`python -m flows.tag RUN TAG…`: add tags to a run; with `--remove`, remove them.

Tags are stored beside the run's record and mirrored to MLflow as `tag.NAME`; `flows.runs --tag TAG` filters by them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from components.errors import EspalierError
from flows.history.labels import Labels
from flows.history.records import Records
from flows.reporting.label_mirror import mirror, result
from flows.terminal.arguments import RootParser
from flows.terminal.exit_codes import print_message


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return exit code 0; 2 for an error in the command."""
    parser = RootParser(prog="python -m flows.tag", description="Adds tags to a run, or removes them.")
    parser.add_argument("run", metavar="RUN", help="id, prefix of an id, experiment's name (its latest run), or latest")
    parser.add_argument("tags", nargs="+", metavar="TAG", help="letters, digits, '_', '.' and '-'")
    parser.add_argument("--remove", action="store_true", help="remove the tags")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_intermixed_args(argv)
    try:
        run, labels = Records(options.root).get(options.run), Labels(options.root)
        changed = labels.untag(run, options.tags) if options.remove else labels.tag(run, options.tags)
    except EspalierError as error:
        print_message(error)
        return 2
    problem = mirror(options.root, run, changed)
    if problem:
        print(f"the tags are stored, but not in MLflow: {problem}", file=sys.stderr)
    text = f"run {run.short}: tags {', '.join(changed.tags) or 'none'}"
    print(json.dumps(result(run, changed, problem)) if options.json else text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
