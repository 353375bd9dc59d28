"""Specs of the policy gradients: GRPO and its variants, and what PPO shares with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field

from components.algorithms.spec import Action, CostSpec, DecaySpec, RoundFacts
from components.errors import Problem

if TYPE_CHECKING:
    from components.algorithms.trainer import GroupGradients, Trainer, TrainingContext


class PolicyGradientSpec(DecaySpec):
    """Hyperparameters that all policy gradient algorithms share: how the loss weighs a token, given its advantage."""

    name: str
    epochs: int = Field(1, ge=1)
    """Passes over the batch of a round."""
    minibatches: int = Field(1, ge=1)
    """Gradient steps per pass; must divide collect.scenarios."""
    credit: Literal["episode", "turns", "roles"] = "episode"
    """`episode`: the judged reward is credited to every token. `turns`: a token is credited with the discounted step
    rewards from its turn on; the judged reward is not used. `roles`: a token is credited with the sum of the step
    rewards of its role, such as planner or worker (`reward=by_role`), which is compared with that of the same role in
    the other episodes; the judged reward is not used."""
    ratio: Literal["token", "sequence_mean", "sequence"] = "token"
    """Level of the importance ratio (current policy over old policy): each `token`; or the whole history, as the
    geometric mean over its tokens (`sequence_mean`, GSPO) or as their product (`sequence`, RLOO)."""
    objective: Literal["clip", "cispo"] = "clip"
    """`clip`: clipped surrogate of PPO. `cispo`: REINFORCE with each token weighted by its clipped ratio."""
    clip_low: float = Field(0.2, gt=0, le=1)
    """Lower clip range: the ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = Field(0.28, gt=0)
    """Upper clip range, see clip_low. A larger upper range lets unlikely tokens become likely (arXiv:2503.14476,
    section 3.1)."""
    dual_clip: float | None = Field(3.0, gt=1)
    """Upper limit of the ratio where the advantage is negative, with `objective: clip` (dual-clip PPO,
    arXiv:1912.09729). Without it, one token whose probability has risen many times can dominate the gradient. null sets
    no limit."""
    normalization: Literal["tokens", "sequences", "constant"] = "tokens"
    """Reduction of token losses to the loss of a batch. `tokens`: mean over all sampled tokens of the batch (DAPO,
    arXiv:2503.14476). `sequences`: mean over trajectories of the mean over each trajectory's tokens (GRPO). `constant`:
    sum over a trajectory's tokens divided by `constant_length`, then the mean over trajectories (Dr. GRPO)."""
    constant_length: int = Field(512, ge=1)
    """Divisor of `normalization: constant`, in tokens."""
    reference: Literal["base", "start"] = "start"
    """Reference policy of the KL divergence. `start`: the checkpoint that the first round starts from, such as that of
    the warm-up. `base`: the base model."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus: the policy's mean entropy (nats per token) is added to the objective."""
    correction: Literal["auto", "none", "truncate", "mask"] = "auto"
    """Importance sampling correction for an engine whose log-probabilities differ from the trainer's, and for episodes
    of an earlier policy (`collect.overlap`). The old policy of the ratios is then the policy before the first gradient
    step, as computed by the trainer. Each token is weighted by its trainer-to-sampler ratio, which is clipped at
    `correction_limit` (`truncate`) or set to 0 outside [1 / correction_limit, correction_limit] (`mask`). `auto`:
    `none` if the embedded engine computes in float32 and samples from the policy in training, else `truncate`."""
    correction_level: Literal["token", "sequence"] = "token"
    """Level of the trainer-to-sampler ratio: each token or its whole history."""
    correction_limit: float = Field(2.0, gt=1)
    """Largest trainer-to-sampler ratio, see correction."""
    overlong: int = Field(0, ge=0)
    """Number of sampled tokens in an episode at which the soft length penalty reaches its maximum (DAPO). 0 disables
    the penalty."""
    overlong_buffer: int = Field(0, ge=0)
    """Number of tokens below `overlong` over which the length penalty rises linearly from 0."""
    overlong_penalty: float = Field(1.0, ge=0)
    """Maximum of the length penalty, subtracted from the reward."""
    mask_truncated: bool = False
    """Masking of truncated episodes: episodes that a limit ended (context, turns, calls) or with a message that was cut
    off at agent.max_tokens are excluded from the loss. They still count in the baseline."""
    max_kl: float = Field(0.5, gt=0)
    """Largest KL divergence of a gradient step's batch (nats per token) from the old policy of the ratios: the policy
    that sampled the batch or, with a `correction` or a sequence-level ratio, the policy before the first gradient step.
    Each token contributes at most 5 nats."""
    high_kl: Action = "stop"
    """Response to a KL divergence above max_kl: `warn` and take the step, `skip` the step, or `stop` with an error."""
    min_entropy: float = Field(0.0, ge=0)
    """Smallest mean entropy of the policy on a gradient step's batch (nats per token). 0 disables the check. A policy
    with collapsed entropy samples the same tokens again and again, and learns nothing from them."""
    low_entropy: Action = "warn"
    """Response to an entropy below min_entropy: `warn` and take the step, `skip` the step, or `stop` with an error."""
    costs: dict[str, CostSpec] | None = None
    """Constraints by name, such as `{invalid_actions: {limit: 0.5, learning_rate: 0.1, initial: 0.0}}`. A name is a
    metric of an episode, a component of its score or a number of its outcome; its mean must stay below the limit. Each
    cost times its learned multiplier is subtracted from the reward. null sets no constraints."""
    cost_scaling: bool = True
    """Division of the reward minus its costs by 1 plus the sum of the multipliers."""
    reward_cap: float | None = None
    """Upper limit of the judged reward; larger rewards are clipped to it. null sets no limit."""

    needs_sampled_tokens: ClassVar[bool] = True

    @property
    def token_weights(self) -> Literal["truncate", "mask"] | None:
        """Return the form of the trainer-to-sampler weights, or None if tokens are not weighted. The experiment
        replaces `auto` by the value that it stands for; an `auto` that is left weights nothing."""
        return self.correction if self.correction == "truncate" or self.correction == "mask" else None

    @property
    def credits_turns(self) -> bool:
        return self.credit != "episode"

    @property
    def reference_is_start(self) -> bool:
        return self.reference == "start"

    @property
    def credits_roles(self) -> bool:
        return self.credit == "roles"

    @property
    def constraints(self) -> Mapping[str, CostSpec]:
        return self.costs or {}

    def problems(self) -> Iterator[Problem]:
        if self.credits_turns and self.reward_cap is not None:
            yield Problem(
                "algorithm.reward_cap",
                f"{self.reward_cap:g}: caps the episode's reward, which credit={self.credit} does not use; expected "
                "null",
            )

    def round_problems(self, rounds: RoundFacts) -> Iterator[Problem]:
        if rounds.scenarios % self.minibatches:
            divisors = [n for n in range(1, rounds.scenarios + 1) if rounds.scenarios % n == 0]
            yield Problem(
                "algorithm.minibatches",
                f"{self.minibatches} does not divide collect.scenarios={rounds.scenarios}; "
                f"expected one of {', '.join(map(str, divisors))}",
            )
        if rounds.temperature == 0:
            yield Problem(
                "collect.temperature",
                "0: greedy decoding does not sample, so the policy gradient is undefined; expected more than 0",
            )
        if self.overlong_buffer > self.overlong:
            yield Problem(
                "algorithm.overlong_buffer",
                f"{self.overlong_buffer}: the buffer ends at algorithm.overlong={self.overlong} tokens; expected "
                "at most that",
            )

    def off_policy_problems(self, *, reason: str | None, replay: bool) -> Iterator[Problem]:
        if reason is not None and self.correction == "none":
            yield Problem(
                "algorithm.correction",
                f"none: {reason}, and clipping removes the gradient where they differ; expected truncate or mask, or "
                "collect.overlap=0",
            )
        if replay and self.ratio != "token" and self.correction == "none":  # replayed episodes have another old policy
            yield Problem(
                "algorithm.correction",
                f"none: with ratio={self.ratio} ratios are relative to the policy before the first gradient step, but "
                "replay adds episodes of earlier policies; expected truncate or mask",
            )

    def truncation_reason(self, mismatch: str | None, *, replay: bool) -> str | None:
        if self.correction != "auto":
            return None
        if mismatch is None and replay and self.ratio != "token":
            return f"with replay, ratio={self.ratio} trains on episodes of earlier policies"
        return mismatch

    def resolve_correction(self, mismatch: str | None, *, replay: bool) -> Self:
        if self.correction != "auto":
            return self
        truncates = self.truncation_reason(mismatch, replay=replay) is not None
        return self.model_copy(update={"correction": "truncate" if truncates else "none"})


