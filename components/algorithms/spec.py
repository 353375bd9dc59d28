"""Specs of the training algorithms. They are light: only the trainers that read them import torch."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, field_validator

from components.models.spec import TeacherSpec
from components.specs import Spec

Action = Literal["warn", "skip", "stop"]
"""Response of a guard to a gradient step: `warn` takes the step and logs a warning, `skip` skips the step, `stop` ends
the training with an error."""


class OptimizerSpec(Spec):
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
    pack_tokens: int = Field(4096, ge=64)
    """Largest number of tokens in one forward pass. Bounds the memory and does not change the result. A prefix that
    sequences share is computed once where they fit into one pack; models that cannot share prefixes count padded
    rows."""
    gradient_checkpointing: bool = False
    """Gradient checkpointing: each layer stores only its input and is recomputed in the backward pass. Takes a fraction
    of the memory and about a third more time; the result is the same."""
    non_finite: Literal["skip", "stop"] = "stop"
    """Response to a loss or gradient that is infinite or NaN: `skip` the step, or `stop` with an error before a
    checkpoint is written."""


class DecaySpec(OptimizerSpec):
    """Decay of the learning rate over the rounds."""

    decay: Literal["none", "linear", "cosine"] = "none"
    """Decay of the learning rate to 0 at the end of the last round, `linear` or `cosine` (half a cosine). Its length
    follows from `rounds`, so it has no key of its own. `none` keeps the learning rate constant."""


class SFTSpec(OptimizerSpec):
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


class CostSpec(Spec):
    """A constraint on the mean cost of an episode, with a learned Lagrange multiplier."""

    limit: float
    """Largest allowed mean cost over the episodes of a round."""
    learning_rate: float = Field(0.1, gt=0)
    """Step size of the multiplier: each round adds this times (mean cost - limit) to the multiplier, which stays at
    least 0."""
    initial: float = Field(0.0, ge=0)
    """Initial value of the multiplier."""


class PolicyGradientSpec(DecaySpec):
    """Hyperparameters that all policy gradient algorithms share: how the loss weighs a token, given its advantage."""

    name: str
    epochs: int = Field(1, ge=1)
    """Passes over the batch of a round."""
    minibatches: int = Field(1, ge=1)
    """Gradient steps per pass; must divide collect.scenarios."""
    credit: Literal["episode", "turns"] = "episode"
    """`episode`: the judged reward is credited to every token. `turns`: a token is credited with the discounted step
    rewards from its turn on; the judged reward is not used."""
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
    """Masking of truncated episodes: episodes with a message that was cut off at agent.max_tokens are excluded from the
    loss. They still count in the baseline."""
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

    @property
    def token_weights(self) -> Literal["truncate", "mask"] | None:
        """Return the form of the trainer-to-sampler weights, or None if tokens are not weighted. The experiment
        replaces `auto` by the value that it stands for; an `auto` that is left weights nothing."""
        return self.correction if self.correction == "truncate" or self.correction == "mask" else None


class GRPOSpec(PolicyGradientSpec):
    """Group relative policy optimisation (arXiv:2402.03300) on stored trajectories, with the options that its variants
    change."""

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
    """Measurement of the KL divergence from the reference if it is not part of the loss, on the trained tokens of eight
    episodes per gradient step."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence on a sampled token."""
    kl_in: Literal["loss", "reward", "token_rewards"] = "loss"
    """Place of the KL penalty: in the `loss`; subtracted from the `reward` of the whole episode before advantages are
    computed; or subtracted from the reward of each token (`token_rewards`), so that a token is credited with the KL
    divergence of the tokens after it."""


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
    """Exclusion of episodes with a message that was cut off at agent.max_tokens."""
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

    pairs: Literal["best_worst", "all"] = "best_worst"
    """Pairs of episodes per scenario: the best with the worst (`best_worst`), or every two episodes with different
    rewards (`all`)."""
    min_margin: float = Field(0.0, ge=0)
    """Largest reward difference at which a pair is left out."""


