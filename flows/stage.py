"""`python -m flows.stage`: a single stage, from a serialized request or from a past run, or live episodes.

    python -m flows.stage --request FILE.json root=DIR [--store URI] [--watch]
    python -m flows.stage --requests root=DIR [--store URI]
    python -m flows.stage --run RUN --label "train[3]" [root=DIR] [--store URI] [--again] [--watch] [--trust]
    python -m flows.stage collect --watch [root=DIR] [--wait SECONDS]

A request contains the stage's name, its part of the spec, the keys of its input artifacts in the store below DIR, and
the seed (`flows.stages.base.Request`). --requests reads one request per line from standard input and keeps models
loaded between them. URI is a store shared between machines, used behind the one below DIR. Each run records the
requests of its stages. RUN is a run's id, a prefix of it, an experiment's name (its latest run) or `latest`. A stage
whose artifact is in the store is cached; with --again it is recomputed and compared, and the store stays unchanged. A
record may be another person's: settings that start programs, contact servers, read files or run code of packages run
only with --trust.

Standard output is JSON lines: progress, and last `{"key", "digest", "status"}` or `{"error"}`; with --again also
`same`: true if the digest equals that of the artifact in the store. If standard input is a pipe, the command ends when
the pipe is closed. With --watch, standard error shows one episode at a time while it is played.

`collect --watch` and `evaluate --watch` run nothing: they show, on standard output, an episode of any running stage of
this kind below DIR, in any process of this machine (`flows.history.live_view`).
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
from components.exceptions import FirstTraceback, log_traceback
from flows.terminal.arguments import RootParser, add_trust
from flows.terminal.exit_codes import describe_error, print_message
from flows.terminal.interrupt import leave

if TYPE_CHECKING:
    from flows.stages.base import Context, Request


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return exit code 0; 2 for an invalid request, 1 if the stage failed, 130 if interrupted."""
    from flows.stages import STAGES

    watched = [stage.name for stage in STAGES.values() if stage.plays]
    parser = RootParser(
        prog="python -m flows.stage", description="Runs one stage from a request, or shows episodes of a running stage."
    )
    parser.add_argument("stage", nargs="?", choices=watched, help="with --watch: kind of the stage to show")
    parser.add_argument("--watch", action="store_true", help="show one episode at a time as it is played")
    parser.add_argument("--wait", type=float, default=60.0, help="with --watch: seconds to wait for such a stage")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--request", type=Path, help="JSON file: stage, spec, inputs, seed, allow")
    source.add_argument("--requests", action="store_true", help="read requests from standard input, one JSON per line")
    source.add_argument("--run", help="past run: id, prefix of an id, experiment's name, or latest")
    parser.add_argument("--label", help="with --run: the stage's name in that run, such as train[3]")
    parser.add_argument("--again", action="store_true", help="recompute the stage and compare it with the stored one")
    add_trust(parser, "with --run: ")
    parser.add_argument("--store", help="URI of a store shared with other machines, such as s3://BUCKET/PREFIX")
    parser.add_argument(
        "--lock-timeout",
        type=float,
        default=43200.0,
        help="seconds to wait for another process that computes the artifact",
    )
    parser.add_argument(
        "--strategy", choices=get_args(Strategy), help="run as one of several processes that train together"
    )
    parser.add_argument(
        "--group-timeout", type=float, default=1800.0, help="seconds that these processes wait for each other"
    )
    options = parser.parse_args(arguments)
    if options.strategy is not None and options.request is None and not options.requests:
        parser.error("--strategy requires --request or --requests")
    if (options.run is None) != (options.label is None):
        parser.error("--run and --label require each other")
    if (options.stage is None) == (options.request is None and options.run is None and not options.requests):
        parser.error("expected one of --request FILE, --requests, --run RUN with --label, and collect --watch")
    if options.stage is not None and not options.watch:
        parser.error(f"{options.stage} requires --watch; to run a stage, give --request, or --run with --label")
    if options.stage is not None:
        return _follow(options.root, options.stage, options.wait)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # stdout carries results only
    rank = f" [{os.environ['RANK']}]" if options.strategy is not None else ""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s{rank} %(levelname)-7s %(name)s: %(message)s")
    logging.getLogger().handlers[0].addFilter(FirstTraceback())

    output_lock = threading.Lock()

    def send(line: Mapping[str, Any]) -> None:
        with output_lock:  # a custom agent may report from other threads
            print(json.dumps(line), file=out)

    def show(event: Mapping[str, Any]) -> None:
        from flows.history.live_view import as_text

        print(as_text(event), file=sys.stderr, flush=True)

    os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars would break up the log
    signal.signal(signal.SIGTERM, _interrupt)
    faulthandler.register(signal.SIGUSR1)  # the parent sends it before it kills a stalled stage
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    if options.requests or stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode):
        watch_parent(on_line=lines.put if os.environ.get("RANK", "0") == "0" else None)
    from flows.stages.base import Context

    def context() -> Context:
        return Context.at(
            options.root,
            options.store,
            lock_timeout=options.lock_timeout,
            strategy=options.strategy or "ddp",
            progress=lambda done, total, values=None: send({"progress": [done, total, dict(values or {})]}),
            on_wait=lambda text: send({"waiting": text}),
            watch=show if options.watch else None,
        )

    if options.strategy is not None:
        from flows.execution import distributed_stage

        request = None if options.requests else lambda: _request(options)
        return distributed_stage.attempt(request, context(), options.group_timeout, send, lines.get)

    def attempt(work: Callable[[], Mapping[str, Any]]) -> int:
        """Run the work, send its result or its error, and return the exit code."""
        try:
            result = work()
        except EspalierError as error:
            if options.run is None:
                send({"error": error_to_json(error)})
            else:
                print_message(error)
            message_and_code = describe_error(error)
            assert message_and_code is not None
            return message_and_code[1]
        except KeyboardInterrupt:
            return 130
        except Exception as error:  # the parent gets the message, the log gets the stack trace
            if (message_and_code := describe_error(error)) is not None:
                message, code = message_and_code
                log_traceback(error)
                if options.run is None:
                    send({"error": error_to_json(EspalierError(message))})
                else:
                    print_message(message)
                return code
            logging.getLogger(__name__).exception("the stage failed")
            send({"error": {"type": type(error).__name__, "message": str(error)}})
            return 1
        send(result)
        return 0

    if not options.requests:
        return attempt(lambda: _run(_request(options), context(), again=options.again))
    shared = context()
    while (code := attempt(lambda: _run(_next(lines), shared))) != 130:
        logging.getLogger(__name__).info("exit code of this stage: %d", code)
    return code