class GRPOSpec(PolicyGradientSpec):
    """Group relative policy optimisation (arXiv:2402.03300) on stored trajectories, with the options that its variants
    change."""

    has_group_gradients: ClassVar[bool] = True
    trains_roles: ClassVar[bool] = True

    name: Literal["grpo"] = "grpo"
    discount: float = Field(1.0, ge=0, le=1)
    """Discount of a step reward per turn; only with `credit: turns`."""
    baseline: Literal["group", "leave_one_out", "batch", "none"] = "group"
    """Baseline of a return: the mean return of its `group`, of the other episodes of its group (`leave_one_out`), of
    the whole `batch`, or `none`."""
    scale: Literal["group", "batch", "none"] = "batch"
    """Divisor of the advantages: the standard deviation of the returns of the `batch`; of the `group` (as in the GRPO
    paper; with the baselines `group` and `leave_one_out`); or `none` (Dr. GRPO, arXiv:2503.20783). With `group`, a tiny
    difference within one group counts as much as the difference between success and failure in another."""
    turn_baseline: Literal["index", "state", "process"] = "index"
    """Turns that a turn is compared with under `credit: turns`. `index`: turns with the same index in their episode.
    `state`: turns taken in the same state, in addition to a comparison of whole episodes (GiGPO, arXiv:2505.10978).
    `process`: all step rewards of the group are normalised, then summed from the turn on (arXiv:2402.03300, section
    4.1.3)."""
    state_weight: float = Field(1.0, ge=0)
    """Weight of the turn-level advantage relative to the episode-level advantage, with `turn_baseline: state`."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Weight of KL(policy || reference)."""
    measure_kl: bool = True
    """Measurement of the KL divergence from the reference if it is not part of the loss, on packs of each gradient step
    that contain eight sequences or more: one more forward pass of these packs, as the reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence on a sampled token."""
    kl_in: Literal["loss", "reward", "token_rewards"] = "loss"
    """Place of the KL penalty: in the `loss`; subtracted from the `reward` of the whole episode before advantages are
    computed; or subtracted from the reward of each token (`token_rewards`), so that a token is credited with the KL
    divergence of the tokens after it."""

    @property
    def reads_reference(self) -> bool:
        return self.kl_coefficient > 0 or self.measure_kl

    @property
    def compares_within_group(self) -> bool:
        return self.baseline in ("group", "leave_one_out")

    @property
    def needs_reward_spread(self) -> bool:
        return self.compares_within_group and not self.credits_turns and not self.costs

    def build(self, context: TrainingContext) -> Trainer:
        from components.algorithms.policy_gradient.cost_constraints import ConstrainedTrainer
        from components.algorithms.policy_gradient.trainer import train_policy_gradient

        return ConstrainedTrainer(self, context, lambda constrained: train_policy_gradient(self, constrained))

    def group_gradients(self, context: TrainingContext) -> GroupGradients:
        from components.algorithms.policy_gradient.cost_constraints import constrained
        from components.algorithms.policy_gradient.group_gradients import PolicyGradients

        return PolicyGradients(self, constrained(self, context)[0])

    def problems(self) -> Iterator[Problem]:
        yield from self._turn_credit_problems()
        yield from self._role_credit_problems()
        if self.scale == "group" and not self.compares_within_group:
            yield Problem(
                "algorithm.scale",
                f"group: with baseline={self.baseline} the advantage is not relative to the group, and a group of "
                "nearly equal returns would divide it by a very small standard deviation; expected batch or none, or "
                "baseline=group or leave_one_out",
            )
        yield from super().problems()

    def _role_credit_problems(self) -> Iterator[Problem]:
        """Yield the options that belong to the episode as a whole, which `credit: roles` divides."""
        if self.credit != "roles":
            return
        if self.kl_coefficient and self.kl_in != "loss":
            yield Problem(
                "algorithm.kl_in",
                f"{self.kl_in}: subtracts the KL divergence of the whole episode, but credit=roles rewards each role "
                "by itself; expected loss",
            )
        for name in ("overlong", "costs"):
            if getattr(self, name):
                yield Problem(
                    f"algorithm.{name}",
                    f"lowers the reward of the whole episode, but credit=roles rewards each role by itself; expected "
                    f"{'0' if name == 'overlong' else 'null'}",
                )

    def _turn_credit_problems(self) -> Iterator[Problem]:
        """Yield the options with which the gradient of `credit: turns` is undefined."""
        if self.credit != "turns" or not self.kl_coefficient:
            return
        if self.turn_baseline != "index" and self.kl_in == "token_rewards":
            kl_options = "loss" if self.turn_baseline == "process" else "loss or reward"
            yield Problem(
                "algorithm.turn_baseline",
                f"{self.turn_baseline}: compares returns of turns, but kl_in=token_rewards gives each token its own "
                f"return; expected turn_baseline=index, or kl_in={kl_options}",
            )
        elif self.turn_baseline == "process" and self.kl_in == "reward":
            yield Problem(
                "algorithm.kl_in",
                "reward: turn_baseline=process normalizes step rewards before it sums them, so the KL of the whole "
                "episode would count once per turn; expected kl_in=loss",
            )

    def round_problems(self, rounds: RoundFacts) -> Iterator[Problem]:
        if rounds.group_size == 1 and self.compares_within_group:
            yield Problem(
                "collect.group_size",
                f"1: {self.name} compares episodes within a group; expected at least 2, another algorithm, or "
                "algorithm.baseline=batch with algorithm.scale=batch",
            )
        yield from super().round_problems(rounds)


