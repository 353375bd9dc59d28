"""Bases of the specs of algorithms. Each family of algorithms declares its specs in `spec.py` of its own package.

Specs are light: only the trainers that they build import torch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from components.errors import Problem, SpecError
from components.specs import Spec
from components.specs.declared import DeclaredSpec
from components.trajectories.feedback_episodes import Learns

if TYPE_CHECKING:
    from components.algorithms.policy.policy import Policy
    from components.algorithms.trainer import GroupGradients, TrainedModule, Trainer, TrainingContext
    from components.models.spec import FrozenModelSpec

Action = Literal["warn", "skip", "stop"]
"""Response of a guard to a gradient step: `warn` takes the step and logs a warning, `skip` skips the step, `stop` ends
the training with an error."""


CPU_PACK_TOKENS = 4096
"""Value of `pack_tokens: auto` on a CPU, in stage keys, and in trainings of reward models."""


class OptimizerSpec(DeclaredSpec):
    """AdamW (arXiv:1711.05101), gradient clipping and memory use."""

    learning_rate: float = Field(1e-4, gt=0, le=1)
    """Learning rate of AdamW after the warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Number of gradient steps over which the learning rate rises linearly from 0. 0 disables the warm-up."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay: each step shrinks the trained weights by learning_rate times this factor."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the running mean of the gradient."""
    beta2: float = Field(0.99, ge=0, lt=1)
    """Decay of the running mean of the squared gradient."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Largest L2 norm of the gradient. A larger gradient is scaled down to this norm."""
    pack_tokens: Annotated[int, Field(ge=64)] | Literal["auto"] = "auto"
    """Largest number of tokens in one forward pass. Bounds the memory and changes the result by rounding only, except
    with `model.lora.dropout`, whose random masks are drawn for each pack. A prefix that sequences share is computed
    once where they fit into one pack; models that cannot share prefixes count padded rows. `auto`: for a policy
    without dropout on a GPU the largest power of two from 1,024 to 16,384 (4,096 with several processes) that is
    estimated to fit into its free memory; else 4,096."""
    gradient_checkpointing: bool = False
    """Gradient checkpointing: each layer stores only its input and is recomputed in the backward pass. Takes a fraction
    of the memory and about a third more time; the result is the same."""
    non_finite: Literal["skip", "stop"] = "stop"
    """Response to a loss or gradient that is infinite or NaN: `skip` the step, or `stop` with an error before a
    checkpoint is written."""

    @property
    def pack_size(self) -> int:
        """`pack_tokens` as a number; `auto` is what it is on a CPU."""
        return CPU_PACK_TOKENS if self.pack_tokens == "auto" else self.pack_tokens

    def key_part(self) -> dict[str, Any]:
        return super().key_part() | {"pack_tokens": self.pack_size}


class CostSpec(Spec):
    """A constraint on the mean cost of an episode, with a learned Lagrange multiplier."""

    limit: float = Field(ge=0)
    """Largest allowed mean cost over the episodes of a round."""
    learning_rate: float = Field(0.1, gt=0)
    """Step size of the multiplier: each round adds this times (mean cost - limit) to the multiplier, which stays at
    least 0."""
    initial: float = Field(0.0, ge=0)
    """Initial value of the multiplier."""


@dataclass(frozen=True)
class RoundFacts:
    """Settings of the rounds that an algorithm may depend on."""

    scenarios: int
    """Scenarios of a round, each with one group of episodes."""
    group_size: int
    """Episodes of a group."""
    temperature: float
    """Sampling temperature."""