def _run(request: Request, context: Context, again: bool = False) -> dict[str, Any]:
    """Run the stage and return its result line."""
    from flows.stages.execute import repeat_stage, run_stage

    if again:
        stored, recomputed = repeat_stage(request, context)
        return {**_result_line(recomputed, "ran"), "same": stored.digest == recomputed.digest}
    return _result_line(*run_stage(request, context))


def _result_line(artifact: Artifact, status: str) -> dict[str, Any]:
    return {"key": artifact.key, "digest": artifact.digest, "status": status}


def _request(options: argparse.Namespace) -> Request:
    from flows.history.records import Records
    from flows.history.trust import admit_request
    from flows.stages.base import Request

    if options.run is None:
        return Request.from_json(_read(options.request))
    request = Request.from_json(Records(options.root).get(options.run).stage(options.label).request)
    admit_request(request, f"{options.run}, {options.label}", options.trust)
    return request


def _next(lines: queue.SimpleQueue[str]) -> Request:
    from flows.stages.base import Request

    return Request.from_json(json.loads(lines.get()))


def _follow(root: Path, stage: str, wait: float) -> int:
    from flows.history.live_view import follow

    if not root.is_dir():
        print(f"root={root}: the folder does not exist; expected the folder of your runs", file=sys.stderr)
        return 2
    print(f"waiting up to {wait:g} s (--wait) for a running {stage} stage below {root}", file=sys.stderr)
    try:
        if follow(root, stage, wait, sys.stdout):
            return 0
    except KeyboardInterrupt:
        return 130
    print(
        f"no {stage} stage played episodes below {root} within {wait:g} s. Give the folder of your runs (root=DIR), "
        f'or repeat a stage of a past run: --run latest --label "{stage}[...]" --again --watch',
        file=sys.stderr,
    )
    return 2


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ResourceError(f"--request {path}: the file does not exist") from None
    except ValueError as error:
        raise ResourceError(f"--request {path}: not valid JSON: {error}") from None


def _interrupt(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would interrupt the cleanup
    raise KeyboardInterrupt


if __name__ == "__main__":
    leave(main)
