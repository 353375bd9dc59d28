"""`python -m flows.annotate RUN`: a page on which people read the episodes of a run, score them from 1 to 5, choose
between two of the same scenario, and correct what the assistant said.

    python -m flows.annotate RUN [--stage "collect[2]"] [--sample N] [--author NAME] [--port N] [--no-browser]
    python -m flows.annotate RUN --export FILE | --import FILE | --agreement

RUN is an id, the beginning of one, an experiment's name (its latest run) or `latest`. Without --stage it is the last
round's collection. Every answer is written to `ROOT/feedback/` with author and time before it is confirmed, so the
command can be ended at any moment, and MLflow has it as an assessment of the episode's trace. The page is for this
machine only. The URL that is printed has a token that works once, in the first browser that opens it; then a new one is
printed. Other users of the machine do not see it: the browser is started on a file that only you can read.

The author is --author, or else git's user.name, or else the user of the operating system.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import webbrowser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from components.errors import EspalierError, ResourceError
from flows.terminal.arguments import RootParser

if TYPE_CHECKING:
    from flows.annotation.episodes import Episodes
    from flows.annotation.session import Session
    from flows.history.records import RunRecord

HOST = "127.0.0.1"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; 2 for a mistake of the user's, 130 where it was interrupted before the page was there."""
    parser = RootParser(
        prog="python -m flows.annotate", description="Lets people score, compare and correct the episodes of a run."
    )
    parser.add_argument("run", metavar="RUN", help="id, beginning of an id, experiment's name, or latest")
    parser.add_argument("--stage", metavar="LABEL", help='whose episodes: "collect[1]", "evaluate[final]"')
    parser.add_argument("--sample", type=_count, metavar="N", help="read so many of them, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0, help="of --sample (default: %(default)s)")
    parser.add_argument("--author", help="who answers (default: git's user.name, or the user of this machine)")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one (default)")
    parser.add_argument("--no-browser", action="store_true", help="print the URL and open nothing")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--export", type=Path, metavar="FILE", help="write what stands to a JSONL file")
    what.add_argument("--import", type=Path, metavar="FILE", dest="from_file", help="add the answers of a JSONL file")
    what.add_argument("--agreement", action="store_true", help="print how far authors and judge agree, as JSON")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        run = _run(options.root.absolute(), options.run)
        if options.export is not None:
            return _export(options, run)
        if options.from_file is not None:
            return _import(options, run)
        if options.agreement:
            return _agreement(options, run)
        return _serve(options, run)
    except EspalierError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 1")
    return int(text)


def _run(root: Path, reference: str) -> RunRecord:
    from flows.history.records import Records

    if not root.is_dir():
        raise ResourceError(f"root={root}: there is no such folder; expected that of your runs")
    return Records(root).get(reference)


def author_of(given: str | None) -> tuple[str, str]:
    """Who answers, and where that is from."""
    if given is not None:
        if not given.strip() or len(given.strip()) > 100:
            raise ResourceError(f"--author {given!r:.120}: expected a name of 1 to 100 characters")
        return given.strip(), "--author"
    try:
        asked = subprocess.run(["git", "config", "user.name"], capture_output=True, text=True, timeout=10)
        if name := asked.stdout.strip()[:100]:
            return name, "git's user.name"
    except (OSError, subprocess.TimeoutExpired):
        pass
    try:
        return getpass.getuser()[:100], "the user of this machine"
    except (KeyError, OSError):
        raise ResourceError("nobody knows who you are here; give --author NAME") from None


def _serve(options: argparse.Namespace, run: RunRecord) -> int:
    import uvicorn

    from flows.annotation.app import Access, create_app
    from flows.annotation.episodes import load, stage_named
    from flows.annotation.session import Session

    stage = stage_named(run, options.stage)
    author, source = author_of(options.author)
    episodes = load(options.root.absolute(), run, stage, options.sample, options.seed)
    with _listen(options.port) as listener:
        port = listener.getsockname()[1]
        session = Session(episodes, author, _people(options.root.absolute(), run, stage.label))
        files = contextlib.ExitStack()

        def url(token: str) -> str:
            return f"http://{HOST}:{port}/?token={token}"

        def exchanged(token: str) -> None:
            files.close()
            print(f"opened in a browser; for another one: {url(token)}", file=sys.stderr, flush=True)

        access = Access(exchanged)
        config = uvicorn.Config(create_app(session, access, port), log_config=None, log_level="warning",
                                access_log=False, ws="none", lifespan="off", server_header=False,
                                timeout_graceful_shutdown=3)  # fmt: skip
        with contextlib.suppress(KeyboardInterrupt), files:
            print(f"{len(episodes.by_id)} episodes of {stage.label} of run {run.short} ({run.name})", file=sys.stderr)
            print(f"author: {author} (from {source}); answers go to {episodes.file}", file=sys.stderr)
            print(url(access.token), flush=True)
            if not options.no_browser:
                webbrowser.open(files.enter_context(_redirect(options.root.absolute(), url(access.token))).as_uri())
            uvicorn.Server(config).run(sockets=[listener])
    session.close()
    said = _summary(session)
    print(f"{said}; train on it: feedback=scores feedback.path={episodes.file.parent}", file=sys.stderr)
    return 0


@contextlib.contextmanager
def _redirect(folder: Path, url: str) -> Iterator[Path]:
    """Yield a page that leads to the URL, for the user's eyes only, and remove it afterwards. All users see the command
    line of a browser, so the URL may not stand there."""
    path = folder / f"annotate-{secrets.token_hex(8)}.html"
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(f'<!doctype html><meta http-equiv="refresh" content="0;url={url}"><title>Espalier</title>\n')
    except OSError as error:
        raise ResourceError(
            f"{path}: cannot be written ({error.strerror or error}); give --no-browser and open the URL yourself"
        ) from None
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _listen(port: int) -> socket.socket:
    if not 0 <= port < 65536:
        raise ResourceError(f"--port {port}: expected 0 to 65535")
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        raise ResourceError(
            f"--port {port}: cannot listen there ({error.strerror or error}); choose another port, or 0 for a free one"
        ) from None


def _summary(session: Session) -> str:
    from collections import Counter

    kinds = Counter(one.kind for one in session.standing())
    words = ", ".join(f"{kinds[kind]} {kind}s" for kind in ("score", "choice", "correction"))
    return f"there are {words}{f'. {session.mirror.problem}' if session.mirror and session.mirror.problem else ''}"


def _people(root: Path, run: RunRecord, label: str):  # type: ignore[no-untyped-def]  # session.Tell or None, which import heavily
    """Tells MLflow; None, and a word, where it does not know the run or cannot be reached."""
    from components.tracking import store
    from components.tracking.human_assessments import People

    uri = run.spec.get("tracking", {}).get("uri") or store.local_uri(root)
    if uri == store.local_uri(root) and not (root / "mlflow" / "mlflow.db").is_file():
        print(f"MLflow is not told: there is no {root / 'mlflow' / 'mlflow.db'}", file=sys.stderr)
        return None
    from mlflow.exceptions import MlflowException

    try:
        return People(store.connect(uri, root / "mlflow" / "artifacts"), run.id, label).tell
    except (MlflowException, ResourceError) as error:
        print(f"MLflow is not told; the answers are in the file all the same: {error}", file=sys.stderr)
        return None


def _all(options: argparse.Namespace, run: RunRecord) -> list[Episodes]:
    """The episodes of every stage of the run that the store still holds, or of the one that was asked for."""
    from flows.annotation.episodes import load, stage_named, stages

    root = options.root.absolute()
    if options.stage is not None or not stages(run):
        return [load(root, run, stage_named(run, options.stage))]
    found: dict[str, Episodes] = {}
    for stage in stages(run):
        try:
            found.setdefault(stage.digest, load(root, run, stage))
        except ResourceError as error:
            print(f"left out: {error}", file=sys.stderr)
    if not found:
        raise ResourceError(f"the store no longer holds any episodes of run {run.short}")
    return list(found.values())


def _export(options: argparse.Namespace, run: RunRecord) -> int:
    from components.trajectories.feedback import read, standing, write_line

    found = [one for some in _all(options, run) if some.file.is_file() for one in standing(read(some.file))]
    part = options.export.with_name(f"{options.export.name}.part")
    try:
        part.write_text("".join(map(write_line, found)), encoding="ascii")
        part.replace(options.export)
    except OSError as error:
        raise ResourceError(f"--export {options.export}: cannot be written: {error.strerror or error}") from None
    print(f"{len(found)} answers written to {options.export}", file=sys.stderr)
    return 0


def _import(options: argparse.Namespace, run: RunRecord) -> int:
    from components.trajectories.feedback import append, numbered
    from flows.annotation.session import Session, imported

    known = {one.artifact.digest: one for one in _all(options, run)}
    lines = numbered(options.from_file)
    by_artifact = imported(lines, known)
    fresh = {digest: append(known[digest].file, found) for digest, found in by_artifact.items()}
    for digest in by_artifact:
        some = known[digest]
        tell = _people(options.root.absolute(), run, some.label)
        if tell is not None:
            Session(some, author_of(options.author)[0], tell).close()
    added = sum(fresh.values())
    print(f"{added} answers added, {len(lines) - added} were there already", file=sys.stderr)
    return 0


def _agreement(options: argparse.Namespace, run: RunRecord) -> int:
    from components.trajectories.feedback import read, standing
    from flows.annotation.agreement import agreement

    found = {}
    for some in _all(options, run):
        if some.file.is_file():
            found[some.label] = agreement(some, standing(read(some.file)))
    if not found:
        raise ResourceError(f"nobody has said anything of the episodes of run {run.short} yet")
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
