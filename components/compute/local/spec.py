"""Place in the process of the flow."""

from __future__ import annotations

from typing import ClassVar, Literal

from components.compute.place import Place
from components.compute.runners import LocalRunner, RunnerContext


class LocalPlace(Place):
    """The process of the flow."""

    concurrent: ClassVar[bool] = False
    name: Literal["local"] = "local"

    def runner(self, name: str, context: RunnerContext) -> LocalRunner:
        return LocalRunner(context.execute)
