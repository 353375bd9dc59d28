"""Specs of the trainings of reward models."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

from pydantic import Field, FiniteFloat, field_validator

from components.algorithms.spec import OptimizerSpec


class RewardTrainingSpec(OptimizerSpec):
    """Hyperparameters that all reward models share. They are not policies: an experiment trains them with
    `reward_model`."""

    name: str
    epochs: int = Field(1, ge=1)
    """Passes over the pairs, or over the labelled episodes."""
    batch_size: int = Field(8, ge=1)
    """Pairs, or labelled episodes, per gradient step."""
    heads: dict[str, FiniteFloat] = Field({"overall": 1.0}, min_length=1)
    """Weight of each learned score, by name; the weighted sum of the scores is the reward. `overall` learns the judged
    reward, any other name the component of that name in the scores, `continued` the labels of
    `reward_model.continuations`."""
    hidden_units: int | None = Field(None, ge=1, le=65_536)
    """Units of a layer with ReLU between the hidden state and the heads; null: linear heads."""
    pairs: Literal["best_worst", "all"] = "all"
    """Pairs of episodes per scenario: the best with the worst (`best_worst`), or every two episodes with different
    values (`all`)."""
    min_margin: float = Field(0.0, ge=0)
    """Largest difference of the values at which a pair is left out."""
    margin: Literal["none", "reward"] = "none"
    """Margin between the two scores of a pair: `none`, or `reward` for the difference of the judged values."""
    centering: float = Field(0.0, ge=0)
    """Weight of the squared sum of a pair's two scores, which keeps scores around 0."""
    held_out: float = Field(0.2, ge=0, lt=1)
    """Held-out share of the scenarios, on which the pair accuracy is measured."""

    scores_turns: ClassVar[bool] = False
    """True if the model scores each turn, False if it scores whole episodes."""

    @property
    def learns_turn_labels(self) -> bool:
        """True if training uses labels of single turns and no comparisons."""
        return False

    def key_part(self) -> dict[str, Any]:
        return {name: value for name, value in super().key_part().items() if (name, value) != ("hidden_units", None)}

    @field_validator("heads")
    @classmethod
    def _validate_heads(cls, heads: dict[str, float]) -> dict[str, float]:
        if invalid := [name for name in heads if not re.fullmatch(r"[A-Za-z0-9_.-]+", name)]:
            raise ValueError(f"{invalid[0]!r} is not a valid name; expected letters, digits, _, - and .")
        if not any(heads.values()):
            raise ValueError("all weights are 0; expected a weight other than 0 for at least one head")
        return dict(sorted(heads.items()))  # sorted: the order of the keys does not change the content hash


class RewardModelSpec(RewardTrainingSpec):
    """Bradley-Terry model that scores an episode at its last token (arXiv:2203.02155)."""

    name: Literal["reward_model"] = "reward_model"


class ProcessRewardModelSpec(RewardTrainingSpec):
    """Process reward model that scores each turn at its last token (arXiv:2305.20050)."""

    name: Literal["process_reward_model"] = "process_reward_model"
    loss: Literal["mse", "comparison"] = "mse"
    """`mse`: squared error to the step rewards (`overall`), or to the components `NAME/0`, `NAME/1` and so on of the
    scores. `comparison`: Bradley-Terry on the sums over the turns of an episode. margin and centering apply to
    `comparison` only; with `mse`, pairs only serve to measure the accuracy."""

    scores_turns: ClassVar[bool] = True

    @property
    def learns_turn_labels(self) -> bool:
        return self.loss == "mse"
