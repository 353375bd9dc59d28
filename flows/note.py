"""`python -m flows.note RUN "TEXT"`: add a note to a run; `--clear` removes its notes.

Notes are stored beside the run's record, mirrored to MLflow as the run's description, and listed by `flows.runs`.
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
from flows.terminal.console import printable
from flows.terminal.exit_codes import print_message


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return exit code 0; 2 for an error in the command."""
    parser = RootParser(prog="python -m flows.note", description="Adds a note to a run, or removes its notes.")
    parser.add_argument("run", metavar="RUN", help="id, prefix of an id, experiment's name (its latest run), or latest")
    parser.add_argument("text", nargs="?", metavar="TEXT", help="the note")
    parser.add_argument("--clear", action="store_true", help="remove all notes of the run")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_intermixed_args(argv)
    if (options.text is None) is not options.clear:
        parser.error('expected a text, as flows.note RUN "TEXT", or --clear to remove the notes')
    try:
        run, labels = Records(options.root).get(options.run), Labels(options.root)
        changed = labels.clear_notes(run) if options.clear else labels.note(run, options.text)
    except EspalierError as error:
        print_message(error)
        return 2
    problem = mirror(options.root, run, changed)
    if problem:
        print(f"the note is stored, but not in MLflow: {problem}", file=sys.stderr)
    text = printable(f"run {run.short}: {'; '.join(changed.notes) or 'no notes'}")
    print(json.dumps(result(run, changed, problem)) if options.json else text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
