"""A stage `wait` that takes its time, the command that runs it in a process of its own, and a wait for a condition."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flows.stages import STAGES
from flows.stages.base import Stage, StageSpec

COMMAND = [sys.executable, "-m", "tests.flows.waiting"]


def until(condition: Callable[[], object], told: Callable[[], object] = lambda: None) -> None:
    """Wait for a condition, at most ten minutes. told: what the error says."""
    limit = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < limit, told()
        time.sleep(0.02)


class WaitSpec(StageSpec):
    number: float
    touch: str = ""
    """A file that it makes."""
    wait_for: str = ""
    """A file that it waits for."""

    def key_part(self) -> dict[str, Any]:
        return self.model_dump(include={"number"})


def wait(spec, inputs, draft, context):
    """Leaves its number; fails where it is below zero."""
    (draft.path / "number").write_text("half of")
    try:
        if spec.touch:
            Path(spec.touch).touch()
        while spec.wait_for and not Path(spec.wait_for).exists():
            time.sleep(0.02)
    except KeyboardInterrupt:
        (context.scratch / "put-away").touch()
        raise
    if spec.number < 0:
        raise ValueError("below zero")
    (draft.path / "number").write_text(str(spec.number))
    return {"number": spec.number}


STAGE = Stage("wait", 1, WaitSpec, "number", 1, wait)

if __name__ == "__main__":
    from flows.stage import main
    from flows.terminal.interrupt import leave

    STAGES["wait"] = STAGE
    leave(main)
