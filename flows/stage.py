"""One stage alone, from a serialised request:

    python -m flows.stage --request FILE.json --root DIR [--store URI]

The request names the stage, its part of the spec, the keys of its input artifacts in the store below DIR, and the
seed (`flows.stages.base.Request`); URI is a store that machines share, behind the one below DIR. Standard output is
JSON lines: progress, and as the last one `{"key", "digest", "status"}` or `{"error"}`. It ends when its standard
input, if that is a pipe, is closed.
"""

from __future__ import annotations

import argparse
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 for a mistake in the request, 1 for a stage that failed, 130 where it was stopped."""
    parser = argparse.ArgumentParser(prog="python -m flows.stage", description="Runs one stage from a request.")
    parser.add_argument("--request", required=True, type=Path, help="JSON file: stage, spec, inputs, seed, allow")
    parser.add_argument("--root", required=True, type=Path, help="folder of the run: artifacts, models")
    parser.add_argument("--store", help="URI of a store shared with other machines, such as s3://BUCKET/PREFIX")
    options = parser.parse_args(arguments)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever libraries print is no result
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def say(line: Mapping[str, Any]) -> None:
        print(json.dumps(line), file=out)

    signal.signal(signal.SIGTERM, _interrupt)
    if stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode):
        watch_parent()
    try:
        from flows.stages.base import Context, Request
        from flows.stages.execute import run_stage

        context = Context.at(
            options.root,
            options.store,
            progress=lambda done, total, values=None: say({"progress": [done, total, dict(values or {})]}),
            on_wait=lambda text: say({"waiting": text}),
        )
        artifact, status = run_stage(Request.from_json(_read(options.request)), context)
    except EspalierError as error:
        say({"error": error_to_json(error)})
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
