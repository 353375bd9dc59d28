"""One stage alone, from a serialised request, or that of a past run:

    python -m flows.stage --request FILE.json --root DIR [--store URI]
    python -m flows.stage --run RUN --label "train[3]" [--root DIR] [--store URI] [--again]

The request names the stage, its part of the spec, the keys of its input artifacts in the store below DIR, and the
seed (`flows.stages.base.Request`); URI is a store that machines share, behind the one below DIR. Each run records the
requests of its stages; RUN is its id, the beginning of it, an experiment's name (its latest run) or `latest`. What is
in the store already is found; with --again it is computed once more and compared, and the store stays as it is.

Standard output is JSON lines: progress, and as the last one `{"key", "digest", "status"}` or `{"error"}`; with --again
also `same`, whether the digest is that of the artifact in the store. It ends when its standard input, if that is a
pipe, is closed.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import signal
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from components.compute.lifeline import watch_parent
from components.compute.runners import error_to_json
from components.errors import EspalierError, ResourceError, SpecError
from flows.interrupt import leave

DEFAULT_ROOT = Path(__file__).resolve().parent.parent / "runs"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 for a mistake in the request, 1 for a stage that failed, 130 where it was stopped."""
    parser = argparse.ArgumentParser(prog="python -m flows.stage", description="Runs one stage from a request.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--request", type=Path, help="JSON file: stage, spec, inputs, seed, allow")
    what.add_argument("--run", help="a past run: id, beginning of an id, experiment's name, or latest")
    parser.add_argument("--label", help="with --run: the stage's name in that run, as train[3]")
    parser.add_argument("--again", action="store_true", help="compute it again and compare, also where it is there")
    parser.add_argument(
        "--root", type=Path, default=DEFAULT_ROOT, help="folder of the runs: artifacts, models, records"
    )
    parser.add_argument("--store", help="URI of a store shared with other machines, such as s3://BUCKET/PREFIX")
    parser.add_argument(
        "--lock-timeout", type=float, default=43200.0, help="seconds to wait for another process at the same artifact"
    )
    options = parser.parse_args(arguments)
    if (options.run is None) != (options.label is None):
        parser.error("--run and --label go together")
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever libraries print is no result
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def say(line: Mapping[str, Any]) -> None:
        print(json.dumps(line), file=out)

    os.environ.setdefault("TQDM_DISABLE", "1")  # no bars of libraries among the lines of the log
    signal.signal(signal.SIGTERM, _interrupt)
    faulthandler.register(signal.SIGUSR1)  # a stack of every thread on stderr, for whoever gives up on us
    if stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode):
        watch_parent()
    try:
        from flows.records import Records
        from flows.stages.base import Context, Request
        from flows.stages.execute import repeat_stage, run_stage

        context = Context.at(
            options.root,
            options.store,
            lock_timeout=options.lock_timeout,
            progress=lambda done, total, values=None: say({"progress": [done, total, dict(values or {})]}),
            on_wait=lambda text: say({"waiting": text}),
        )
        if options.run is None:
            data = _read(options.request)
        else:
            data = Records(options.root).get(options.run).stage(options.label).request
        request = Request.from_json(data)
        if options.again:
            before, artifact = repeat_stage(request, context)
            say(
                {
                    "key": artifact.key,
                    "digest": artifact.digest,
                    "status": "ran",
                    "same": before.digest == artifact.digest,
                }
            )
            return 0
        artifact, status = run_stage(request, context)
    except EspalierError as error:
        if options.run is None:
            say({"error": error_to_json(error)})
        else:
            print(error, file=sys.stderr)
        return 2 if isinstance(error, SpecError | ResourceError) else 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # the parent gets the message, the log the whole story
        logging.getLogger(__name__).exception("the stage failed")
        say({"error": {"type": type(error).__name__, "message": str(error)}})
        return 1
    say({"key": artifact.key, "digest": artifact.digest, "status": status})
    return 0


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ResourceError(f"there is no request file {path}") from None
    except ValueError as error:
        raise ResourceError(f"{path} is no JSON: {error}") from None


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    leave(main)
