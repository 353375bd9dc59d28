"""Place in a subprocess."""

from __future__ import annotations

from typing import Literal

from components.compute.place import Place
from components.compute.runners import KeptProcessRunner, RunnerContext, on_own_gpu


class ProcessPlace(Place):
    """Subprocess, `python -m flows.stage`, which takes one stage of a run after the other, so that models stay loaded.
    Stages that run at the same time have a subprocess each, and a GPU each where there are several."""

    name: Literal["process"] = "process"

    def runner(self, name: str, context: RunnerContext) -> KeptProcessRunner:
        return KeptProcessRunner(on_own_gpu(context.process, context.lane))
