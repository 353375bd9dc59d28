"""`python -m flows.runs annotate RUN`: web page for human feedback on the episodes of a run.

On the page, annotators read episodes, score them from 1 to 5, choose the better of two episodes of the same scenario,
correct the assistant's messages, and label single steps as good or bad.

    python -m flows.runs annotate RUN [--stage "collect[2]"] [--sample N] [--author NAME] [--port N] [--no-browser]
    python -m flows.runs annotate RUN --export FILE | --import FILE | --labels FILE | --agreement

RUN is an id, a prefix of an id, an experiment's name (its latest run) or `latest`. The default of --stage is the last
round's collection. Every answer is written to `ROOT/feedback/` with author and time before the page confirms it, so the
command can be stopped at any time. MLflow stores it as an assessment of the episode's trace. The page is served to this
machine only. The printed URL contains a token for one use: the first browser that opens it; then a new URL is printed.
Other users of the machine cannot read it: the browser is started with a file that only you can read.

The author is --author, else git's user.name, else the user of the operating system.
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
from typing import TYPE_CHECKING, Any

from components.errors import EspalierError, ResourceError
from flows.terminal.arguments import RootParser, add_store_trust
from flows.terminal.exit_codes import print_message

if TYPE_CHECKING:
    from flows.annotation.episodes import StageEpisodes
    from flows.annotation.session import AnnotationSession
    from flows.history.records import RunRecord

HOST = "127.0.0.1"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return exit code 0; 2 for a user error, 130 if interrupted before the page was served."""
    parser = RootParser(
        prog="python -m flows.runs annotate",
        description="Serves a page on which people score, compare and correct the episodes of a run.",
    )
    parser.add_argument("run", metavar="RUN", help="id, prefix of an id, experiment's name, or latest")
    parser.add_argument("--stage", metavar="LABEL", help='stage of the episodes: "collect[1]", "evaluate[final]"')
    parser.add_argument("--sample", type=_count, metavar="N", help="show a random sample of N episodes")
    parser.add_argument("--seed", type=int, default=0, help="random seed of --sample (default: %(default)s)")
    parser.add_argument("--author", help="annotator's name (default: git's user.name, else the user of this machine)")
    parser.add_argument("--port", type=int, default=0, help="port of the page; 0 picks a free one (default)")
    parser.add_argument("--no-browser", action="store_true", help="print the URL only, open no browser")
    add_store_trust(parser)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--export", type=Path, metavar="FILE", help="write the current answers to a JSONL file")
    action.add_argument("--import", type=Path, metavar="FILE", dest="from_file", help="add the answers of a JSONL file")
    action.add_argument("--labels", type=Path, metavar="FILE", help="write the labelled steps in the form step_labels")
    action.add_argument("--agreement", action="store_true", help="print the agreement of authors and judge, as JSON")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        run = _run(options.root.absolute(), options.run)
        if options.export is not None:
            return _export(options, run)
        if options.from_file is not None:
            return _import(options, run)
        if options.labels is not None:
            return _labels(options, run)
        if options.agreement:
            return _agreement(options, run)
        return _serve(options, run)
    except EspalierError as error:
        print_message(error)
        return 2
    except KeyboardInterrupt:
        return 130


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer of at least 1")
    return int(text)


def _run(root: Path, reference: str) -> RunRecord:
    from flows.history.records import Records

    if not root.is_dir():
        raise ResourceError(f"root={root}: the folder does not exist; expected the folder of your runs")
    return Records(root).get(reference)


def author_of(option: str | None) -> tuple[str, str]:
    """Return the author's name and its source. option: value of --author."""
    if option is not None:
        if not option.strip() or len(option.strip()) > 100:
            raise ResourceError(f"--author {option!r:.120}: expected a name of 1 to 100 characters")
        return option.strip(), "--author"
    try:
        git = subprocess.run(["git", "config", "user.name"], capture_output=True, text=True, timeout=10)
        if name := git.stdout.strip()[:100]:
            return name, "git's user.name"
    except (OSError, subprocess.TimeoutExpired):
        pass
    try:
        return getpass.getuser()[:100], "the user of this machine"
    except (KeyError, OSError):
        raise ResourceError("the author is unknown: git and the system have no user name; set --author NAME") from None