class DPOSpec(PairSpec):
    """Direct preference optimisation (arXiv:2305.18290)."""

    name: Literal["dpo"] = "dpo"
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Assumed share of preferences with swapped labels."""
    reference: Literal["base", "start"] = "start"
    """Reference policy. `start`: the checkpoint that the first round starts from, such as that of the warm-up. `base`:
    the base model."""


class IPOSpec(PairSpec):
    """Identity preference optimisation: a margin of fixed size (arXiv:2310.12036)."""

    name: Literal["ipo"] = "ipo"
    reference: Literal["base", "start"] = "start"
    """Reference policy. `start`: the checkpoint that the first round starts from, such as that of the warm-up. `base`:
    the base model."""


class ORPOSpec(PairSpec):
    """Odds ratio preference optimisation: the likelihood of the chosen episode plus an odds ratio, without a reference
    (arXiv:2403.07691)."""

    name: Literal["orpo"] = "orpo"


class KTOSpec(PreferenceSpec):
    """Kahneman-Tversky optimisation: episodes labelled good or bad, without pairs (arXiv:2402.01306)."""

    name: Literal["kto"] = "kto"
    batch_size: int = Field(16, ge=2)
    threshold: float = 0.5
    """Smallest reward of a good episode."""
    good_weight: float = Field(1.0, ge=0)
    """Weight of good episodes in the loss."""
    bad_weight: float = Field(1.0, ge=0)
    """Weight of bad episodes in the loss."""
    reference: Literal["base", "start"] = "start"
    """Reference policy. `start`: the checkpoint that the first round starts from, such as that of the warm-up. `base`:
    the base model."""


class DistillSpec(DecaySpec):
    """On-policy distillation: minimises the KL divergence from a teacher at each token that the policy sampled
    (arXiv:2306.13649)."""

    name: Literal["distill"] = "distill"
    epochs: int = Field(1, ge=1)
    """Passes over the trajectories of a round."""
    batch_size: int = Field(16, ge=1)
    """Trajectories per gradient step. A trajectory with several histories counts once per history."""
    teacher: TeacherSpec
    """Teacher model. It must have the vocabulary of the model in training."""
    temperature: float = Field(1.0, gt=0)
    """Temperature: the logits of both models are divided by it before the comparison."""


class ReplaySpec(Spec):
    """Replay of groups of earlier rounds."""

    share: float = Field(0.25, ge=0, lt=1)
    """Share of a training's groups that come from earlier rounds, if there are enough of them."""
    rounds: int = Field(2, ge=1)
    """Number of earlier rounds that groups are drawn from."""
    max_staleness: int | None = Field(None, ge=0)
    """Largest number of policy versions between the policy that sampled a trajectory and the policy in training. Older
    trajectories are dropped. null sets no limit."""


class EWCSpec(Spec):
    """Elastic weight consolidation: a penalty on changes of the weights that mattered to the policy before the first
    round (arXiv:1612.00796)."""

    coefficient: float = Field(1.0, gt=0)
    """Weight of the penalty."""
    trajectories: int = Field(64, ge=1)
    """Largest number of trajectories for the Fisher information; each takes one backward pass."""
    rounds: int = Field(1, ge=1)
    """For a fork: number of last rounds of the other run that the trajectories come from. Without a fork they come from
    the warm-up."""


AlgorithmSpec = Annotated[
    GRPOSpec
    | DrGRPOSpec
    | DAPOSpec
    | GSPOSpec
    | CISPOSpec
    | RLOOSpec
    | ReinforcePPSpec
    | PPOSpec
    | SFTSpec
    | DPOSpec
    | IPOSpec
    | ORPOSpec
    | KTOSpec
    | DistillSpec,
    Field(discriminator="name"),
]


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


RewardAlgorithmSpec = Annotated[RewardModelSpec | ProcessRewardModelSpec, Field(discriminator="name")]
