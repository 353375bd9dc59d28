"""Specs of the training algorithms. They are light; the trainers that read them import torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from components.specs import Spec

Action = Literal["warn", "skip", "stop"]
"""Of a guard: take the step and say so; leave it out; end the training with an error."""


class OptimizerSpec(Spec):
    """AdamW."""

    learning_rate: float = Field(1e-4, gt=0)
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
    pack_tokens: int = Field(1024, ge=64)
    """Most distinct tokens that one forward pass computes; bounds memory, changes nothing else."""
    non_finite: Literal["skip", "stop"] = "stop"
    """What happens where the loss or the gradient is infinite or no number: the step is left out, or the training ends
    with an error before a checkpoint is written."""


class SFTSpec(OptimizerSpec):
    """Supervised fine-tuning on assistant tokens, through TRL."""

    name: Literal["sft"] = "sft"
    epochs: int = Field(1, ge=1)
    """Passes over the trajectories."""
    batch_size: int = Field(8, ge=1)
    """Trajectories of one gradient step; one of several histories counts as several."""
    schedule: Literal["constant", "linear"] = "linear"
    """`linear`: the learning rate falls to 0 by the end of each training."""


class GRPOSpec(OptimizerSpec):
    """Group relative policy optimisation (arXiv:2402.03300) on stored trajectories."""

    name: Literal["grpo"] = "grpo"
    epochs: int = Field(1, ge=1)
    """Passes over the batch of a round."""
    minibatches: int = Field(1, ge=1)
    """Gradient steps of one pass; must divide collect.scenarios."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = Field(0.2, gt=0)
    """See clip_low."""
    scale_advantages: bool = True
    """Divide by the group's standard deviation (GRPO); False leaves r - mean (Dr. GRPO, arXiv:2503.20783)."""
    normalization: Literal["tokens", "sequences"] = "tokens"
    """`tokens`: mean over all sampled tokens of the batch (DAPO, arXiv:2503.14476). `sequences`: mean of each
    trajectory's own mean (GRPO)."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Weight of KL(policy || reference) in the loss. At 0 it is still measured, on one pack of each batch."""
    reference: Literal["base", "start"] = "base"
    """`base`: the model without its adapter. `start`: the checkpoint from which the rounds began."""
    max_kl: float = Field(10.0, gt=0)
    """Largest KL of a step's batch to the policy that sampled it (nats a token)."""
    high_kl: Action = "stop"
    """What happens above max_kl: `warn` and take the step, `skip` it, or `stop` with an error."""
    min_entropy: float = Field(0.0, ge=0)
    """Smallest mean entropy of the policy on a step's batch (nats a token); 0 asks for none. An entropy that collapses
    samples the same again and again, and learns nothing from it."""
    low_entropy: Action = "warn"
    """What happens below min_entropy."""


AlgorithmSpec = Annotated[GRPOSpec | SFTSpec, Field(discriminator="name")]
