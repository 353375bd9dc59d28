"""`python -m flows.runs tag RUN TAG…` and `python -m flows.runs note RUN "TEXT"`: labels of a run.

Tags and notes are stored beside the run's record and mirrored to MLflow, as `tag.NAME` and as the run's description.
`flows.runs --tag TAG` filters by them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from components.errors import EspalierError
from components.specs import validate
from components.tracking.spec import TrackingSpec
from flows.history.labels import Labels, RunLabels
from flows.history.records import Records, RunRecord
from flows.terminal.arguments import RootParser
from flows.terminal.console import printable
from flows.terminal.exit_codes import print_message


def tag(argv: Sequence[str] | None = None) -> int:
    """Add tags to a run, or remove them. Return exit code 0; 2 for an error in the command."""
    parser = _parser("tag", "Adds tags to a run, or removes them.")
    parser.add_argument("tags", nargs="+", metavar="TAG", help="letters, digits, '_', '.' and '-'")
    parser.add_argument("--remove", action="store_true", help="remove the tags")
    options = parser.parse_intermixed_args(argv)

    def change(labels: Labels, run: RunRecord) -> RunLabels:
        return labels.untag(run, options.tags) if options.remove else labels.tag(run, options.tags)

    return _change(options, "tags are", change, lambda labels: f"tags {', '.join(labels.tags) or 'none'}")


def note(argv: Sequence[str] | None = None) -> int:
    """Add a note to a run, or remove its notes. Return exit code 0; 2 for an error in the command."""
    parser = _parser("note", "Adds a note to a run, or removes its notes.")
    parser.add_argument("text", nargs="?", metavar="TEXT", help="the note")
    parser.add_argument("--clear", action="store_true", help="remove all notes of the run")
    options = parser.parse_intermixed_args(argv)
    if (options.text is None) is not options.clear:
        parser.error('expected a text, as flows.runs note RUN "TEXT", or --clear to remove the notes')

    def change(labels: Labels, run: RunRecord) -> RunLabels:
        return labels.clear_notes(run) if options.clear else labels.note(run, options.text)

    return _change(options, "note is", change, lambda labels: "; ".join(labels.notes) or "no notes")


def _parser(name: str, description: str) -> RootParser:
    parser = RootParser(prog=f"python -m flows.runs {name}", description=description)
    parser.add_argument("run", metavar="RUN", help="id, prefix of an id, experiment's name (its latest run), or latest")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _change(
    options: argparse.Namespace,
    subject: str,
    change: Callable[[Labels, RunRecord], RunLabels],
    describe: Callable[[RunLabels], str],
) -> int:
    """Change the labels of a run, mirror them to MLflow and print them. subject: "tags are" or "note is"."""
    try:
        run = Records(options.root).get(options.run)
        labels = change(Labels(options.root), run)
    except EspalierError as error:
        print_message(error)
        return 2
    problem = _mirror(options.root, run, labels)
    if problem:
        print(f"the {subject} stored, but not in MLflow: {problem}", file=sys.stderr)
    data = {"run": run.id, "tags": labels.tags, "notes": labels.notes, "mlflow": problem or "updated"}
    print(json.dumps(data) if options.json else printable(f"run {run.short}: {describe(labels)}"))
    return 0


def _mirror(root: Path, run: RunRecord, labels: RunLabels) -> str:
    """Write the labels to MLflow. Return the reason if that is not possible, else an empty text."""
    from components.tracking.labels import mirror_labels

    try:
        spec = validate(TrackingSpec, run.spec.get("tracking") or {}, path="tracking")
        mirror_labels(root, spec, run.id, labels.tags, labels.notes)
    except EspalierError as error:
        return str(error)
    return ""
