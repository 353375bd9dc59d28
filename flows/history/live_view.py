"""Live view of running episodes: `python -m flows.stage collect --watch`, for stages of any process on this machine.

A stage that runs episodes writes one of them at a time to a file in its scratch folder
(`components.rollout.live_view`). This module follows the file until the stage ends, and then the next stage of this
kind below the same root. The text comes from models and environments, so terminal control characters are replaced.
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
"""Polling interval in seconds."""


def follow(root: Path, stage: str, wait: float, out: TextIO) -> bool:
    """Print the episodes of running stages of this kind, until none has run below the root for `wait` seconds. Return
    True if there was one."""
    artifacts = root.absolute() / "artifacts"
    shown: set[tuple[str, float]] = set()
    idle = time.monotonic()
    while True:
        for file, header in _running(artifacts, stage):
            if (collection := (file.parent.name, header["begun"])) in shown:
                continue
            shown.add(collection)
            _print(f"{header['what']}: {header['total']} episodes", out)
            for event in _events(file):
                _print(as_text(event), out)
            _print(f"{header['what']}: no more episodes", out)
            idle = time.monotonic()
        if time.monotonic() - idle > wait:
            return bool(shown)
        time.sleep(PAUSE)


def as_text(event: Mapping[str, Any]) -> str:
    """Return the text of an event."""
    if "episode" in event:
        return f"\n── {printable(str(event['episode']))} " + "─" * 20
    if "ended" in event or "followed" in event:
        success = "success" if event["success"] else "no success"
        outcome = f"failed: {_lines(event['failure'])}" if event["failure"] else success
        title = "ended" if "ended" in event else printable(str(event["followed"]))
        reward = "" if event["reward"] is None else f"reward {event['reward']:.3g}, "
        return f"── {title}: {reward}{outcome}"
    sampled = f" ({event['sampled']} tokens)" if "sampled" in event else ""
    lines = [f"{printable(event['role'])}{sampled}: {_lines(event['content'])}"]
    if event.get("reasoning"):
        lines.insert(0, f"{printable(event['role'])}, reasoning: {_lines(event['reasoning'])}")
    lines += [f"    → {_lines(call)}" for call in event.get("calls", ())]
    if event.get("more_calls"):
        lines.append(f"    → and {event['more_calls']} more")
    return "\n".join(lines)


def _lines(text: str) -> str:
    """Return the text with indented lines and without other terminal control characters."""
    return "\n    ".join(printable(line.expandtabs(4)) for line in text.split("\n"))


def _running(artifacts: Path, stage: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the files of running stages of this kind with their headers (first lines), latest first."""
    running = []
    for file in artifacts.glob(f".scratch/*/{FILE}"):
        try:
            with file.open(encoding="utf-8") as lines:
                header = json.loads(lines.readline())
                matches = header["stage"] == stage and header["begun"] > 0
        except (OSError, ValueError, TypeError, KeyError):  # deleted meanwhile, not yet written, or damaged
            continue
        if matches and _locked(artifacts / ".locks" / file.parent.name):
            running.append((file, header))
    yield from sorted(running, key=lambda entry: -entry[1]["begun"])


def _locked(lock: Path) -> bool:
    """Return True if a live process holds the lock. A dead process leaves the file without a lock."""
    try:
        with open(lock) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of the file from its last episode on, and new events until the file is deleted or its stage
    ends."""
    lock = path.parents[2] / ".locks" / path.parent.name
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        content = file.read()
        file.seek(max(content.rfind(b'\n{"episode"') + 1, 0))
        partial = b""
        while True:
            over = not path.exists() or not _locked(lock)  # checked before the read, so that the read is complete
            new = file.read()
            *lines, partial = (partial + new).split(b"\n")
            for line in lines:
                try:
                    event = json.loads(line)
                except ValueError:  # truncated by a full disk
                    continue
                if "total" not in event:
                    yield event
            if over:
                return
            if path.exists() and path.stat().st_size < file.tell():  # the stage restarted
                file.seek(0)
                partial = b""
            if not new:
                time.sleep(PAUSE)


def _print(text: str, out: TextIO) -> None:
    print(text, file=out, flush=True)
