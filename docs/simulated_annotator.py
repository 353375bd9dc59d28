"""Simulated annotator for a measurement: it shows training on people's choices without people. It is not a model.

    python -m docs.simulated_annotator RUN --stage "collect[1]" --accuracy 0.9 --out FILE [root=DIR]

It answers what `flows.runs annotate` asks, for every pair of episodes of a scenario that the page shows and whose
rewards differ: the episode with the higher reward is better, with probability `accuracy`; otherwise the other one.
Errors are independent and a function of the pair, so that the file is the same each time. The file has the format of
`flows.runs annotate --export`, and `feedback.path` reads it. People's errors are not independent.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from components.errors import EspalierError
from components.trajectories.groups import have_spread
from flows.terminal.arguments import RootParser

if TYPE_CHECKING:
    from components.trajectories.feedback import PairChoice
    from flows.annotation.episodes import StageEpisodes

AUTHOR = "simulated"
TIME = "2026-01-01T00:00:00+00:00"
"""Time of all answers, so that the file does not depend on the clock."""


def main(arguments: list[str] | None = None) -> int:
    """Write the answers. Return the exit code: 2 for a user error."""
    parser = RootParser(prog="python -m docs.simulated_annotator", description="Simulated choices between episodes.")
    parser.add_argument("run", metavar="RUN", help="id, prefix of an id, experiment's name, or latest")
    parser.add_argument("--stage", metavar="LABEL", help='stage of the episodes, such as "collect[1]"')
    parser.add_argument("--accuracy", type=_share, default=0.9, help="share of correct answers (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="new JSONL file")
    options = parser.parse_args(arguments)
    try:
        return _write(options)
    except EspalierError as error:
        sys.stderr.write(f"{error}\n")
        return 2


def _write(options: argparse.Namespace) -> int:
    from components.trajectories.feedback import append
    from flows.annotation.episodes import load, stage_named
    from flows.history.records import Records

    run = Records(options.root).get(options.run)
    answers = list(choices(load(options.root, run, stage_named(run, options.stage)), options.accuracy))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.unlink(missing_ok=True)
    append(options.out, answers)
    sys.stdout.write(f"{len(answers)} choices are in {options.out}\n")
    return 0


def choices(episodes: StageEpisodes, accuracy: float) -> Iterator[PairChoice]:
    """Yield the annotator's choice for each pair of scored episodes whose rewards differ."""
    from components.trajectories.feedback import PairChoice

    for a, b in episodes.pairs:
        rewards = episodes.by_id[a].reward, episodes.by_id[b].reward
        if rewards[0] is None or rewards[1] is None or not have_spread([rewards[0], rewards[1]]):
            continue
        contents = episodes.contents[a], episodes.contents[b]
        correct = _uniform(*contents) < accuracy
        yield PairChoice(
            author=AUTHOR,
            time=TIME,
            artifact=episodes.artifact.digest,
            trajectory=a,
            content=contents[0],
            other=b,
            other_content=contents[1],
            better="a" if (rewards[0] > rewards[1]) == correct else "b",
        )


def _uniform(*texts: str) -> float:
    """Return a number in [0, 1) that is a function of the texts."""
    return int.from_bytes(hashlib.sha256(" ".join(texts).encode()).digest()[:8]) / 2**64


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number from 0 to 1")
    return share


if __name__ == "__main__":
    sys.exit(main())