def _serve(options: argparse.Namespace, run: RunRecord) -> int:
    import uvicorn

    from flows.annotation.app import LoginToken, create_app
    from flows.annotation.episodes import load, stage_named
    from flows.annotation.session import AnnotationSession

    stage = stage_named(run, options.stage)
    author, source = author_of(options.author)
    episodes = load(options.root.absolute(), run, stage, options.sample, options.seed, trust=options.trust)
    with _listen(options.port) as listener:
        port = listener.getsockname()[1]
        session = AnnotationSession(episodes, author, _people(options.root.absolute(), run, stage.label))
        files = contextlib.ExitStack()

        def url(token: str) -> str:
            return f"http://{HOST}:{port}/?token={token}"

        def on_exchange(token: str) -> None:
            files.close()
            print(f"opened in a browser; URL for another browser: {url(token)}", file=sys.stderr, flush=True)

        access = LoginToken(on_exchange)
        config = uvicorn.Config(create_app(session, access, port), log_config=None, log_level="warning",
                                access_log=False, ws="none", lifespan="off", server_header=False,
                                timeout_graceful_shutdown=3)  # fmt: skip
        with contextlib.suppress(KeyboardInterrupt), files:
            print(f"{len(episodes.by_id)} episodes of {stage.label} of run {run.short} ({run.name})", file=sys.stderr)
            print(f"author: {author} (from {source}); answers are saved to {episodes.file}", file=sys.stderr)
            print(url(access.token), flush=True)
            if not options.no_browser:
                webbrowser.open(files.enter_context(_redirect(options.root.absolute(), url(access.token))).as_uri())
            uvicorn.Server(config).run(sockets=[listener])
    session.close()
    summary = _summary(session)
    print(f"{summary}; to train on them: feedback=answers feedback.path={episodes.file.parent}", file=sys.stderr)
    return 0


@contextlib.contextmanager
def _redirect(folder: Path, url: str) -> Iterator[Path]:
    """Yield a page that redirects to the URL, and remove it afterwards.

    Only the user can read the page. All users see the browser's command line, so it must not contain the URL.
    """
    path = folder / f"annotate-{secrets.token_hex(8)}.html"
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(f'<!doctype html><meta http-equiv="refresh" content="0;url={url}"><title>Espalier</title>\n')
    except OSError as error:
        raise ResourceError(
            f"cannot write {path}: {error.strerror or error}; set --no-browser and open the URL yourself"
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
            f"--port {port}: cannot listen ({error.strerror or error}); choose another port, or 0 for a free one"
        ) from None


def _summary(session: AnnotationSession) -> str:
    from collections import Counter

    kinds = Counter(answer.kind for answer in session.standing())
    counts = ", ".join(f"{kinds[kind]} {kind}s" for kind in ("score", "choice", "correction", "step"))
    return f"saved {counts}{f'. {session.mirror.problem}' if session.mirror and session.mirror.problem else ''}"


def _people(root: Path, run: RunRecord, label: str):  # type: ignore[no-untyped-def]  # session.Tell or None, which import heavily
    """Return the function that sends answers to MLflow; None, with a message, if MLflow has no such run or cannot be
    reached."""
    from components.tracking import store
    from components.tracking.human_assessments import HumanAssessments

    uri = run.spec.get("tracking", {}).get("uri") or store.local_uri(root)
    if uri == store.local_uri(root) and not (root / "mlflow" / "mlflow.db").is_file():
        print(f"answers are not sent to MLflow: {root / 'mlflow' / 'mlflow.db'} does not exist", file=sys.stderr)
        return None
    from mlflow.exceptions import MlflowException

    try:
        return HumanAssessments(store.connect(uri, root / "mlflow" / "artifacts"), run.id, label).tell
    except (MlflowException, ResourceError) as error:
        print_message(f"answers are not sent to MLflow, only saved to the file: {error}")
        return None


