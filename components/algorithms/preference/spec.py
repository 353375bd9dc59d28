"""Specs of the preference algorithms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from components.algorithms.spec import DecaySpec, RoundFacts
from components.errors import Problem
from components.specs import Spec
from components.trajectories.feedback_episodes import Learns

if TYPE_CHECKING:
    from components.algorithms.trainer import Trainer, TrainingContext

THRESHOLD = 0.5
"""Smallest reward of a good episode, by default."""


class ReferenceSpec(Spec):
    """Reference policy of a preference algorithm, and the likelihood term that keeps its good episodes likely."""

    reference: Literal["base", "start"] = "start"
    """Reference policy. `start`: the checkpoint that the first round starts from, such as that of the warm-up. `base`:
    the base model."""
    likelihood_weight: float = Field(0.0, ge=0)
    """Weight of the negative log-likelihood per token of the chosen episodes, for KTO of the good ones, in the loss
    (arXiv:2404.19733, eq. 1, alpha). A loss of log-ratios alone can lower the likelihood of chosen and rejected
    episodes alike. 0: no such term."""

    @property
    def reads_reference(self) -> bool:
        return True

    @property
    def reference_is_start(self) -> bool:
        return self.reference == "start"


class PreferenceSpec(DecaySpec):
    """Hyperparameters that all preference algorithms share."""

    name: str
    learning_rate: float = Field(1e-5, gt=0, le=1)
    epochs: int = Field(1, ge=1)
    """Passes over the pairs of a round; for KTO, over its episodes."""
    batch_size: int = Field(8, ge=1)
    """Pairs per gradient step; for KTO, episodes."""
    beta: float = Field(0.1, gt=0)
    """Strength of the regularisation towards the reference; for ORPO, weight of the preference term."""


class PairSpec(PreferenceSpec):
    """Hyperparameters of the algorithms that learn from pairs of episodes."""

    pairs: Literal["best_worst", "all", "type"] = "best_worst"
    """Pairs of episodes per scenario: the best with the worst (`best_worst`), or every two episodes with different
    rewards (`all`). `type`: each good episode with a failure of the same type of scenario, drawn from all rounds of the
    training."""
    threshold: float = Field(THRESHOLD, exclude_if=lambda threshold: threshold == THRESHOLD)
    """With `pairs: type`, the smallest reward of a good episode; the others are failures."""
    min_margin: float = Field(0.0, ge=0)
    """Largest reward difference at which a pair is left out."""

    feedback_kinds: ClassVar[tuple[Learns, ...]] = ("choices",)

    @property
    def good_from(self) -> float | None:
        return self.threshold if self.pairs == "type" else None

    @property
    def compares_within_group(self) -> bool:
        return self.pairs != "type"

    @property
    def compares(self) -> bool:
        return True

    @property
    def needs_reward_spread(self) -> bool:
        return self.compares_within_group

    def problems(self) -> Iterator[Problem]:
        if self.pairs != "type" and self.threshold != THRESHOLD:
            text = f"{self.threshold:g}: only pairs of a type have a threshold; expected {THRESHOLD}, or pairs=type"
            yield Problem("algorithm.threshold", text)

    def round_problems(self, rounds: RoundFacts) -> Iterator[Problem]:
        if rounds.group_size == 1 and self.compares_within_group:
            yield Problem(
                "collect.group_size",
                f"1: {self.name} compares two episodes of a scenario; expected at least 2, or algorithm=kto",
            )


class DPOSpec(ReferenceSpec, PairSpec):
    """Direct preference optimisation (arXiv:2305.18290)."""

    name: Literal["dpo"] = "dpo"
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Assumed share of preferences with swapped labels."""

    def build(self, context: TrainingContext) -> Trainer:
        from components.algorithms.preference.pair_trainers import DPOTrainer

        return DPOTrainer(self, context)


class IPOSpec(ReferenceSpec, PairSpec):
    """Identity preference optimisation: a margin of fixed size (arXiv:2310.12036)."""

    name: Literal["ipo"] = "ipo"

    def build(self, context: TrainingContext) -> Trainer:
        from components.algorithms.preference.pair_trainers import IPOTrainer

        return IPOTrainer(self, context)


class ORPOSpec(PairSpec):
    """Odds ratio preference optimisation: the likelihood of the chosen episode plus an odds ratio, without a reference
    (arXiv:2403.07691)."""

    name: Literal["orpo"] = "orpo"

    def build(self, context: TrainingContext) -> Trainer:
        from components.algorithms.preference.pair_trainers import ORPOTrainer

        return ORPOTrainer(self, context)


class KTOSpec(ReferenceSpec, PreferenceSpec):
    """Kahneman-Tversky optimisation: episodes labelled good or bad, without pairs (arXiv:2402.01306)."""

    name: Literal["kto"] = "kto"
    batch_size: int = Field(16, ge=2)
    threshold: float = THRESHOLD
    """Smallest reward of a good episode."""
    good_weight: float = Field(1.0, ge=0)
    """Weight of good episodes in the loss."""
    bad_weight: float = Field(1.0, ge=0)
    """Weight of bad episodes in the loss."""

    feedback_kinds: ClassVar[tuple[Learns, ...]] = ("scores",)

    @property
    def good_from(self) -> float | None:
        return self.threshold

    def build(self, context: TrainingContext) -> Trainer:
        from components.algorithms.preference.kto_trainer import KTOTrainer

        return KTOTrainer(self, context)