class DrGRPOSpec(GRPOSpec):
    """GRPO without its length and difficulty biases (arXiv:2503.20783)."""

    name: Literal["dr_grpo"] = "dr_grpo"  # type: ignore[assignment]
    scale: Literal["group", "batch", "none"] = "none"
    normalization: Literal["tokens", "sequences", "constant"] = "constant"


class DAPOSpec(GRPOSpec):
    """Decoupled clip range, token-level loss, no KL penalty, truncated episodes masked (arXiv:2503.14476)."""

    name: Literal["dapo"] = "dapo"  # type: ignore[assignment]
    mask_truncated: bool = True


class GSPOSpec(GRPOSpec):
    """Group sequence policy optimisation: sequence-level ratio and clip (arXiv:2507.18071)."""

    name: Literal["gspo"] = "gspo"  # type: ignore[assignment]
    ratio: Literal["token", "sequence_mean", "sequence"] = "sequence_mean"
    normalization: Literal["tokens", "sequences", "constant"] = "sequences"
    clip_low: float = Field(3e-4, gt=0, le=1)
    clip_high: float = Field(4e-4, gt=0)


class CISPOSpec(GRPOSpec):
    """Clipped importance sampling weights: every token keeps its gradient (arXiv:2506.13585)."""

    name: Literal["cispo"] = "cispo"  # type: ignore[assignment]
    objective: Literal["clip", "cispo"] = "cispo"
    clip_low: float = Field(1.0, gt=0, le=1)
    clip_high: float = Field(4.0, gt=0)


class RLOOSpec(GRPOSpec):
    """REINFORCE with a leave-one-out baseline, sequence-level ratio, KL penalty in the reward (arXiv:2402.14740)."""

    name: Literal["rloo"] = "rloo"  # type: ignore[assignment]
    baseline: Literal["group", "leave_one_out", "batch", "none"] = "leave_one_out"
    scale: Literal["group", "batch", "none"] = "none"
    ratio: Literal["token", "sequence_mean", "sequence"] = "sequence"
    normalization: Literal["tokens", "sequences", "constant"] = "sequences"
    kl_coefficient: float = Field(0.05, ge=0)
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    kl_in: Literal["loss", "reward", "token_rewards"] = "reward"


class ReinforcePPSpec(GRPOSpec):
    """REINFORCE++: advantages normalised over the batch, KL penalty in the token rewards (arXiv:2501.03262)."""

    name: Literal["reinforce_pp"] = "reinforce_pp"  # type: ignore[assignment]
    baseline: Literal["group", "leave_one_out", "batch", "none"] = "batch"
    scale: Literal["group", "batch", "none"] = "batch"
    kl_coefficient: float = Field(0.01, ge=0)
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    kl_in: Literal["loss", "reward", "token_rewards"] = "token_rewards"
