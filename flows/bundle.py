"""`python -m flows.bundle RUN [--out PATH]`: write a run as a folder or archive that another machine can verify.

The bundle holds the configuration, the code and package versions, and for each stage its request, key, digest and
metrics; `--artifacts` says which artifacts it includes. `python -m flows.verify` recomputes and compares it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from components.errors import EspalierError
from flows.history.records import Records
from flows.history.trust import recorded_reader
from flows.terminal.arguments import RootParser, add_store_trust
from flows.terminal.console import printable
from flows.terminal.exit_codes import print_message


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return exit code 0; 2 for an error in the command."""
    from flows.verification.bundle import Contents, write_bundle

    parser = RootParser(
        prog="python -m flows.bundle", description="Writes a run as a folder or archive that another machine verifies."
    )
    parser.add_argument("run", metavar="RUN", help="id, prefix of an id, experiment's name (its latest run), or latest")
    parser.add_argument(
        "--out", type=Path, metavar="PATH", help="new folder, or new file NAME.tar.gz (default: ROOT/bundles/NAME-ID)"
    )
    parser.add_argument(
        "--artifacts",
        choices=get_args(Contents),
        default="needed",
        help="artifacts to include. needed (default): the final policy, the evaluations, and artifacts that cannot be "
        "recomputed; none: digests only",
    )
    add_store_trust(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    try:
        records = Records(options.root)
        run = records.get(options.run)
        if (status := records.status(run)) != "finished":
            print(
                f"run {run.short} ({run.name}) is {status}: the bundle holds the stages that it finished",
                file=sys.stderr,
            )
        out = (options.out or options.root / "bundles" / f"{run.name}-{run.short}").absolute()
        bundle = write_bundle(run, recorded_reader(options.root, run, options.trust), out, options.artifacts)
    except EspalierError as error:
        print_message(error)
        return 2
    size = sum(file.stat().st_size for file in ([out] if out.is_file() else out.rglob("*")) if file.is_file())
    summary = {
        "run": bundle.run,
        "stages": len(bundle.stages),
        "artifacts": len(bundle.included),
        "bytes": size,
        "path": str(out),
    }
    if options.json:
        print(json.dumps(summary))
    else:
        counts = f"{len(bundle.stages)} stages, {len(bundle.included)} artifacts, {size / 1e6:.1f} MB"
        print(printable(f"{bundle.name} seed {bundle.seed}, run {bundle.run[:8]}: {counts}"))
        print(f"verify: python -m flows.verify {out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
