"""Specs of the training algorithms. They are light; the trainers that read them import torch."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, field_validator

from components.models.spec import TeacherSpec
from components.specs import Spec

Action = Literal["warn", "skip", "stop"]
"""Of a guard: take the step and say so; leave it out; end the training with an error."""


class OptimizerSpec(Spec):
    """AdamW."""

    learning_rate: float = Field(1e-4, gt=0, le=1)
    """Step size of AdamW, after the warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Gradient steps over which the learning rate rises linearly."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled: each step shrinks the adapter by learning_rate times this."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the running mean of the gradient."""
    beta2: float = Field(0.99, ge=0, lt=1)
    """Decay of the running mean of its square."""
    max_grad_norm: float = Field(1.0, gt=0)
    """The gradient is scaled down to this L2 norm."""
    pack_tokens: int = Field(4096, ge=64)
    """Most tokens that one forward pass computes; bounds memory, changes nothing else. What a group shares is computed
    once, where the group fits; models that cannot share count padded rows."""
    gradient_checkpointing: bool = False
    """Layers keep only what goes into them, and are computed again in the backward pass: a fraction of the memory, a
    third more time, the same result."""
    non_finite: Literal["skip", "stop"] = "stop"
    """What happens where the loss or the gradient is infinite or no number: the step is left out, or the training ends
    with an error before a checkpoint is written."""


class DecaySpec(OptimizerSpec):
    """The fall of the learning rate over the rounds."""

    decay: Literal["none", "linear", "cosine"] = "none"
    """Fall of the learning rate to 0 at the end of the last round, in a line or half a cosine; its length follows from
    `rounds`, so it has no key of its own. `none` keeps the rate."""


class SFTSpec(OptimizerSpec):
    """Supervised fine-tuning on assistant tokens, through TRL."""

    name: Literal["sft"] = "sft"
    epochs: int = Field(1, ge=1)
    """Passes over the trajectories."""
    batch_size: int = Field(8, ge=1)
    """Trajectories of one gradient step; one of several histories counts as several."""
    schedule: Literal["constant", "linear"] = "linear"
    """`linear`: the learning rate falls to 0 by the end of each training."""
    weight_temperature: float | None = Field(None, gt=0)
    """Weighted behaviour cloning: trajectories are weighted by softmax(reward / weight_temperature), scaled to a mean
    of 1; those without a reward are left out. null weighs all alike."""


class CostSpec(Spec):
    """What an episode costs, beside its reward."""

    limit: float
    """Mean over the episodes of a round that is allowed."""
    learning_rate: float = Field(0.1, gt=0)
    """The multiplier rises each round by this times what the mean is above the limit, and falls alike, down to 0."""
    initial: float = Field(0.0, ge=0)
    """The multiplier with which it begins."""


class PolicyGradientSpec(DecaySpec):
    """What the policy gradients share: how a token is weighted, given its advantage."""

    name: str
    epochs: int = Field(1, ge=1)
    """Passes over the batch of a round."""
    minibatches: int = Field(1, ge=1)
    """Gradient steps of one pass; must divide collect.scenarios."""
    credit: Literal["episode", "turns"] = "episode"
    """`episode`: every token is credited with the judged reward. `turns`: with the discounted step rewards from its
    turn on; the judged reward is not used."""
    ratio: Literal["token", "sequence_mean", "sequence"] = "token"
    """Policy now over policy before, of each `token`, or of a whole history: the geometric mean over its tokens (GSPO)
    or the product (RLOO)."""
    objective: Literal["clip", "cispo"] = "clip"
    """`clip`: PPO's clipped surrogate. `cispo`: REINFORCE, each token weighted by its clipped ratio."""
    clip_low: float = Field(0.2, gt=0, le=1)
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = Field(0.28, gt=0)
    """See clip_low. More room upwards lets rare tokens become likely (arXiv:2503.14476, section 3.1)."""
    dual_clip: float | None = Field(3.0, gt=1)
    """With `objective: clip`, where an advantage is negative: the ratio counts at most this much (arXiv:1912.09729), so
    that one token whose probability has risen many times does not make up the whole gradient; null is no limit."""
    normalization: Literal["tokens", "sequences", "constant"] = "tokens"
    """`tokens`: mean over all sampled tokens of the batch (DAPO, arXiv:2503.14476). `sequences`: mean of each
    trajectory's own mean (GRPO). `constant`: sum over a trajectory's tokens divided by `constant_length`, then the
    mean (Dr. GRPO)."""
    constant_length: int = Field(512, ge=1)
    """Tokens by which `normalization: constant` divides."""
    reference: Literal["base", "start"] = "start"
    """`start`: the checkpoint from which the rounds began, such as that of the warm-up; `base`: the base model."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the policy's mean entropy (nats a token), which is added to what is maximised."""
    correction: Literal["auto", "none", "truncate", "mask"] = "auto"
    """For an engine that computes other log-probabilities than the trainer, and for episodes of an earlier policy
    (`collect.overlap`): ratios are then taken to the policy before the first step as the trainer computes it, and each
    token is weighted by trainer over sampler, cut at `correction_limit` (`truncate`) or left out beyond it (`mask`).
    `auto`: `none` where the embedded engine computes in float32 and the policy in training plays, else `truncate`."""
    correction_level: Literal["token", "sequence"] = "token"
    """Whether that weight is of a token or of its whole history."""
    correction_limit: float = Field(2.0, gt=1)
    """See correction."""
    overlong: int = Field(0, ge=0)
    """Sampled tokens of an episode at which a soft punishment of length is full; 0 punishes none (DAPO)."""
    overlong_buffer: int = Field(0, ge=0)
    """Tokens over which it rises from 0."""
    overlong_penalty: float = Field(1.0, ge=0)
    """What it takes off the reward when it is full."""
    mask_truncated: bool = False
    """Episodes with a message that was cut off at agent.max_tokens count in the baseline, and are not learned from."""
    max_kl: float = Field(0.5, gt=0)
    """Largest KL of a step's batch to the policy that its ratios are taken to (nats a token): the one that sampled it,
    or with a `correction` or a ratio of sequences the one before the first step. A token counts 5 nats at most."""
    high_kl: Action = "stop"
    """What happens above max_kl: `warn` and take the step, `skip` it, or `stop` with an error."""
    min_entropy: float = Field(0.0, ge=0)
    """Smallest mean entropy of the policy on a step's batch (nats a token); 0 asks for none. An entropy that collapses
    samples the same again and again, and learns nothing from it."""
    low_entropy: Action = "warn"
    """What happens below min_entropy."""
    costs: dict[str, CostSpec] | None = None
    """`{invalid_actions: {limit: 0.5, learning_rate: 0.1, initial: 0.0}}`: metrics of an episode, components of its
    score or numbers of its outcome whose mean must stay below a limit; each is taken off the reward, times a multiplier
    that is learned. null: none."""
    cost_scaling: bool = True
    """The reward less its costs is divided by 1 plus the sum of the multipliers."""
    reward_cap: float | None = None
    """Judged rewards above it count as it. null is no cap."""

    @property
    def token_weights(self) -> Literal["truncate", "mask"] | None:
        """The form in which tokens are weighted by trainer over sampler; None: they are not. The experiment replaces
        `auto` by what it stands for; by itself it weights nothing."""
        return self.correction if self.correction == "truncate" or self.correction == "mask" else None