class AlgorithmSpec(OptimizerSpec):
    """Base of the algorithms that train a policy.

    A subclass declares its settings as fields, `name` among them, and defines `build`. It overrides those of the
    other members that do not hold for it.
    """

    needs_sampled_tokens: ClassVar[bool] = False
    """True if it trains only on tokens that the policy sampled, with their log-probabilities."""
    ignores_rewards: ClassVar[bool] = False
    """True if neither the algorithm nor a choice of episodes by reward affects the training."""
    has_group_gradients: ClassVar[bool] = False
    """True if it defines `group_gradients`."""
    trains_roles: ClassVar[bool] = False
    """True if it trains the adapter of each role on the tokens of that role (`model.lora.roles`)."""
    has_critic: ClassVar[bool] = False
    """True if it trains a critic beside the policy."""
    feedback_kinds: ClassVar[tuple[Learns, ...]] = ()
    """Kinds of human feedback that it trains on; empty if it cannot."""

    @abstractmethod
    def build(self, context: TrainingContext) -> Trainer:
        """Return the trainer of one training."""

    def group_gradients(self, context: TrainingContext) -> GroupGradients:
        """Return the gradients of the groups of a training, at the policy of the context. Raises SpecError unless
        `has_group_gradients` is True."""
        raise SpecError([Problem("algorithm", f"{self.name} has no policy gradient of a group")])

    def critic(self, policy: Policy) -> TrainedModule | None:
        """Return a new critic, or None if the algorithm has none."""
        return None

    @property
    def decays(self) -> bool:
        """True if the learning rate depends on the number of the round."""
        return False

    @property
    def imitates(self) -> bool:
        """True if it makes every selected episode more likely, the rejected ones too."""
        return False

    @property
    def good_from(self) -> float | None:
        """Smallest reward of a good episode; those below are failures, which it needs as well. None without labels."""
        return None

    @property
    def compares_within_group(self) -> bool:
        """True if it compares the episodes of a group with each other."""
        return False

    @property
    def compares(self) -> bool:
        """True if it compares episodes with each other: those of a group, or of a type."""
        return self.compares_within_group

    @property
    def needs_reward_spread(self) -> bool:
        """True if a group with equal rewards has no training signal."""
        return False

    @property
    def credits_turns(self) -> bool:
        """True if it learns from step rewards instead of the reward of the episode."""
        return False

    @property
    def credits_roles(self) -> bool:
        """True if it credits each role of an episode with the step rewards of that role."""
        return False

    @property
    def reads_reference(self) -> bool:
        """True if it measures log-probabilities under the reference policy."""
        return False

    @property
    def reference_is_start(self) -> bool:
        """True if its reference policy is the checkpoint that the first round starts from."""
        return False

    @property
    def constraints(self) -> Mapping[str, CostSpec]:
        """Constraints on mean costs, by name."""
        return {}

    @property
    def teacher_model(self) -> FrozenModelSpec | None:
        """Model that the training needs besides the policy."""
        return None

    def problems(self) -> Iterator[Problem]:
        """Yield the problems between settings of the algorithm."""
        yield from ()

    def round_problems(self, rounds: RoundFacts) -> Iterator[Problem]:
        """Yield the problems between the algorithm and the episodes of the rounds."""
        yield from ()

    def full_finetuning_problems(self) -> Iterator[Problem]:
        """Yield the problems of training all weights, without an adapter."""
        yield from ()

    def off_policy_problems(self, *, reason: str | None, replay: bool) -> Iterator[Problem]:
        """Yield the problems of training on episodes of earlier policies. reason: why the episodes of a round are by
        earlier policies; None if they are not. replay: True if episodes of earlier rounds join them."""
        yield from ()

    def feedback_problems(self) -> Iterator[Problem]:
        """Yield the problems of training on human feedback."""
        yield from ()

    def truncation_reason(self, mismatch: str | None, *, replay: bool) -> str | None:
        """Return the reason for which an automatic importance sampling correction truncates, or None.

        mismatch: reason why the log-probabilities of sampled tokens differ from the trainer's. replay: True if the
        training includes episodes of earlier rounds."""
        return None

    def resolve_correction(self, mismatch: str | None, *, replay: bool) -> Self:
        """Return the spec with an automatic correction replaced by the one that it stands for."""
        return self


class DecaySpec(AlgorithmSpec):
    """Decay of the learning rate over the rounds."""

    decay: Literal["none", "linear", "cosine"] = "none"
    """Decay of the learning rate to 0 at the end of the last round, `linear` or `cosine` (half a cosine). Its length
    follows from `rounds`, so it has no key of its own. `none` keeps the learning rate constant."""

    @property
    def decays(self) -> bool:
        return self.decay != "none"
