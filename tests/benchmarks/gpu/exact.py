"""Exactness in half precision: log-probabilities and gradients against float32 of the same workload.

The reference computes padded rows in float32 without TF32. All models have the same weights, which float32, bfloat16
and (except for the smallest ones) float16 represent exactly, and the same adapter, so differences are rounding of the
computation.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from tests.benchmarks import train_step
from tests.benchmarks.gpu.setup import PACK_TOKENS, Report, Setup, attention, attentions, free, reason
from tests.benchmarks.train_step import Episode, Ours, Padded

ROWS = 2
"""Rows of a micro-batch of padded sides."""
DTYPES = ("bfloat16", "float16", "float32")
"""On a GPU. On a CPU, where half precision is slow by orders of magnitude, only for tiny models."""


def run(setup: Setup, report: Report) -> None:
    """Compare each dtype and attention, for one workload after the other. The first are those with most sharing."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    report.update(reference="padded rows, float32", workloads={}, skipped_sides={})
    for name in sorted(setup.workloads, key="dbac".index):
        if report.result["workloads"] and time.monotonic() > setup.deadline:
            report.result["skipped_sides"][name] = "the part's time was over"
            break
        compare(setup, report, name)
        free()
    report.update()


def compare(setup: Setup, report: Report, name: str) -> None:
    """Measure one workload."""
    episodes = train_step.workload(name, setup.shape.vocabulary, setup.shape.scale)
    reference = Padded(setup.base_dir, setup.model("float32"), episodes, ROWS, setup.folder)
    exact, gradient = reference.logprobs(), reference.gradient()
    adapter = {key: one.detach() for key, one in reference.model.named_parameters() if one.requires_grad}
    found: dict[str, Any] = {}
    report.result["workloads"][name] = found
    for dtype in DTYPES:
        for side, logprobs, grads in sides(setup, report, name, episodes, dtype, adapter):
            difference_S = (logprobs.float() - exact).abs()
            found[f"{side}_{dtype}"] = {
                "logprob_mean": float(difference_S.mean()),
                "logprob_max": float(difference_S.max()),
                "gradient": relative(grads, gradient),
            }
            report.update()


def sides(
    setup: Setup, report: Report, name: str, episodes: list[Episode], dtype: str, adapter: dict[str, Any]
) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield name, log-probabilities and gradient of each side in a dtype."""
    kinds, reasons = attentions(setup.device)
    skipped: dict[str, str] = report.result["skipped_sides"]
    skipped |= {f"ours_{kind}": cause for kind, cause in reasons.items()}
    try:
        padded = Padded(setup.base_dir, setup.model(dtype), episodes, ROWS, setup.folder)
        load(padded.model, adapter)
        yield "padded", padded.logprobs(), padded.gradient()
        del padded
        free()
    except Exception as error:  # noqa: BLE001  a side that fails here must not lose the others
        skipped[f"padded_{dtype} ({name})"] = reason(f"padded_{dtype}", error)
    for kind in kinds:
        try:
            with attention(kind):
                ours = Ours(setup.base_dir, setup.model(dtype), episodes, PACK_TOKENS, setup.folder / "exact")
                if ours.policy.padded:
                    raise RuntimeError("the policy computes padded rows, because the check of packs failed")
                load(ours.policy.model, adapter)
                yield f"ours_{kind}", ours_logprobs(ours, episodes, PACK_TOKENS), ours.gradient()
            del ours
            free()
        except Exception as error:  # noqa: BLE001
            skipped[f"ours_{kind}_{dtype} ({name})"] = reason(f"ours_{kind}_{dtype}", error)


def load(model: Any, adapter: dict[str, Any]) -> None:
    """Set the parameters of the adapter."""
    import torch

    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(adapter[key])


def ours_logprobs(ours: Ours, episodes: list[Episode], most_tokens: int) -> Any:
    """Return the log-probabilities of the sampled tokens of all episodes, in their order, computed on packs."""
    import torch

    from components.algorithms.policy.packing import TokenSequence, pack
    from components.models.distribution import Cut

    sequences, first = [], 0
    for episode in episodes:
        targets = [index for index, sampled in enumerate(episode.sampled) if sampled]
        sequences.append(TokenSequence(episode.token_ids, targets, first=first))
        first += len(targets)
    result = torch.empty(first, device=ours.policy.device)
    with torch.no_grad():
        for packed in pack(sequences, most_tokens):
            logprob_S, _ = ours.policy.logprobs(packed, Cut())
            result[packed.number_S.to(result.device)] = logprob_S
    return result


def relative(gradient: dict[str, Any], reference: dict[str, Any]) -> float:
    """Return the L2 norm of the difference over that of the reference."""
    difference = sum((gradient[key].float() - one).square().sum() for key, one in reference.items())
    return float((difference / sum(one.square().sum() for one in reference.values())).sqrt())
