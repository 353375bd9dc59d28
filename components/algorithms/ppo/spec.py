"""Spec of proximal policy optimisation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from components.algorithms.policy_gradient.spec import PolicyGradientSpec
from components.algorithms.spec import RoundFacts
from components.errors import Problem

if TYPE_CHECKING:
    from components.algorithms.policy.policy import Policy
    from components.algorithms.trainer import TrainedModule, Trainer, TrainingContext


class PPOSpec(PolicyGradientSpec):
    """Proximal policy optimisation (arXiv:1707.06347) with a value function, as in InstructGPT (arXiv:2203.02155), with
    the changes to the critic of VC-PPO (arXiv:2503.01491) and VAPO (arXiv:2504.05118)."""

    name: Literal["ppo"] = "ppo"
    epochs: int = Field(4, ge=1)
    """Passes over the batch of a round."""
    credit: Literal["episode", "turns"] = "episode"
    """`episode`: the judged reward is given at the last token of the episode. `turns`: each step reward is given at the
    last token of its turn; the judged reward is not used."""
    mask_truncated: bool = False
    """Exclusion of episodes that a limit ended (context, turns, calls) or with a message that was cut off at
    agent.max_tokens."""
    reference: Literal["base", "start"] = "start"
    """Reference policy of the KL divergence. `start`: the checkpoint that the first round starts from, such as that of
    the warm-up. `base`: the base model."""
    discount: float = Field(1.0, ge=0, le=1)
    """Discount of a reward per token."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """λ of the policy's advantages (generalised advantage estimation, arXiv:1506.02438, eq. 16). 1: the sum of future
    rewards minus the value. Below 1, a future reward is weighted by λ per token and the values of later tokens fill in:
    less variance if the critic is accurate."""
    value_gae_lambda: float = Field(1.0, ge=0, le=1)
    """λ of the critic's targets (decoupled GAE, arXiv:2504.05118, section 4.1). 1: the discounted sum of future
    rewards, unbiased. Below 1, the critic also bootstraps from its own values."""
    whiten: bool = True
    """Whitening: advantages are normalised to mean 0 and standard deviation 1 over all tokens of the round."""
    kl_coefficient: float = Field(0.02, ge=0)
    """Weight of KL(policy || reference), which is subtracted from the reward of each token. With a kl_target it is the
    weight in the first round."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL divergence on a sampled token."""
    kl_target: float | None = Field(0.1, gt=0)
    """Target KL divergence (nats per token) of the adaptive coefficient. After a round with more than 1.5 times the
    target, the coefficient is multiplied by 1.5; after a round with less than the target divided by 1.5, it is divided
    by 1.5. null keeps the coefficient constant."""
    value: Literal["head", "model"] = "head"
    """Value function: a linear `head` on the policy's last hidden states, whose gradient also reaches the policy's
    adapter; or a separate `model` with its own adapter on the same base, and a head."""
    value_coefficient: float = Field(0.1, ge=0)
    """Weight of the value loss."""
    value_clip: float | None = Field(0.2, gt=0)
    """Clip range of a value around the value before the first gradient step, in standard deviations of the returns if
    these are normalised. null disables the clip."""
    value_learning_rate_ratio: float = Field(10.0, gt=0)
    """Learning rate of the critic (the head and the value model's adapter), as a multiple of `learning_rate`."""
    value_norm_decay: float | None = Field(0.7, ge=0, lt=1)
    """Decay of value normalisation (arXiv:2103.01955, section 5.1): the critic learns returns minus their running mean,
    divided by their running standard deviation. In both statistics a round has this factor times the weight of the next
    round. null disables the normalisation."""
    value_pretraining_steps: int = Field(20, ge=0)
    """Gradient steps that train only the critic, on the episodes of the first round, before the policy's first gradient
    step (value pretraining, arXiv:2504.05118, section 4.1). Each step fits the future rewards (λ = 1) of a minibatch.
    Too many steps overfit the head to the episodes whose advantages it then estimates."""

    has_critic: ClassVar[bool] = True

    @property
    def reads_reference(self) -> bool:
        return self.kl_coefficient > 0

    def build(self, context: TrainingContext) -> Trainer:
        from components.algorithms.policy_gradient.cost_constraints import ConstrainedTrainer
        from components.algorithms.ppo.trainer import train_ppo

        return ConstrainedTrainer(self, context, lambda constrained: train_ppo(self, constrained))

    def critic(self, policy: Policy) -> TrainedModule:
        from components.algorithms.ppo.critic import ValueCritic

        return ValueCritic(policy, self)

    def round_problems(self, rounds: RoundFacts) -> Iterator[Problem]:
        yield from super().round_problems(rounds)
        if self.kl_target is not None and not self.kl_coefficient:
            yield Problem(
                "algorithm.kl_target",
                f"{self.kl_target:g}: scales algorithm.kl_coefficient by a factor, which has no effect on 0; expected "
                "null, or an algorithm.kl_coefficient above 0",
            )

    def full_finetuning_problems(self) -> Iterator[Problem]:
        if self.value == "model":
            yield Problem(
                "algorithm.value",
                "model: the value model is a second LoRA adapter, but model.lora=null; expected head",
            )
