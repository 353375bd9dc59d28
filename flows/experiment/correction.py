"""The correction of an engine's log-probabilities that `algorithm.correction: auto` stands for."""

from __future__ import annotations

from typing import Literal

from components.algorithms.spec import PolicyGradientSpec
from components.inference.spec import EmbeddedSpec
from flows.experiment.spec import ExperimentSpec


def resolve_correction(spec: ExperimentSpec, algorithm: PolicyGradientSpec) -> Literal["none", "truncate", "mask"]:
    """Return the correction that the rounds train with: that of the algorithm, or in place of `auto` `truncate` where
    sampled tokens have other log-probabilities than the trainer computes, else `none`."""
    if algorithm.correction != "auto":
        return algorithm.correction
    return "none" if difference(spec, algorithm) is None else "truncate"


def difference(spec: ExperimentSpec, algorithm: PolicyGradientSpec) -> str | None:
    """Return why sampled tokens have other log-probabilities than the trainer computes; None where they have the same.

    The embedded engine computes with the trainer's weights. In float32 the two agree up to rounding; in half precision
    they do not, because sampling and training add up in different orders.
    """
    if not isinstance(spec.inference, EmbeddedSpec):
        return f"inference={spec.inference.name} computes with code of its own"
    if spec.model.dtype != "float32":
        return f"the engine and the trainer round differently in model.dtype={spec.model.dtype}"
    if spec.model.quantization != "none":
        return f"the engine and the trainer round differently with model.quantization={spec.model.quantization}"
    if spec.collect.overlap:
        return "with collect.overlap=1 rounds are played by the policy before the one in training"
    if spec.replay is not None and algorithm.ratio != "token":
        return f"with replay, ratio={algorithm.ratio} meets episodes of earlier policies"
    return None