def _all(options: argparse.Namespace, run: RunRecord) -> list[StageEpisodes]:
    """Return the episodes of the stage in --stage, or else of all stages of the run that are still in the store."""
    from flows.annotation.episodes import load, stage_named, stages

    root = options.root.absolute()
    if options.stage is not None or not stages(run):
        return [load(root, run, stage_named(run, options.stage), trust=options.trust)]
    by_digest: dict[str, StageEpisodes] = {}
    for stage in stages(run):
        try:
            by_digest.setdefault(stage.digest, load(root, run, stage, trust=options.trust))
        except ResourceError as error:
            print_message(f"skipped: {error}")
    if not by_digest:
        raise ResourceError(f"the episodes of run {run.short} are no longer in the store")
    return list(by_digest.values())


def _export(options: argparse.Namespace, run: RunRecord) -> int:
    from components.trajectories.feedback import read, standing, write_line

    answers = [
        answer for episodes in _all(options, run) if episodes.file.is_file() for answer in standing(read(episodes.file))
    ]
    part = options.export.with_name(f"{options.export.name}.part")
    try:
        part.write_text("".join(map(write_line, answers)), encoding="ascii")
        part.replace(options.export)
    except OSError as error:
        raise ResourceError(f"--export {options.export}: cannot be written: {error.strerror or error}") from None
    print(f"{len(answers)} answers written to {options.export}", file=sys.stderr)
    return 0


def _import(options: argparse.Namespace, run: RunRecord) -> int:
    from components.trajectories.feedback import append, numbered
    from flows.annotation.session import AnnotationSession, group_by_artifact

    by_digest = {episodes.artifact.digest: episodes for episodes in _all(options, run)}
    lines = numbered(options.from_file)
    by_artifact = group_by_artifact(lines, by_digest)
    counts = {digest: append(by_digest[digest].file, answers) for digest, answers in by_artifact.items()}
    for digest in by_artifact:
        episodes = by_digest[digest]
        tell = _people(options.root.absolute(), run, episodes.label)
        if tell is not None:
            AnnotationSession(episodes, author_of(options.author)[0], tell).close()
    added = sum(counts.values())
    print(f"{added} answers added, {len(lines) - added} already present", file=sys.stderr)
    return 0


def _labels(options: argparse.Namespace, run: RunRecord) -> int:
    from components.data.forms.step_labels import STEP_LABELS
    from components.trajectories.convert import write_jsonl
    from components.trajectories.feedback import StepLabel, numbered, standing
    from components.trajectories.feedback_episodes import labelled
    from flows.annotation.session import group_by_artifact

    write = STEP_LABELS.write
    assert write is not None
    rows: list[dict[str, Any]] = []
    steps = 0
    for episodes in _all(options, run):
        lines = numbered(episodes.file) if episodes.file.is_file() else []
        valid = group_by_artifact(lines, {episodes.artifact.digest: episodes})
        answers = standing(valid.get(episodes.artifact.digest, []))
        steps += len({(*it.episode, it.history, it.message) for it in answers if isinstance(it, StepLabel)})
        rows += [row for episode in labelled(episodes.by_id.values(), answers) for row in write([episode])]
    if not rows:
        raise ResourceError(f"run {run.short} has no labels of first steps of its training episodes: {steps} labels")
    try:
        write_jsonl(options.labels, rows)
    except OSError as error:
        raise ResourceError(f"--labels {options.labels}: cannot be written: {error.strerror or error}") from None
    written = sum(len(row["labels"]) for row in rows)
    left = f"; {steps - written} were left out, after an unlabelled step or held out" if steps > written else ""
    print(f"{written} labels of {len(rows)} conversations written to {options.labels}{left}", file=sys.stderr)
    print(f"to train on them: reward_model=process reward_model.data.path={options.labels}", file=sys.stderr)
    return 0


def _agreement(options: argparse.Namespace, run: RunRecord) -> int:
    from components.trajectories.feedback import read, standing
    from flows.annotation.agreement import agreement

    by_label = {}
    for episodes in _all(options, run):
        if episodes.file.is_file():
            by_label[episodes.label] = agreement(episodes, standing(read(episodes.file)))
    if not by_label:
        raise ResourceError(f"run {run.short} has no answers of annotators yet")
    print(json.dumps(by_label, indent=2))
    return 0
