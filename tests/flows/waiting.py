"""A stage `wait` that takes its time, and the command that runs it in a process of its own."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from flows.stages import STAGES
from flows.stages.base import Stage, StageSpec

COMMAND = [sys.executable, "-m", "tests.flows.waiting"]


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
