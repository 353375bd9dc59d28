"""Stages of earlier runs: the basis of the reasons why a stage is not cached, and of a plan's estimates.

Times are medians over the most similar earlier stages, scaled by the size that each stage declares: per episode if the
numbers of episodes differ, per collection if a reward model learns from several. The cost of judges is their cost per
episode in the latest stage with the same reward. A stage that was killed and retried counts with its last attempt only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

from components.compute.local.spec import LocalPlace
from flows.history.records import Records, RunRecord, StageRecord
from flows.history.store_reader import StoreReader
from flows.stages import STAGES
from flows.stages.base import Request
from flows.stages.shard import SHARD_SECONDS

MAX_LENGTH = 40
"""Maximum number of characters shown of a value."""


class Difference(NamedTuple):
    """Setting with two values, as text."""

    path: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}: {self.before} → {self.after}"


def differences(before: Any, after: Any, path: str = "") -> Iterator[Difference]:
    """Yield the settings that differ between two parts of a spec."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in [*before, *(name for name in after if name not in before)]:
            below = f"{path}.{name}" if path else str(name)
            yield from differences(before.get(name, "–"), after.get(name, "–"), below)
    elif before != after:
        if path == "round":  # the spec counts rounds from 0, messages from 1
            before, after = before + 1, after + 1
        yield Difference(path, *_cut(_text(before), _text(after)))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _cut(before: str, after: str) -> list[str]:
    """Return both texts, cut to MAX_LENGTH; a long common prefix is shortened so that the difference shows."""
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))
    long = max(len(before), len(after)) > MAX_LENGTH
    first = shared - MAX_LENGTH // 4 if long and shared > MAX_LENGTH // 2 else 0
    shown = ["…" * (first > 0) + text[first:] for text in (before, after)]
    return [text if len(text) <= MAX_LENGTH else f"{text[: MAX_LENGTH - 3]}…" for text in shown]


MAX_DIFFERENCES = 4
"""Maximum number of differences in the reasons of a stage."""


@dataclass(frozen=True)
class SimilarStage:
    """Stage of an earlier run that is similar to a planned one."""

    run: RunRecord
    stage: StageRecord
    differences: list[Difference]
    seconds: float
    """Time that the stage took; for a stage with shards, the sum of their times."""

    def seconds_for(self, request: Request) -> float:
        """Return the estimated time of a planned stage, scaled by size if both sizes are known."""
        size = STAGES[request.stage].size
        planned, earlier = size(request), size(Request.from_json(self.stage.request))
        return self.seconds * planned / earlier if planned and earlier else self.seconds

    @property
    def same_model(self) -> bool:
        """False if the stage ran another model, whose time says nothing about the planned one."""
        return not any(difference.path == "model.name" for difference in self.differences)

    @property
    def in_own_process(self) -> bool:
        """True if the stage ran in another process than the flow; its time includes loading packages and model if the
        process was new."""
        compute = self.run.spec.get("compute", {})
        name = compute.get("stages", {}).get(self.stage.request["stage"], compute.get("default"))
        return name in compute.get("places", {}) and compute["places"][name]["name"] != LocalPlace().name

    def reasons(self, request: Request, recomputed: Mapping[str, str], version: int) -> list[str]:
        """Return the reasons why a stage of this version has another key. recomputed: labels of the stages that
        recompute its inputs, by input name."""
        reasons = list(map(str, self.differences[:MAX_DIFFERENCES]))
        if len(self.differences) > MAX_DIFFERENCES:
            more = len(self.differences) - MAX_DIFFERENCES
            reasons.append(f"{more} more difference{'s' if more > 1 else ''}")
        if self.stage.request["seed"] != request.seed:
            reasons.append(f"seed: {self.stage.request['seed']} → {request.seed}")
        if self.stage.version != version:
            reasons.append(f"version of the stage: {self.stage.version} → {version}")
        reasons += [f"{name}: {label} is recomputed" for name, label in recomputed.items()]
        inputs = self.stage.request["inputs"]
        for name, key in request.inputs.items():
            if name not in recomputed and inputs.get(name) != key:
                reasons.append(f"{name}: differs from run {self.run.short}")
        reasons += [f"{name}: none, unlike run {self.run.short}" for name in inputs if name not in request.inputs]
        return reasons


class EarlierStages:
    """Stages of runs below one root. runs: latest first."""

    def __init__(self, runs: Iterable[RunRecord], store: StoreReader):
        self._stages = [(run, stage) for run in runs for stage in run.stages]
        self._store = store

    def run_of(self, key: str) -> RunRecord | None:
        """Return the latest run that had the artifact of this key; None if no run had it."""
        return next((run for run, stage in self._stages if stage.key == key), None)

    def similar(self, label: str, request: Request, part: Mapping[str, Any]) -> list[SimilarStage]:
        """Return the earlier stages of the same kind (stage, actor and algorithm) with the fewest differences, of the
        same model if there are any, first those with the same label, latest first. part: the part of the request's spec
        that is in the key."""
        ranked: list[tuple[tuple[tuple[bool, int], bool], SimilarStage]] = []
        for run, record in self._stages:
            if record.request["stage"] != request.stage or _kind(record.request["spec"]) != _kind(request.spec):
                continue
            manifest = self._store.manifest(record.key)
            if manifest is None:
                continue
            changes = list(differences(manifest["spec"], part))
            seconds = manifest["seconds"] + manifest["metrics"].get(SHARD_SECONDS, 0.0)
            similar = SimilarStage(run, record, changes, seconds)
            distance = (not similar.same_model, len(changes) + (record.request["seed"] != request.seed))
            ranked.append(((distance, record.label != label), similar))
        ranked.sort(key=lambda pair: pair[0])
        return [stage for (distance, _), stage in ranked if distance == ranked[0][0][0]]

    def cost_per_episode(self, reward: Any) -> float | None:
        """Return the cost of a reward's judges per episode; None if unknown. reward: as in the key of a stage."""
        for _, record in self._stages:
            manifest = self._store.manifest(record.key)
            if manifest is None or manifest["spec"].get("reward") != reward:
                continue
            figures = manifest["metrics"]
            count = figures.get("scored", 0.0) + figures.get("unscored", 0.0)
            if count and "unpriced" not in figures:
                return float(figures["cost"]) / count
        return None


def _kind(spec: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the actor and the algorithm of a stage, as far as it has them."""
    return spec.get("actor"), spec.get("algorithm", {}).get("name")


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
