"""One stage alone, from a serialised request, or that of a past run; and a look at the episodes of one that runs:

    python -m flows.stage --request FILE.json root=DIR [--store URI] [--watch]
    python -m flows.stage --requests root=DIR [--store URI]
    python -m flows.stage --run RUN --label "train[3]" [root=DIR] [--store URI] [--again] [--watch]
    python -m flows.stage collect --watch [root=DIR] [--wait SECONDS]

The request names the stage, its part of the spec, the keys of its input artifacts in the store below DIR, and the
seed (`flows.stages.base.Request`); --requests takes one after the other, as lines on standard input, and keeps models
loaded in between; URI is a store that machines share, behind the one below DIR. Each run records the
requests of its stages; RUN is its id, the beginning of it, an experiment's name (its latest run) or `latest`. What is
in the store already is found; with --again it is computed once more and compared, and the store stays as it is.

Standard output is JSON lines: progress, and as the last one `{"key", "digest", "status"}` or `{"error"}`; with --again
also `same`, whether the digest is that of the artifact in the store. It ends when its standard input, if that is a
pipe, is closed. With --watch, one episode after the other is shown on standard error as it is played.

`collect --watch` and `evaluate --watch` run nothing: they show, on standard output, an episode of whichever stage of
this kind is at work below DIR, in any process of this machine (`flows.history.live_view`).
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import queue
import signal
import stat
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from components.artifacts import Artifact
from components.compute.lifeline import watch_parent
from components.compute.runners import error_to_json
from components.compute.spec import Strategy
from components.errors import EspalierError, ResourceError
from flows.terminal.arguments import RootParser
from flows.terminal.exit_codes import told
from flows.terminal.interrupt import leave

if TYPE_CHECKING:
    from flows.stages.base import Context, Request


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 for a mistake in the request, 1 for a stage that failed, 130 where it was stopped."""
    parser = RootParser(
        prog="python -m flows.stage", description="Runs one stage from a request, or shows episodes of one that runs."
    )
    parser.add_argument("stage", nargs="?", choices=["collect", "evaluate"], help="with --watch: of which stage")
    parser.add_argument("--watch", action="store_true", help="show one episode at a time as it is played")
    parser.add_argument("--wait", type=float, default=60.0, help="seconds to wait for a stage that can be watched")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--request", type=Path, help="JSON file: stage, spec, inputs, seed, allow")
    what.add_argument("--requests", action="store_true", help="the same as lines on standard input, until it ends")
    what.add_argument("--run", help="a past run: id, beginning of an id, experiment's name, or latest")
    parser.add_argument("--label", help="with --run: the stage's name in that run, as train[3]")
    parser.add_argument("--again", action="store_true", help="compute it again and compare, also where it is there")
    parser.add_argument("--store", help="URI of a store shared with other machines, such as s3://BUCKET/PREFIX")
    parser.add_argument(
        "--lock-timeout", type=float, default=43200.0, help="seconds to wait for another process at the same artifact"
    )
    parser.add_argument(
        "--strategy", choices=get_args(Strategy), help="this is one of several processes that train together"
    )
    parser.add_argument("--group-timeout", type=float, default=1800.0, help="seconds that they wait for each other")
    options = parser.parse_args(arguments)
    if options.strategy is not None and options.request is None:
        parser.error("--strategy goes with --request")
    if (options.run is None) != (options.label is None):
        parser.error("--run and --label go together")
    if (options.stage is None) == (options.request is None and options.run is None and not options.requests):
        parser.error("expected one of --request FILE, --requests, --run RUN with --label, and collect --watch")
    if options.stage is not None and not options.watch:
        parser.error(f"{options.stage} goes with --watch; to run one, give --request or --run with --label")
    if options.stage is not None:
        return _follow(options.root, options.stage, options.wait)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever libraries print is no result
    own = f" [{os.environ['RANK']}]" if options.strategy is not None else ""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s{own} %(levelname)-7s %(name)s: %(message)s")

    one_line = threading.Lock()

    def say(line: Mapping[str, Any]) -> None:
        with one_line:  # an agent of one's own is heard in other threads
            print(json.dumps(line), file=out)

    def show(event: Mapping[str, Any]) -> None:
        from flows.history.live_view import as_text

        print(as_text(event), file=sys.stderr, flush=True)

    os.environ.setdefault("TQDM_DISABLE", "1")  # no bars of libraries among the lines of the log
    signal.signal(signal.SIGTERM, _interrupt)
    faulthandler.register(signal.SIGUSR1)  # a stack of every thread on stderr, for whoever gives up on us
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    if options.requests or stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode):
        watch_parent(on_line=lines.put)
    from flows.stages.base import Context

    def context() -> Context:
        return Context.at(
            options.root,
            options.store,
            lock_timeout=options.lock_timeout,
            strategy=options.strategy or "ddp",
            progress=lambda done, total, values=None: say({"progress": [done, total, dict(values or {})]}),
            on_wait=lambda text: say({"waiting": text}),
            watch=show if options.watch else None,
        )

    if options.strategy is not None:
        from flows.execution import distributed_stage

        return distributed_stage.attempt(lambda: _request(options), context(), options.group_timeout, say)

    def attempt(work: Callable[[], Mapping[str, Any]]) -> int:
        """Says what the work came to; returns the exit code."""
        try:
            found = work()
        except EspalierError as error:
            if options.run is None:
                say({"error": error_to_json(error)})
            else:
                print(error, file=sys.stderr)
            known = told(error)
            assert known is not None
            return known[1]
        except KeyboardInterrupt:
            return 130
        except Exception as error:  # the parent gets the message, the log the whole story
            if (known := told(error)) is not None:
                if options.run is None:
                    say({"error": error_to_json(EspalierError(known[0]))})
                else:
                    print(known[0], file=sys.stderr)
                return known[1]
            logging.getLogger(__name__).exception("the stage failed")
            say({"error": {"type": type(error).__name__, "message": str(error)}})
            return 1
        say(found)
        return 0

    if not options.requests:
        return attempt(lambda: _run(_request(options), context(), again=options.again))
    shared = context()
    while (code := attempt(lambda: _run(_next(lines), shared))) != 130:
        logging.getLogger(__name__).info("exit code of this stage: %d", code)
    return code


