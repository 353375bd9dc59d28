"""Where each stage runs."""

from __future__ import annotations

from typing import Literal

from components.specs import Spec

StageName = Literal["collect", "judge", "filter", "train", "evaluate", "deploy"]
Placement = Literal["local", "process"]


class ComputeSpec(Spec):
    """Placement says how a stage runs, not what it computes: it is in no stage key."""

    default: Placement = "local"
    """`local`: in the process of the flow. `process`: each stage in a process of its own, `python -m flows.stage`."""
    stages: dict[StageName, Placement] = {}
    """Placement of single stages, where it is not the default: `{train: process}`."""

    def placement(self, stage: StageName) -> Placement:
        return self.stages.get(stage, self.default)
