"""Exactness in half precision: log-probabilities and gradients of workload (d) against padded rows in float32.

The reference computes without TF32. All models have the same weights, which float32, bfloat16 and (except for the
smallest ones) float16 represent exactly, and the same adapter, so differences are rounding of the computation.
"""

from __future__ import annotations

from typing import Any

from tests.benchmarks.gpu.report import Report
from tests.benchmarks.gpu.setup import Setup, free
from tests.benchmarks.train_step import Episode, Ours, Padded

ROWS = 2
"""Rows of a micro-batch of padded rows."""
PACK_TOKENS = 8192
DTYPES = ("bfloat16", "float16", "float32")


def run(setup: Setup, report: Report) -> None:
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    episodes = setup.workload("d")
    reference = Padded(setup.base_dir, setup.step_model("float32"), episodes, ROWS, setup.folder)
    exact, gradient = reference.logprobs(), reference.gradient()
    adapter = {name: value.detach() for name, value in reference.model.named_parameters() if value.requires_grad}
    report.update(workload="d", reference="padded rows, float32", sides={})
    for dtype in DTYPES:
        for side, compute in (("ours", ours), ("padded", padded)):
            try:
                logprobs, grads = compute(setup, episodes, dtype, adapter)
            except Exception as error:  # noqa: BLE001  a side that fails here must not lose the others
                report.skip(f"{side}, {dtype}", error)
                continue
            difference_S = (logprobs.float() - exact).abs()
            report.result["sides"].setdefault(side, {})[dtype] = {
                "logprob_mean": float(difference_S.mean()),
                "logprob_max": float(difference_S.max()),
                "gradient": relative(grads, gradient),
            }
            report.update()
            free()


def padded(setup: Setup, episodes: list[Episode], dtype: str, adapter: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    side = Padded(setup.base_dir, setup.step_model(dtype), episodes, ROWS, setup.folder)
    load(side.model, adapter)
    return side.logprobs(), side.gradient()


def ours(setup: Setup, episodes: list[Episode], dtype: str, adapter: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    side = Ours(setup.base_dir, setup.step_model(dtype), episodes, PACK_TOKENS, setup.folder / "exact")
    if side.policy.padded:
        raise RuntimeError("the policy computes padded rows, because the check of packs failed (see the log)")
    load(side.policy.model, adapter)
    return policy_logprobs(side.policy, episodes), side.gradient()


def load(model: Any, adapter: dict[str, Any]) -> None:
    """Set the parameters of the adapter."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(adapter[name])


def policy_logprobs(policy: Any, episodes: list[Episode]) -> Any:
    """Return the log-probabilities of the sampled tokens of all episodes, in their order, computed on packs."""
    import torch

    from components.algorithms.policy.packing import TokenSequence, pack
    from components.models.distribution import Cut

    sequences, first = [], 0
    for episode in episodes:
        targets = [index for index, sampled in enumerate(episode.sampled) if sampled]
        sequences.append(TokenSequence(episode.token_ids, targets, first=first))
        first += len(targets)
    result = torch.empty(first, device=policy.device)
    with torch.no_grad():
        for packed in pack(sequences, PACK_TOKENS, padded=policy.padded):
            logprob_S, _ = policy.logprobs(packed, Cut())
            result[packed.number_S.to(result.device)] = logprob_S
    return result


def relative(gradient: dict[str, Any], reference: dict[str, Any]) -> float:
    """Return the L2 norm of the difference over that of the reference."""
    difference = sum((gradient[name].float() - value).square().sum() for name, value in reference.items())
    return float((difference / sum(value.square().sum() for value in reference.values())).sqrt())
