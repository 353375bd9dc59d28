"""Rows of a planned stage, from which `compute.shard_rows` derives its number of shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from components.artifacts import Artifact
from components.errors import EspalierError
from flows.stages import STAGES
from flows.stages.base import Context, Request
from flows.stages.execute import stage_and_spec


@dataclass(frozen=True)
class PlannedRows:
    """Number of rows of a planned stage."""

    count: int | None
    """Rows; None if unknown."""
    estimated: bool
    """True if the rows are those of a stage that has not run yet, by its settings."""


def planned_rows(
    request: Request, known: Mapping[str, Artifact], earlier: Sequence[tuple[Request, Artifact]], context: Context
) -> PlannedRows:
    """Return the rows of a stage that can be split: counted if the data are on this machine, else estimated by the
    number of episodes of the stage that plays them. known: stored artifacts by key. earlier: the stages planned before,
    with their artifacts."""
    sharding = STAGES[request.stage].sharding
    assert sharding is not None, request.stage
    inputs = {name: known.get(key) for name, key in request.inputs.items()}
    with suppress(EspalierError, OSError):  # unreachable, or in the remote store only
        if (count := sharding.rows(stage_and_spec(request)[1], inputs, context)) is not None:
            return PlannedRows(count, estimated=False)
    key = request.inputs.get("trajectories")
    source = next((before for before, artifact in earlier if artifact.key == key), None)
    return PlannedRows(None if source is None else STAGES[source.stage].episodes(source), estimated=True)
