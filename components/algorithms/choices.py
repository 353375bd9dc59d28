"""Types of fields that hold one of the declared algorithms, or one of a user's package by `_target_`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from components.algorithms.reward_models.spec import RewardTrainingSpec
from components.algorithms.spec import AlgorithmSpec
from components.specs.declared import choice_of, discover

ALGORITHMS = tuple(discover("components.algorithms", AlgorithmSpec, "spec").values())  # type: ignore[type-abstract]
"""Specs of all built-in algorithms that train a policy."""
REWARD_ALGORITHMS = tuple(discover("components.algorithms", RewardTrainingSpec, "spec").values())
"""Specs of all built-in trainings of reward models."""

if TYPE_CHECKING:
    AnyAlgorithmSpec = AlgorithmSpec
    FeedbackAlgorithmSpec = AlgorithmSpec
    AnyRewardAlgorithmSpec = RewardTrainingSpec
else:
    AnyAlgorithmSpec = choice_of(AlgorithmSpec, ALGORITHMS)
    FeedbackAlgorithmSpec = choice_of(AlgorithmSpec, (kind for kind in ALGORITHMS if kind.feedback_kinds))
    AnyRewardAlgorithmSpec = choice_of(RewardTrainingSpec, REWARD_ALGORITHMS)