def _run(request: Request, context: Context, again: bool = False) -> dict[str, Any]:
    """What is said of a stage that has ended."""
    from flows.stages.execute import repeat_stage, run_stage

    if again:
        before, artifact = repeat_stage(request, context)
        return {**_done(artifact, "ran"), "same": before.digest == artifact.digest}
    return _done(*run_stage(request, context))


def _done(artifact: Artifact, status: str) -> dict[str, Any]:
    return {"key": artifact.key, "digest": artifact.digest, "status": status}


def _request(options: argparse.Namespace) -> Request:
    from flows.history.records import Records
    from flows.stages.base import Request

    if options.run is None:
        return Request.from_json(_read(options.request))
    return Request.from_json(Records(options.root).get(options.run).stage(options.label).request)


def _next(lines: queue.SimpleQueue[str]) -> Request:
    from flows.stages.base import Request

    return Request.from_json(json.loads(lines.get()))


def _follow(root: Path, stage: str, wait: float) -> int:
    from flows.history.live_view import follow

    if not root.is_dir():
        print(f"root={root}: there is no such folder; expected that of your runs", file=sys.stderr)
        return 2
    print(f"looking for a stage {stage} at work below {root}, for {wait:g} s (--wait)", file=sys.stderr)
    try:
        if follow(root, stage, wait, sys.stdout):
            return 0
    except KeyboardInterrupt:
        return 130
    print(
        f"no stage {stage} has played episodes below {root} in {wait:g} s. Give the folder of your runs (root=DIR), "
        f'or play a stage of a past run again: --run latest --label "{stage}[...]" --again --watch',
        file=sys.stderr,
    )
    return 2


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
