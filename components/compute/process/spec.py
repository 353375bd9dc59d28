"""Place in a subprocess."""

from __future__ import annotations

from typing import Literal

from components.compute.place import Place
from components.compute.runners import ProcessRunner, RunnerContext, on_own_gpu


class ProcessPlace(Place):
    """Subprocess, `python -m flows.stage`. Shards that run at the same time have a GPU each where there are several."""

    name: Literal["process"] = "process"

    def runner(self, name: str, context: RunnerContext) -> ProcessRunner:
        return ProcessRunner(on_own_gpu(context.process, context.lane))
