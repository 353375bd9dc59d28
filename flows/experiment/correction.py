"""Resolution of `algorithm.correction: auto`, the correction for the mismatch between an engine's and the trainer's
log-probabilities."""

from __future__ import annotations

from typing import Literal

from components.algorithms.spec import PolicyGradientSpec
from flows.experiment.spec import ExperimentSpec


def resolve_correction(spec: ExperimentSpec, algorithm: PolicyGradientSpec) -> Literal["none", "truncate", "mask"]:
    """Return the correction of the rounds. `auto` becomes `truncate` if the log-probabilities of sampled tokens differ
    from those that the trainer computes, else `none`."""
    if algorithm.correction != "auto":
        return algorithm.correction
    return "none" if difference(spec, algorithm) is None else "truncate"


def difference(spec: ExperimentSpec, algorithm: PolicyGradientSpec) -> str | None:
    """Return the reason why log-probabilities of sampled tokens differ from the trainer's; None if they agree.

    The embedded engine uses the trainer's weights. In float32 the two agree up to rounding; in half precision they do
    not, because sampling and training sum in different orders.
    """
    if not spec.inference.in_process:
        return f"inference={spec.inference.name} has its own implementation of the model"
    if spec.model.dtype != "float32":
        return f"the engine and the trainer round differently in model.dtype={spec.model.dtype}"
    if spec.model.quantization != "none":
        return f"the engine and the trainer round differently with model.quantization={spec.model.quantization}"
    if spec.collect.overlap:
        return "with collect.overlap=1 rounds are collected with a policy one version behind the one in training"
    if spec.replay is not None and algorithm.ratio != "token":
        return f"with replay, ratio={algorithm.ratio} trains on episodes of earlier policies"
    return None
