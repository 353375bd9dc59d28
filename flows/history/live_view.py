"""`python -m flows.stage collect --watch`: an episode as it is played, in whichever process of this machine.

A stage that plays episodes shows one of them at a time in a file of its unfinished work
(`components.rollout.live_view`). This follows that file until the stage ends, and then the next stage of the kind that
begins below the same root. What is shown was said by models and environments: characters that would steer the terminal
are replaced.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from components.rollout.live_view import FILE
from flows.terminal.console import printable

PAUSE = 0.1
"""Seconds between two looks."""


def follow(root: Path, stage: str, wait: float, out: TextIO) -> bool:
    """Writes what episodes of this kind of stage say, until for `wait` seconds none is at work below the root. Whether
    there was one."""
    artifacts = root.absolute() / "artifacts"
    seen: set[tuple[str, float]] = set()
    idle = time.monotonic()
    while True:
        for file, what in _at_work(artifacts, stage):
            if (which := (file.parent.name, what["begun"])) in seen:
                continue
            seen.add(which)
            _say(f"{what['what']}: {what['total']} episodes", out)
            for event in _events(file):
                _say(as_text(event), out)
            _say(f"{what['what']}: no more episodes", out)
            idle = time.monotonic()
        if time.monotonic() - idle > wait:
            return bool(seen)
        time.sleep(PAUSE)


def as_text(event: Mapping[str, Any]) -> str:
    """One event as it is shown."""
    if "episode" in event:
        return f"\n── {printable(str(event['episode']))} " + "─" * 20
    if "ended" in event or "followed" in event:
        how = "success" if event["success"] else "no success"
        failed = f", failed: {_lines(event['failure'])}" if event["failure"] else f", {how}"
        which = "ended" if "ended" in event else printable(str(event["followed"]))
        return f"── {which}: reward {event['reward']:.3g}{failed}"
    sampled = f" ({event['sampled']} tokens)" if "sampled" in event else ""
    lines = [f"{printable(event['role'])}{sampled}: {_lines(event['content'])}"]
    lines += [f"    → {_lines(call)}" for call in event.get("calls", ())]
    if event.get("more_calls"):
        lines.append(f"    → and {event['more_calls']} more")
    return "\n".join(lines)


def _lines(text: str) -> str:
    """Lines stay lines, set in; nothing else steers the terminal."""
    return "\n    ".join(printable(line.expandtabs(4)) for line in text.split("\n"))


def _at_work(artifacts: Path, stage: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The files of stages of this kind that a living process works on, with their first lines; the latest first."""
    found = []
    for file in artifacts.glob(f".scratch/*/{FILE}"):
        try:
            with file.open(encoding="utf-8") as lines:
                what = json.loads(lines.readline())
                at_work = what["stage"] == stage and what["begun"] > 0
        except (OSError, ValueError, TypeError, KeyError):  # gone meanwhile, not yet written, or damaged
            continue
        if at_work and _held(artifacts / ".locks" / file.parent.name):
            found.append((file, what))
    yield from sorted(found, key=lambda one: -one[1]["begun"])


def _held(lock: Path) -> bool:
    """Whether somebody works on a key. A dead process leaves the file, and no lock on it."""
    try:
        with open(lock) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """What is in the file from the last episode on, and what comes, until the file is gone or nobody is at work."""
    lock = path.parents[2] / ".locks" / path.parent.name
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        so_far = file.read()
        file.seek(max(so_far.rfind(b'\n{"episode"') + 1, 0))
        half = b""
        while True:
            over = not path.exists() or not _held(lock)  # asked first: what is read then is all
            new = file.read()
            *lines, half = (half + new).split(b"\n")
            for line in lines:
                try:
                    event = json.loads(line)
                except ValueError:  # a line that a full disk cut off
                    continue
                if "total" not in event:
                    yield event
            if over:
                return
            if path.exists() and path.stat().st_size < file.tell():  # begun anew
                file.seek(0)
                half = b""
            if not new:
                time.sleep(PAUSE)


def _say(text: str, out: TextIO) -> None:
    print(text, file=out, flush=True)
