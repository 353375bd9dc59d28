"""Starting point of a run: earlier work, and data of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from components.artifacts import Store
from flows.experiment import data_kinds, feedback, fork
from flows.experiment.feedback import FeedbackTraining
from flows.experiment.fork import Fork
from flows.experiment.spec import ExperimentSpec


@dataclass(frozen=True)
class StartingPoint:
    """Policy of another run and human feedback that a run starts from; without either it starts from its model."""

    fork: Fork | None = None
    feedback: Sequence[FeedbackTraining] = ()

    @classmethod
    def resolve(cls, spec: ExperimentSpec, store: Store) -> Self:
        """Return the starting point that `fork` and `feedback` name. Raises the errors of both, and SpecError for data
        that its training does not learn from."""
        data_kinds.check(spec)
        return cls(fork.resolve(spec, store), feedback.resolve(spec.feedback, store, spec.data))

    @property
    def checkpoints(self) -> dict[str, str]:
        """Keys of the checkpoints of the forked run, by step."""
        return self.fork.checkpoints if self.fork is not None else {}
