"""Time and memory of the pages of a run and of a comparison, with evaluations of tens of thousands of episodes.

    python -m tests.benchmarks.pages [--json] [--rows 50000] [--peer-rows 20000] [--group 8] [--folder DIR]

Two evaluations with `--rows` episodes each (of `tests.benchmarks.streaming`: 4 turns, about 350 tokens). Each form has
a fresh process; times are CPU seconds, without imports; a peak is the most memory that it held, imports included.

- `columns`: the pages read columns, and the rows of the episodes that they show, as `flows.run`, `flows.compare` and
  `flows.evaluate` do.
- `rows`: the same pages from all episodes in memory, with `--peer-rows` episodes for each evaluation. `columns` makes
  the pages of these evaluations too, and `same_pages` is true if they have the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks.streaming import episodes, peak_gb, renamed

NAMES = ("start", "final")
BLOCK = 2_000
"""Episodes that are made one by one."""


def main() -> None:
    options = arguments()
    if options.form:
        print(json.dumps(FORMS[options.form](options, options.folder)))
        return
    sizes = {"large": options.rows, "peer": options.peer_rows}
    with tempfile.TemporaryDirectory(prefix="espalier-pages-", dir=options.folder) as name:
        for size, rows in sizes.items():
            (Path(name) / size).mkdir()
            in_own_process("make", Path(name) / size, rows, options)
        large, small = (in_own_process("columns", Path(name) / size, rows, options) for size, rows in sizes.items())
        peer = in_own_process("rows", Path(name) / "peer", options.peer_rows, options)
    result = {"rows": options.rows, **large["figures"], "peer_rows": options.peer_rows}
    result |= {f"peer_{key}": value for key, value in peer["figures"].items()}
    result |= {f"columns_at_peer_rows_{key}": value for key, value in small["figures"].items()}
    result["same_pages"] = small["pages"] == peer["pages"]
    if not options.json:
        for title, rows, figures in (
            ("columns", options.rows, large["figures"]),
            ("columns", options.peer_rows, small["figures"]),
            ("all episodes in memory", options.peer_rows, peer["figures"]),
        ):
            times = ", ".join(
                f"{key.removesuffix('_s')} {value} s" for key, value in figures.items() if key[-2:] == "_s"
            )
            print(f"{title}, 2 evaluations of {rows} episodes: {times}; peak {figures['peak_mb']} MB")
    print(json.dumps(result))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line, nothing else")
    parser.add_argument("--rows", type=int, default=50_000, help="episodes of each evaluation")
    parser.add_argument("--peer-rows", type=int, default=20_000, help="episodes of each evaluation in memory")
    parser.add_argument("--group", type=int, default=8, help="episodes of one scenario")
    parser.add_argument("--folder", type=Path, help="where to put the episodes; without it the temporary folder")
    parser.add_argument("--form", choices=FORMS, help=argparse.SUPPRESS)
    return parser.parse_args()


def in_own_process(form: str, folder: Path, rows: int, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.benchmarks.pages", "--form", form, "--folder", str(folder)]
    command += ["--rows", str(rows), "--group", str(options.group)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{form} failed:\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def make(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Two evaluations of the same scenarios, with other outcomes. After the first block, its episodes repeat with other
    scenario ids."""
    import pyarrow.parquet as pq

    from components.evaluation.metrics import summarise
    from components.trajectories import store as files
    from components.trajectories.schema import Score
    from components.trajectories.sources import ScoredFiles

    block = min(options.rows, BLOCK - BLOCK % options.group)
    lengths = [min(block, options.rows - start) for start in range(0, options.rows, block)]
    for name, rate in zip(NAMES, (0.3, 0.6), strict=True):
        draw, path = random.Random(rate), folder / name
        path.mkdir()
        solved: list[tuple[str, bool]] = []

        def unscored(draw: random.Random = draw, rate: float = rate, solved: Any = solved) -> Iterator[Any]:
            for episode in episodes(block, options.group):
                success = draw.random() < rate
                solved.append((episode.id, success))
                episode.outcome, episode.reward = {"success": success}, None
                yield episode

        files.write_trajectories(path / "block.parquet", unscored())
        table = pq.read_table(path / "block.parquet").replace_schema_metadata(None)
        batches = (
            renamed(batch, number)
            for number, length in enumerate(lengths)
            for batch in table.slice(0, length).to_batches(256)
        )
        files._TRAJECTORIES.write_batches(path / "trajectories.parquet", batches)
        scores = (
            Score(f"{number:03d}-{id}", float(success), {"success": float(success), "style": 0.5})
            for number, length in enumerate(lengths)
            for id, success in solved[:length]
        )
        files.write_scores(path / "scores.parquet", scores)
        (path / "summary.json").write_text(json.dumps(summarise(ScoredFiles.of(path).load())))
    return {}


def columns(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from components.trajectories.stored import StoredTrajectories

    return pages(folder, lambda path: ((stored := StoredTrajectories(path)), stored.scores))


def rows(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from components.trajectories.store import load_scored, read_scores

    return pages(
        folder,
        lambda path: (
            load_scored(path / "trajectories.parquet", path / "scores.parquet", None),
            {score.trajectory_id: score for score in read_scores(path / "scores.parquet")},
        ),
    )


def pages(folder: Path, load: Any) -> dict[str, Any]:
    """Return the times of the pages, and their digests. load: gives the episodes and the scores of an evaluation."""
    import jinja2  # noqa: F401
    import pyarrow.parquet  # noqa: F401

    from components.evaluation.metrics import paired_difference
    from components.pages.comparison import ComparedRun, RunComparison, compare_episodes
    from components.pages.comparison import render as render_comparison
    from components.pages.report import Evaluation, Report, render

    start = time.process_time()
    evaluations = [
        Evaluation(name, json.loads((folder / name / "summary.json").read_text()), *load(folder / name))
        for name in NAMES
    ]
    difference = paired_difference(*(evaluation.trajectories for evaluation in evaluations))
    report = render(Report("shop", evaluations=evaluations, differences={"final against start": difference}))
    middle = time.process_time()
    compared = [
        ComparedRun(letter, letter * 8, "shop", 0, "finished", "", None, "", [], {"final": evaluation}, {}, {})
        for letter, evaluation in zip("AB", evaluations, strict=True)
    ]
    against = compare_episodes(("A", "B"), "B against A", *evaluations)
    comparison = render_comparison(RunComparison(compared, {}, {}, [against]))
    end = time.process_time()
    digests = [hashlib.sha256(page.encode()).hexdigest() for page in (report, comparison)]
    figures = {"report_cpu_s": round(middle - start, 1), "comparison_cpu_s": round(end - middle, 1)}
    return {"figures": {**figures, "peak_mb": round(peak_gb() * 1000)}, "pages": digests}


FORMS = {"make": make, "columns": columns, "rows": rows}

if __name__ == "__main__":
    main()
