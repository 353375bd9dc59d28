"""`flows.runs export RUN --form FORM --out DIR`: scored episodes of a run as data, in the forms that imports read.

The episodes are those that the run scored for training: of its rounds, its warmup, imported data and human feedback.
Held-out episodes of evaluations are not exported. DIR is a new folder with the rows and a data set card; `--push`
uploads it to a private repository of the Hugging Face hub.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from components.artifacts import Artifact, Store
from components.data.spec import FormName, LogName
from components.errors import EspalierError, ResourceError
from flows.history.records import Records, RunRecord
from flows.history.store_reader import StoreReader
from flows.terminal.arguments import RootParser
from flows.terminal.exit_codes import print_message

if TYPE_CHECKING:
    from components.trajectories.schema import Trajectory

JUDGEMENTS, GRADES = "judgements", "grades"
LONGEST_QUESTION = 10_000
"""Characters that an embedded judge reads (conf/judge_model/embedded.yaml)."""
READ_ONLY = {"auto", "trajectories", "served", *get_args(LogName)}
HELD_OUT = "judge[heldout"
"""Beginning of the labels of stages that score held-out episodes, which are exported by name only."""
FORMS = (*(form for form in get_args(FormName) if form not in READ_ONLY), "parquet", JUDGEMENTS, GRADES)
"""Forms of imports that can be written; `parquet` for whole episodes; `judgements` and `grades` to train a judge on."""
SELF_SCORED = ("dataset", "feedback")
"""Kinds of artifacts that hold trajectories with their scores."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return exit code 0; 2 for an error in the command."""
    options = _parser().parse_args(argv)
    try:
        result = run(options)
    except EspalierError as error:
        print_message(error)
        return 2
    print(json.dumps(result) if options.json else "\n".join(f"{name}: {value}" for name, value in result.items()))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = RootParser(
        prog="python -m flows.runs export", description="Writes the scored episodes of a run as data to train on."
    )
    parser.add_argument("run", metavar="RUN", help="id of the run, its beginning, or the name of its experiment")
    parser.add_argument(
        "--form",
        required=True,
        choices=FORMS,
        help="form of the rows; parquet: whole episodes; judgements and grades: the questions of reward=ruler and "
        "reward=graded, answered with the rewards",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="new folder for rows and card")
    parser.add_argument(
        "--stages",
        default="*",
        metavar="PATTERN",
        help="stages whose scores are exported, such as 'judge[[]3]' or import (default: all but held-out ones)",
    )
    parser.add_argument("--min-reward", type=float, metavar="X", help="only episodes with at least this reward")
    parser.add_argument("--push", metavar="OWNER/NAME", help="upload to this private data set of the Hugging Face hub")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(options: argparse.Namespace) -> dict[str, object]:
    """Write the export, push it if asked, and return its counts. Raises ResourceError."""
    from components.data.export import CARD, Collection, card, export, push
    from components.trajectories.store import read_scored

    record = Records(options.root).get(options.run)
    reader = StoreReader(Store(options.root / "artifacts"), through=True)
    stages = scored_stages(record, options.stages)
    with ExitStack() as stack:

        def opened(key: str) -> Artifact:
            artifact = stack.enter_context(reader.opened(key))
            if artifact is None:
                raise ResourceError(f"artifact {key[:12]} of run {record.short} was deleted or is damaged")
            return artifact

        collections = [
            Collection(
                label,
                read_scored(opened(episodes).path / "trajectories.parquet", opened(scores).path / "scores.parquet"),
            )
            for label, episodes, scores in stages
        ]
        write = {JUDGEMENTS: _judgements, GRADES: _grades}.get(options.form)
        form = "messages" if write else options.form
        counts = export(collections, form, options.out, min_reward=options.min_reward, write=write)
    text = card(f"{record.name} {options.form}", form, counts, _provenance(record, stages))
    (options.out / CARD).write_text(text, encoding="utf-8")
    result: dict[str, object] = {"folder": str(options.out), "form": options.form, **asdict(counts)}
    return result | ({"url": push(options.out, options.push)} if options.push else {})


def _judgements(group: list[Trajectory]) -> list[dict[str, Any]]:
    """Return the row of a group: RULER's question about it, and the answer with its rewards."""
    from components.rewards.judges.ruler import judgement

    return [{"messages": judgement(group, longest=LONGEST_QUESTION)}]


def _grades(group: list[Trajectory]) -> list[dict[str, Any]]:
    """Return a row for each distinct episode of a group: the question of `graded` about it, and its reward as grade."""
    from components.rewards.judges.graded import judgement

    rows = [{"messages": judgement(trajectory, longest=LONGEST_QUESTION)} for trajectory in group]
    return [row for place, row in enumerate(rows) if row not in rows[:place]]


def scored_stages(record: RunRecord, pattern: str) -> list[tuple[str, str, str]]:
    """Return label, key of the trajectories and key of the scores of the run's training data. Raises ResourceError if
    there is none."""
    stages = []
    for stage in record.stages:
        if not fnmatchcase(stage.label, pattern) or (pattern == "*" and stage.label.startswith(HELD_OUT)):
            continue
        if stage.kind == "scores":
            stages.append((stage.label, stage.request["inputs"]["trajectories"], stage.key))
        elif stage.kind in SELF_SCORED:
            stages.append((stage.label, stage.key, stage.key))
    if not stages:
        labels = ", ".join(stage.label for stage in record.stages) or "none"
        raise ResourceError(
            f"--stages {pattern}: run {record.short} has no such scored episodes; its stages are {labels}. Expected a "
            "judge, import or feedback stage"
        )
    return stages


def _provenance(record: RunRecord, stages: Sequence[tuple[str, str, str]]) -> dict[str, str]:
    """Return facts about the origin of the rows."""
    model = record.spec.get("model", {})
    environment = record.spec.get("environment", {})
    return {
        "Experiment": f"`{record.name}`, seed {record.seed}",
        "Run": f"`{record.id}`",
        "Commit": f"`{record.git_commit}`" if record.git_commit else "unknown",
        "Model": f"`{model.get('name', 'unknown')}`",
        "Environment": f"`{environment.get('_target_', 'unknown')}`",
        "Stages": ", ".join(f"`{label}`" for label, _, _ in stages),
        "Artifacts of the scores": ", ".join(f"`{scores[:12]}`" for _, _, scores in stages),
    }
