"""Spec of supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from components.algorithms.spec import AlgorithmSpec
from components.errors import Problem
from components.trajectories.feedback_episodes import Learns

if TYPE_CHECKING:
    from components.algorithms.trainer import Trainer, TrainingContext


class SFTSpec(AlgorithmSpec):
    """Supervised fine-tuning on assistant tokens."""

    name: Literal["sft"] = "sft"
    epochs: int = Field(1, ge=1)
    """Passes over the trajectories."""
    batch_size: int = Field(8, ge=1)
    """Trajectories per gradient step. A trajectory with several histories counts once per history."""
    schedule: Literal["constant", "linear"] = "linear"
    """`linear`: the learning rate decays to 0 by the end of each training. `constant`: it does not decay."""
    weight_temperature: float | None = Field(None, gt=0)
    """Temperature of weighted behaviour cloning: trajectories are weighted by softmax(reward / weight_temperature),
    scaled to a mean of 1; trajectories without a reward are left out. null weighs all trajectories equally."""

    trains_roles: ClassVar[bool] = True
    feedback_kinds: ClassVar[tuple[Learns, ...]] = ("scores", "corrections")

    @property
    def imitates(self) -> bool:
        return self.weight_temperature is None

    def build(self, context: TrainingContext) -> Trainer:
        from components.algorithms.sft.trainer import train_sft
        from components.algorithms.trainer import FunctionTrainer

        return FunctionTrainer(lambda: train_sft(self, context))

    def feedback_problems(self) -> Iterator[Problem]:
        if self.weight_temperature is None:
            yield Problem(
                "feedback.scores.weight_temperature",
                "null: gives episodes that annotators scored 1 the same weight as those scored 5; expected a number, "
                "such as 0.25",
            )
