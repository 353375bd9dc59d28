"""`python -m flows.verify BUNDLE [--stage LABEL]`: recompute the stages of a bundle and compare them with the run.

BUNDLE is a folder or archive of `flows.bundle`, or its `bundle.json`. The verdict of a stage is `same` (equal bytes),
`within_tolerance`, or `different` with the first place that differs; `flows.verification` defines the tolerance. The
last line gives the worst verdict and the first stage that has it. The exit code is 0 for `same` and
`within_tolerance`, 1 for `different` and if nothing could be recomputed, 2 for an error in the command or a bundle with
a changed file.

What runs is printed first. A bundle starts no program, contacts no server, reads no path and loads no code of packages
without `--trust`: stages that would are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from components.errors import ArtifactError, EspalierError, ResourceError, SpecError
from flows.terminal.console import duration, printable, printable_lines
from flows.terminal.exit_codes import print_message
from flows.terminal.interrupt import leave

if TYPE_CHECKING:
    from flows.verification.bundle import Bundle
    from flows.verification.verify import PendingVerification, VerifiedStage


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return the exit code."""
    from flows.verification.bundle import opened_bundle
    from flows.verification.verify import Verification

    parser = argparse.ArgumentParser(
        prog="python -m flows.verify",
        description="Recomputes stages of a bundle and compares them with the run.",
    )
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="folder or archive of flows.bundle, or bundle.json")
    parser.add_argument(
        "--stage", action="append", default=[], metavar="LABEL", help='stage to verify, such as "train[3]"; repeatable'
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="also run stages that start programs, contact servers, read files or run code of packages",
    )
    parser.add_argument("--work", type=Path, metavar="DIR", help="folder for recomputed artifacts (default: temporary)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args(argv)
    os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars would break up the lines of the stages
    with ExitStack() as stack:
        try:
            bundle, folder = stack.enter_context(opened_bundle(options.bundle))
            work = options.work or Path(stack.enter_context(TemporaryDirectory(prefix="verify-")))
            print(printable_lines(_versions(bundle)), file=sys.stderr)
            verification = Verification(bundle, folder, work.absolute(), options.trust, _show)
            print(printable_lines(_outline(verification.planned(options.stage))), file=sys.stderr, flush=True)
            verdict = verification.verify(options.stage)
        except EspalierError as error:
            print_message(error)
            return 2 if isinstance(error, SpecError | ResourceError | ArtifactError) else 1
    first = next((result.label for result in verification.results if result.verdict == verdict), None)
    if options.json:
        stages = [asdict(result) for result in verification.results]
        print(json.dumps({"verdict": verdict, "first": first, "run": bundle.run, "stages": stages}))
    else:
        print(f"{verdict}{f', first at {first}' if verdict in ('different', 'within_tolerance') else ''}")
    return 0 if verdict in ("same", "within_tolerance") else 1


def _show(result: VerifiedStage) -> None:
    text = (
        f"{result.label}: {result.verdict}, {duration(result.seconds)}{f': {result.detail}' if result.detail else ''}"
    )
    print(printable(text), file=sys.stderr, flush=True)


def _outline(planned: Sequence[PendingVerification]) -> list[str]:
    """Return lines on what will run, and what of it reaches out of the bundle."""
    running = [entry for entry in planned if not entry.skipped]
    lines = [f"recomputes {len(running)} of {len(planned)} stages"]
    reaches = {reach: entry.stage.label for entry in reversed(running) for reach in entry.reaches}
    lines += [f"trusted, from {label} on: {reach}" for reach, label in reversed(reaches.items())]
    return lines + [f"skips {entry.stage.label}: {entry.skipped}" for entry in planned if entry.skipped]


def _versions(bundle: Bundle) -> list[str]:
    """Return lines on what is verified, and on versions that differ from those of the bundle."""
    from components.tracking.provenance import git_commit, package_versions

    lines = [f"{bundle.name} seed {bundle.seed}, run {bundle.run[:8]}: {len(bundle.stages)} stages"]
    current = {**package_versions(), "commit": git_commit(Path(__file__).parent)}
    recorded = {**bundle.packages, "commit": bundle.git_commit}
    return lines + [
        f"{name} is {current.get(name) or 'not installed'}, recorded {value}"
        for name, value in recorded.items()
        if current.get(name) != value
    ]


if __name__ == "__main__":
    leave(main)
