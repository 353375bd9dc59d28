"""Resolution of `algorithm.correction: auto`, the correction for the mismatch between an engine's and the trainer's
log-probabilities."""

from __future__ import annotations

from components.algorithms.spec import AlgorithmSpec
from flows.experiment.spec import ExperimentSpec


def corrected_algorithm(spec: ExperimentSpec) -> AlgorithmSpec:
    """Return the algorithm of the rounds. `auto` becomes `truncate` if the log-probabilities of sampled tokens differ
    from those that the trainer computes, else `none`."""
    return spec.algorithm.resolve_correction(mismatch(spec), replay=spec.replay is not None)


def truncation_reason(spec: ExperimentSpec) -> str | None:
    """Return the reason why `auto` becomes `truncate`; None if it does not."""
    return spec.algorithm.truncation_reason(mismatch(spec), replay=spec.replay is not None)


def mismatch(spec: ExperimentSpec) -> str | None:
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
    return spec.collect.off_policy_reason(spec.rounds)