class GRPOSpec(PolicyGradientSpec):
    """Group relative policy optimisation (arXiv:2402.03300) on stored trajectories, and what its kin change in it."""

    name: Literal["grpo"] = "grpo"
    discount: float = Field(1.0, ge=0, le=1)
    """Of a step reward, for each turn that lies between; with `credit: turns`."""
    baseline: Literal["group", "leave_one_out", "batch", "none"] = "group"
    """What a return is compared with: the mean of its `group`, of the other episodes of its group, of the whole
    `batch`, or nothing."""
    scale: Literal["group", "batch", "none"] = "batch"
    """Advantages are divided by the standard deviation of the returns of the `batch`, or of the `group` (as the GRPO
    paper does; with the baselines `group` and `leave_one_out`), or not at all (Dr. GRPO, arXiv:2503.20783). With
    `group` the smallest difference within a group counts as much as that between success and failure in another."""
    turn_baseline: Literal["index", "state", "process"] = "index"
    """With `credit: turns`, the turns that a turn is compared with: those with the same `index` in their episode, or
    those taken in the same `state`, beside a comparison of whole episodes (GiGPO, arXiv:2505.10978). `process`
    normalises all step rewards of the group and adds them up from the turn on (arXiv:2402.03300, section 4.1.3)."""
    state_weight: float = Field(1.0, ge=0)
    """Weight of the comparison of turns, beside that of episodes, with `turn_baseline: state`."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Weight of KL(policy || reference)."""
    measure_kl: bool = True
    """Measurement of the KL to the reference where it is not in the loss: on the trained tokens of eight episodes of
    each gradient step."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """How it is estimated on a sampled token."""
    kl_in: Literal["loss", "reward", "token_rewards"] = "loss"
    """Where it goes: into the `loss`; off the `reward` of an episode as a whole, before advantages are computed; or
    off the reward of each token, so that a token answers for what comes after it."""


class DrGRPOSpec(GRPOSpec):
    """GRPO without its biases of length and difficulty (arXiv:2503.20783)."""

    name: Literal["dr_grpo"] = "dr_grpo"  # type: ignore[assignment]
    scale: Literal["group", "batch", "none"] = "none"
    normalization: Literal["tokens", "sequences", "constant"] = "constant"


class DAPOSpec(GRPOSpec):
    """Decoupled clip, loss by token, no KL, episodes that were cut off left out (arXiv:2503.14476)."""

    name: Literal["dapo"] = "dapo"  # type: ignore[assignment]
    mask_truncated: bool = True


class GSPOSpec(GRPOSpec):
    """Group sequence policy optimisation: ratio and clip by sequence (arXiv:2507.18071)."""

    name: Literal["gspo"] = "gspo"  # type: ignore[assignment]
    ratio: Literal["token", "sequence_mean", "sequence"] = "sequence_mean"
    normalization: Literal["tokens", "sequences", "constant"] = "sequences"
    clip_low: float = Field(3e-4, gt=0, le=1)
    clip_high: float = Field(4e-4, gt=0)


class CISPOSpec(GRPOSpec):
    """Clipped importance sampling weights: no token loses its gradient (arXiv:2506.13585)."""

    name: Literal["cispo"] = "cispo"  # type: ignore[assignment]
    objective: Literal["clip", "cispo"] = "cispo"
    clip_low: float = Field(1.0, gt=0, le=1)
    clip_high: float = Field(4.0, gt=0)


class RLOOSpec(GRPOSpec):
    """REINFORCE with a leave-one-out baseline, ratio of whole sequences, KL in the reward (arXiv:2402.14740)."""

    name: Literal["rloo"] = "rloo"  # type: ignore[assignment]
    baseline: Literal["group", "leave_one_out", "batch", "none"] = "leave_one_out"
    scale: Literal["group", "batch", "none"] = "none"
    ratio: Literal["token", "sequence_mean", "sequence"] = "sequence"
    normalization: Literal["tokens", "sequences", "constant"] = "sequences"
    kl_coefficient: float = Field(0.05, ge=0)
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    kl_in: Literal["loss", "reward", "token_rewards"] = "reward"


class ReinforcePPSpec(GRPOSpec):
    """REINFORCE++: advantages normalised over the batch, KL off the reward of each token (arXiv:2501.03262)."""

    name: Literal["reinforce_pp"] = "reinforce_pp"  # type: ignore[assignment]
    baseline: Literal["group", "leave_one_out", "batch", "none"] = "batch"
    scale: Literal["group", "batch", "none"] = "batch"
    kl_coefficient: float = Field(0.01, ge=0)
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    kl_in: Literal["loss", "reward", "token_rewards"] = "token_rewards"


class PPOSpec(PolicyGradientSpec):
    """Proximal policy optimisation (arXiv:1707.06347) with a value function, as in InstructGPT (arXiv:2203.02155), with
    the changes to its critic of VC-PPO (arXiv:2503.01491) and VAPO (arXiv:2504.05118)."""

    name: Literal["ppo"] = "ppo"
    epochs: int = Field(4, ge=1)
    """Passes over the batch of a round."""
    credit: Literal["episode", "turns"] = "episode"
    """`episode`: the judged reward comes at the last token of the episode. `turns`: each step reward at the last token
    of its turn; the judged reward is not used."""
    mask_truncated: bool = False
    """Episodes with a message that was cut off at agent.max_tokens are left out."""
    reference: Literal["base", "start"] = "start"
    """`start`: the checkpoint from which the rounds began, such as that of the warm-up; `base`: the base model."""
    discount: float = Field(1.0, ge=0, le=1)
    """Of a reward, for each token that lies between."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """λ of the policy's advantages (generalised advantage estimation, arXiv:1506.02438, eq. 16). 1: the rewards that
    come, less the value. Below 1 a reward counts λ per token that lies between, and the values of the tokens between
    make up for it: less variance, where the critic is good."""
    value_gae_lambda: float = Field(1.0, ge=0, le=1)
    """λ of the critic's targets (decoupled GAE, arXiv:2504.05118, section 4.1). 1: the discounted sum of the rewards
    that come, unbiased. Below 1 the critic learns from its own values as well."""
    whiten: bool = True
    """Advantages are brought to mean 0 and standard deviation 1 over all tokens of the round."""
    kl_coefficient: float = Field(0.02, ge=0)
    """Weight of KL(policy || reference), which comes off the reward of each token; with a kl_target that of the first
    round."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """How it is estimated on a sampled token."""
    kl_target: float | None = Field(0.1, gt=0)
    """KL (nats a token) that the coefficient is steered to: it is multiplied by 1.5 after a round with more than 1.5
    times this, and divided by 1.5 after one with less than this over 1.5. null keeps it as it is."""
    value: Literal["head", "model"] = "head"
    """Where values come from: a linear `head` on the policy's last hidden states, whose gradient reaches the policy's
    adapter too; or a `model` of its own, which is an adapter of its own on the same base, and a head."""
    value_coefficient: float = Field(0.1, ge=0)
    """Weight of the value loss."""
    value_clip: float | None = Field(0.2, gt=0)
    """A value learns no further than this from the one before the first step, in deviations of the returns where these
    are normalised; null is no limit."""
    value_learning_rate_ratio: float = Field(10.0, gt=0)
    """Learning rate of the critic (the head, and the value model's adapter), as a multiple of `learning_rate`."""
    value_norm_decay: float | None = Field(0.7, ge=0, lt=1)
    """The critic learns returns less their running mean, over their running deviation (value normalisation,
    arXiv:2103.01955, section 5.1); each round has this times the weight of the one after it in both. null learns
    returns as they are."""
    value_pretraining_steps: int = Field(20, ge=0)
    """Gradient steps of the critic alone, on the episodes of the first round, before the policy moves (value
    pretraining, arXiv:2504.05118, section 4.1). Each learns the rewards that come (λ = 1) on a minibatch. Too many fit
    the head to the very episodes whose advantages it then estimates."""


class PreferenceSpec(DecaySpec):
    """What the preference algorithms share."""

    name: str
    learning_rate: float = Field(1e-5, gt=0, le=1)
    epochs: int = Field(1, ge=1)
    """Passes over the pairs of a round; for KTO over its episodes."""
    batch_size: int = Field(8, ge=1)
    """Pairs of one gradient step; for KTO episodes."""
    beta: float = Field(0.1, gt=0)
    """How closely the policy is held to the reference; for ORPO, the weight of the preference."""


class PairSpec(PreferenceSpec):
    """Of those that compare two episodes."""

    pairs: Literal["best_worst", "all"] = "best_worst"
    """Which episodes of a scenario are compared: the best with the worst, or every two of which one is better."""
    min_margin: float = Field(0.0, ge=0)
    """Pairs whose rewards differ by no more than this are left out."""


class DPOSpec(PairSpec):
    """Direct preference optimisation (arXiv:2305.18290)."""

    name: Literal["dpo"] = "dpo"
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Share of the preferences that is taken to be the wrong way round."""
    reference: Literal["base", "start"] = "start"
    """`start`: the checkpoint from which the rounds began, such as that of the warm-up; `base`: the base model."""


class IPOSpec(PairSpec):
    """Identity preference optimisation: a margin of fixed size (arXiv:2310.12036)."""

    name: Literal["ipo"] = "ipo"
    reference: Literal["base", "start"] = "start"
    """`start`: the checkpoint from which the rounds began, such as that of the warm-up; `base`: the base model."""


class ORPOSpec(PairSpec):
    """Odds ratio preference optimisation: the likelihood of the chosen and an odds ratio, no reference
    (arXiv:2403.07691)."""

    name: Literal["orpo"] = "orpo"


class KTOSpec(PreferenceSpec):
    """Kahneman-Tversky optimisation: episodes that are good or bad, without pairs (arXiv:2402.01306)."""

    name: Literal["kto"] = "kto"
    batch_size: int = Field(16, ge=2)
    threshold: float = 0.5
    """Episodes with at least this reward are good."""
    good_weight: float = Field(1.0, ge=0)
    """Of good episodes in the loss."""
    bad_weight: float = Field(1.0, ge=0)
    """Of bad ones."""
    reference: Literal["base", "start"] = "start"
    """`start`: the checkpoint from which the rounds began, such as that of the warm-up; `base`: the base model."""


class DistillSpec(DecaySpec):
    """On-policy distillation: the policy's own tokens, and at each of them the KL to a teacher (arXiv:2306.13649)."""

    name: Literal["distill"] = "distill"
    epochs: int = Field(1, ge=1)
    """Passes over the trajectories of a round."""
    batch_size: int = Field(16, ge=1)
    """Trajectories of one gradient step; one of several histories counts as several."""
    teacher: TeacherSpec
    """Has the vocabulary of the model in training."""
    temperature: float = Field(1.0, gt=0)
    """Logits of both are divided by it before they are compared."""


class ReplaySpec(Spec):
    """Groups of earlier rounds in each training."""

    share: float = Field(0.25, ge=0, lt=1)
    """Of the groups that a training learns from, how many come from earlier rounds, where there are enough of them."""
    rounds: int = Field(2, ge=1)
    """How many rounds back they come from."""
    max_staleness: int | None = Field(None, ge=0)
    """Trajectories of a policy more than this many versions older than the one in training are dropped. null: none."""


class EWCSpec(Spec):
    """Elastic weight consolidation: what the policy knew when the rounds began is held (arXiv:1612.00796)."""

    coefficient: float = Field(1.0, gt=0)
    """Weight of the penalty."""
    trajectories: int = Field(64, ge=1)
    """Most trajectories from which is measured what matters; one backward pass each."""
    rounds: int = Field(1, ge=1)
    """Of a fork: from how many of the other run's last rounds they come. Without a fork they are the warmup's."""


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
    """What models of reward share. They are no policies: an experiment trains them with `reward_model`."""

    name: str
    epochs: int = Field(1, ge=1)
    """Passes over the pairs, or over the labelled episodes."""
    batch_size: int = Field(8, ge=1)
    """Pairs, or labelled episodes, of one gradient step."""
    heads: dict[str, FiniteFloat] = Field({"overall": 1.0}, min_length=1)
    """Name and weight of each score that is learned; together they make the reward. `overall` learns the judged reward,
    any other name the component of that name in the scores, `continued` the labels of `reward_model.continuations`."""
    pairs: Literal["best_worst", "all"] = "all"
    """Which episodes of a scenario are compared: the best with the worst, or every two of which one is better."""
    min_margin: float = Field(0.0, ge=0)
    """Pairs whose values differ by no more than this are left out."""
    margin: Literal["none", "reward"] = "none"
    """How far apart the scores of a pair should be at least: `reward` asks for the difference of the judged values."""
    centering: float = Field(0.0, ge=0)
    """Weight of the squared sum of the two scores of a pair, which keeps scores around 0."""
    held_out: float = Field(0.2, ge=0, lt=1)
    """Share of the scenarios that is not trained on, but tells how often the better episode of a pair is found."""

    @field_validator("heads")
    @classmethod
    def _named(cls, heads: dict[str, float]) -> dict[str, float]:
        if wrong := [name for name in heads if not re.fullmatch(r"[A-Za-z0-9_.-]+", name)]:
            raise ValueError(f"names of letters, digits, _, - and .; {wrong[0]!r} is none")
        if not any(heads.values()):
            raise ValueError("a weight other than 0 for one head at least")
        return dict(sorted(heads.items()))  # a mapping has no order: the same heads are the same model


class RewardModelSpec(RewardTrainingSpec):
    """Bradley-Terry model of which episode is better, read at its last token (arXiv:2203.02155)."""

    name: Literal["reward_model"] = "reward_model"


class ProcessRewardModelSpec(RewardTrainingSpec):
    """A score for each turn, read at its last token (arXiv:2305.20050)."""

    name: Literal["process_reward_model"] = "process_reward_model"
    loss: Literal["mse", "comparison"] = "mse"
    """`mse`: squared error to the step rewards (`overall`), or to the components `NAME/0`, `NAME/1` and so on of the
    scores. `comparison`: Bradley-Terry on the sums over the turns of an episode; margin and centering are for it
    alone, with `mse` pairs only tell the accuracy."""


RewardAlgorithmSpec = Annotated[RewardModelSpec | ProcessRewardModelSpec, Field(discriminator="name")]
