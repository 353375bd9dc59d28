"""Gradient steps of GRPO: the prefix trie, padded batches, and TRL (`tests.benchmarks.train_step`), in turn.

    ours_flex   `train_policy_gradient` on the trie, attention by FlexAttention with a block mask
    ours_sdpa   the same, attention by scaled dot-product attention with a dense mask
    ours_blocks the same on a CPU, attention by the trie's own dense blocks
    padded      rows padded to the longest of the micro-batch
    trl         TRL's GRPOTrainer
    trl_tree    TRL's AsyncGRPOTrainer, which folds samples into prefix trees (`trl_tree`)

Padded and TRL start with all rows in one micro-batch; as long as memory does not suffice, they halve it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from tests.benchmarks import train_step
from tests.benchmarks.gpu.setup import PACK_TOKENS, Report, Setup, attention, attentions, free, reason, with_peak
from tests.benchmarks.train_step import GROUP, Episode, Ours, Padded, Trl

Step = Callable[[], float]
"""Function that takes a gradient step and returns its seconds."""


def run(setup: Setup, report: Report, name: str) -> None:
    """Measure the steps of workload `name`."""
    episodes = train_step.workload(name, setup.shape.vocabulary, setup.shape.scale)
    tokens = sum(len(episode.token_ids) for episode in episodes)
    distinct = {episode.token_ids[:end] for episode in episodes for end in range(1, len(episode.token_ids))}
    report.update(tokens=tokens, distinct_tokens=len(distinct), dtype=setup.dtype, skipped_sides={}, sides={})
    skipped: dict[str, str] = report.result["skipped_sides"]
    steps: dict[str, Step] = {}
    for side, make in sides(setup, report, name, episodes).items():
        try:
            steps[side] = warmed_up(make)
        except Exception as error:  # noqa: BLE001  a side that fails here must not lose the others
            skipped[side] = reason(side, error)
        free()
        report.update()
    for step in steps.values():  # again: TRL changes settings of torch, for which FlexAttention compiles again
        step()
    seconds: dict[str, list[float]] = {side: [] for side in steps}
    peaks: dict[str, float] = {}
    for repetition in range(setup.repeat):
        if repetition and time.monotonic() > setup.deadline:
            break
        for side, step in list(steps.items()):
            try:
                taken, peak = with_peak(setup.device, step)
            except Exception as error:  # noqa: BLE001
                skipped[side] = reason(side, error)
                del steps[side]
                continue
            seconds[side].append(taken)
            peaks[side] = max(peaks.get(side, 0.0), peak)
            report.update(sides=summary(seconds, peaks, tokens))
    report.update(ratios=ratios(report.result["sides"]))


def sides(setup: Setup, report: Report, name: str, episodes: list[Episode]) -> dict[str, Callable[[int], Step]]:
    """Return a function for each side, which takes the rows of a micro-batch and returns its step. Report the reasons
    for sides that cannot run."""
    skipped = report.result["skipped_sides"]
    kinds, reasons = attentions(setup.device)
    skipped |= {f"ours_{kind}": cause for kind, cause in reasons.items()}
    spec, scratch = setup.model(), setup.folder
    ours: list[Ours] = []

    def make_ours(kind: str) -> Callable[[int], Step]:
        def make(rows: int) -> Step:
            if not ours:
                ours.append(Ours(setup.base_dir, spec, episodes, PACK_TOKENS, scratch / "ours"))
            if ours[0].policy.padded:
                raise RuntimeError("the policy computes padded rows, because the check of packs failed (see the log)")

            def step() -> float:
                with attention(kind):
                    return ours[0].step()

            return step

        return make

    made: dict[str, Callable[[int], Step]] = {f"ours_{kind}": make_ours(kind) for kind in kinds}
    made["padded"] = lambda rows: Padded(setup.base_dir, spec, episodes, rows, scratch / "padded").step
    try:
        import trl  # noqa: F401
    except ImportError as error:
        skipped |= dict.fromkeys(("trl", "trl_tree"), f"trl is not installed ({error})")
        return made

    def make_trl(rows: int) -> Step:
        side = Trl(setup.base_dir, spec, episodes, rows, scratch / "trl")
        side.steps = 2  # the first is a warm-up
        return side.step

    def make_tree(rows: int) -> Step:
        from tests.benchmarks.gpu.trl_tree import TrlTree

        side = TrlTree(setup, episodes)
        report.update(trl_tree_kernel=side.kernel)
        return side.step

    return made | {"trl": make_trl, "trl_tree": make_tree}


def warmed_up(make: Callable[[int], Step]) -> Step:
    """Return a step after its warm-up, with the largest micro-batch that fits."""
    import torch

    rows = GROUP
    while True:
        try:
            step = make(rows)
            step()
        except torch.OutOfMemoryError:
            if rows == 1:
                raise
            rows //= 2
            free()
        else:
            return step


def summary(seconds: dict[str, list[float]], peaks: dict[str, float], tokens: int) -> dict[str, Any]:
    """Return the figures of each side."""
    return {
        side: {
            "seconds": {
                "min": round(min(values), 4),
                "median": round(statistics.median(values), 4),
                "max": round(max(values), 4),
            },
            "repetitions": len(values),
            "tokens_per_s": round(tokens / statistics.median(values)),
            "peak_mb": peaks[side],
        }
        for side, values in seconds.items()
        if values
    }


def ratios(measured: dict[str, Any]) -> dict[str, float]:
    """Return time and memory of each peer over those of the fastest of ours."""
    ours = [side for side in measured if side.startswith("ours")]
    if not ours:
        return {}
    best = min(ours, key=lambda side: measured[side]["seconds"]["median"])
    found = {}
    for side in measured:
        if side != best:
            found[f"{side}_time"] = round(measured[side]["seconds"]["median"] / measured[best]["seconds"]["median"], 3)
            found[f"{side}_memory"] = round(measured[side]["peak_mb"] / max(measured[best]["peak_mb"], 0.1), 3)
    return found
