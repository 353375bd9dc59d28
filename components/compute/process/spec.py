"""Place in a subprocess."""

from __future__ import annotations

from typing import Literal

from components.compute.place import Place
from components.compute.runners import ProcessRunner, RunnerContext


class ProcessPlace(Place):
    """Subprocess, `python -m flows.stage`."""

    name: Literal["process"] = "process"

    def runner(self, name: str, context: RunnerContext) -> ProcessRunner:
        return ProcessRunner(context.process)
