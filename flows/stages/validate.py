"""Validate stage: measures the likelihood of held-out rows of imported data under a policy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import Field

from components.artifacts import Draft
from components.models.spec import ModelSpec
from flows.stages.base import Context, Inputs, Stage, StageSpec, with_progress

TABLE = "likelihoods.jsonl"


class ValidateStage(StageSpec):
    model: ModelSpec
    pack_tokens: int = Field(ge=1)
    """Maximum tokens of a forward pass; limits memory."""

    def key_part(self) -> dict[str, Any]:
        return {"model": self.model.key_part(), "pack_tokens": self.pack_tokens}


def validate(spec: ValidateStage, inputs: Inputs, draft: Draft, context: Context) -> dict[str, float]:
    """Write `likelihoods.jsonl`, with a row for each held-out episode. Inputs: `data`, an import with held-out rows;
    `policy`, a checkpoint (without: the base model)."""
    from components.algorithms.likelihood import episode_likelihoods, summary
    from components.data.importing import HELDOUT
    from components.models.weights import prepare
    from components.trajectories.store import count_trajectories, read_scored

    folder = inputs["data"].path / HELDOUT
    episodes = folder / "trajectories.parquet"
    total = count_trajectories(episodes)
    rows = read_scored(episodes, folder / "scores.parquet", folder / "selection.parquet")
    checkpoint = inputs["policy"].path if "policy" in inputs else None
    base_dir = prepare(spec.model, context.cache)
    measured = list(
        episode_likelihoods(
            spec.model, base_dir, checkpoint, with_progress(rows, total, context.progress), spec.pack_tokens
        )
    )
    with (draft.path / TABLE).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(likelihood)) + "\n" for likelihood in measured)
    return summary(measured)


def summary_text(metrics: Mapping[str, float]) -> str:
    """Return the metrics in the console line of the stage as text."""
    if "rows" not in metrics:
        return ""
    values = "".join(f"  {name} {metrics[name]:.4g}" for name in ("loss", "accuracy") if name in metrics)
    return f"held-out rows {metrics['rows']:.0f}{values}"


STAGE = Stage(
    "validate",
    1,
    ValidateStage,
    "validation",
    1,
    validate,
    files={TABLE: "tokens and log-probability of each held-out row"},
    inputs={"data": "dataset", "policy": "checkpoint"},
    order=75,
    unit="rows",
    summary=summary_text,
)
