"""Reasons why the stages of a recorded run were computed in place of being loaded from the cache."""

from __future__ import annotations

from dataclasses import dataclass

from flows.history.records import Records, RunRecord, StageRecord
from flows.history.store_reader import StoreReader
from flows.planning.earlier_stages import EarlierStages
from flows.stages.base import Request


@dataclass(frozen=True)
class ExplainedStage:
    """Stage of a recorded run."""

    label: str
    status: str
    """`ran` or `cached`."""
    compared: str | None
    """Most similar stage of the runs that started before; None if the stage was cached or nothing is comparable."""
    why: list[str]
    """Reasons why the stage ran: differences from `compared`. Empty if it was cached."""


def explain(records: Records, reader: StoreReader, run: RunRecord) -> list[ExplainedStage]:
    """Return the stages of a run in the order in which they ended."""
    earlier = EarlierStages([other for other in records.all() if other.started < run.started], reader)
    computed = {stage.key: stage.label for stage in run.stages if stage.status == "ran"}
    return [
        _explained(stage, earlier, reader, computed)
        if stage.status == "ran"
        else ExplainedStage(stage.label, stage.status, None, [])
        for stage in run.stages
    ]


def _explained(
    stage: StageRecord, earlier: EarlierStages, reader: StoreReader, computed: dict[str, str]
) -> ExplainedStage:
    """Return a stage that ran. computed: labels of the run's stages that ran, by key."""
    if (previous := earlier.run_of(stage.key)) is not None:
        why = [f"run {previous.short} had it, but it was no longer in the store"]
        return ExplainedStage(stage.label, stage.status, None, why)
    if (manifest := reader.manifest(stage.key)) is None:
        return ExplainedStage(stage.label, stage.status, None, ["unknown: its artifact is no longer in the store"])
    request = Request.from_json(stage.request)
    similar = earlier.similar(stage.label, request, manifest["spec"])
    if not similar:
        return ExplainedStage(stage.label, stage.status, None, ["no similar stage had run"])
    nearest = similar[0]
    inputs = nearest.stage.request["inputs"]
    recomputed = {
        name: computed[key] for name, key in request.inputs.items() if key in computed and inputs.get(name) != key
    }
    compared = f"{nearest.stage.label} of run {nearest.run.short}"
    return ExplainedStage(stage.label, stage.status, compared, nearest.reasons(request, recomputed, stage.version))
