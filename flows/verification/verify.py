"""Verification of a bundle: recompute stages, and compare them with what the run recorded.

A stage is recomputed on its recorded inputs: those in the bundle, or those that were recomputed with equal digests.
Where an input could only be recomputed with another content (another processor rounds otherwise), the stages after it
run on the recomputed one, and of these only evaluations are judged: their success must lie in the recorded interval.

The author of a bundle is not trusted. Without `trust`, a stage that would start programs, contact servers, read paths
or run code that is not part of Espalier (`components.specs.access`) is skipped, and the bundle's list of allowed
packages does not count.

Numbers of JSON and Parquet files agree if they differ by at most `ABSOLUTE + RELATIVE · |recorded|`. Tensors agree if
the L2 norm of their difference is at most `TENSOR_RELATIVE` of the norm of the recorded tensor. Text, integers (token
ids) and all other files must be equal.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from components.artifacts import Artifact, Store
from components.errors import ResourceError
from components.specs.access import accesses
from flows.stages.base import Context, Request
from flows.stages.execute import recompute, stage_and_spec
from flows.terminal.console import shorten
from flows.verification.bundle import ARTIFACTS, Bundle, BundledStage, artifact_of, unrepeatable

RELATIVE = 1e-3
ABSOLUTE = 1e-4
TENSOR_RELATIVE = 1e-3
BATCH = 256
"""Rows of a Parquet file that are compared at a time."""


@dataclass(frozen=True)
class ContentDifference:
    """Largest deviation of two artifacts, or the first place where they differ beyond the tolerance."""

    largest: float = 0.0
    """Largest relative deviation of numbers and tensors, where they agree."""
    place: str = ""
    """First place that differs beyond the tolerance, with both values; empty if there is none."""


def compare_contents(recorded: Artifact, recomputed: Artifact, names: Mapping[str, Any]) -> ContentDifference:
    """Compare the files `names` of two artifacts, except volatile ones."""
    largest = 0.0
    for name in sorted(set(names) - set(recorded.volatile)):
        paths = recorded.path / name, recomputed.path / name
        if not paths[1].is_file():
            return ContentDifference(largest, f"{name}: missing")
        try:
            for deviation in _deviations(*paths):
                largest = max(largest, deviation)
        except _Differs as difference:
            return ContentDifference(largest, f"{name}{difference}")
    return ContentDifference(largest)


class _Differs(Exception):
    """Place that differs beyond the tolerance."""


def _deviations(recorded: Path, recomputed: Path) -> Iterator[float]:
    """Yield relative deviations. Raises _Differs at the first place beyond the tolerance."""
    if recorded.suffix == ".safetensors":
        yield from _tensor_deviations(recorded, recomputed)
    elif recorded.suffix == ".parquet":
        yield from _row_deviations(recorded, recomputed)
    elif recorded.suffix == ".json":
        before, after = (json.loads(path.read_text(encoding="utf-8")) for path in (recorded, recomputed))
        yield from _value_deviations(before, after, "")
    elif recorded.read_bytes() != recomputed.read_bytes():
        raise _Differs(": other bytes")


def _tensor_deviations(recorded: Path, recomputed: Path) -> Iterator[float]:
    from safetensors import safe_open

    with safe_open(recorded, "pt") as old, safe_open(recomputed, "pt") as new:
        if set(old.keys()) != set(new.keys()):
            raise _Differs(": other tensors")
        for name in sorted(old.keys()):
            before, after = old.get_tensor(name).double(), new.get_tensor(name).double()
            if before.shape != after.shape:
                raise _Differs(f": {name} has shape {list(after.shape)}, recorded {list(before.shape)}")
            norm = float(before.norm())
            deviation = float((after - before).norm()) / norm if norm else float(after.norm())
            if not deviation <= TENSOR_RELATIVE:
                raise _Differs(f": {name} differs by {deviation:.2g} of its norm")
            yield deviation


def _row_deviations(recorded: Path, recomputed: Path) -> Iterator[float]:
    import pyarrow.parquet as parquet

    old, new = parquet.ParquetFile(recorded), parquet.ParquetFile(recomputed)
    counts = old.metadata.num_rows, new.metadata.num_rows
    if counts[0] != counts[1]:
        raise _Differs(f": {counts[1]} rows, recorded {counts[0]}")
    start = 0
    for before, after in zip(old.iter_batches(BATCH), new.iter_batches(BATCH), strict=True):
        if not before.equals(after):
            for index, rows in enumerate(zip(before.to_pylist(), after.to_pylist(), strict=True), start):
                yield from _value_deviations(*rows, f": row {index}")
        start += before.num_rows


def _value_deviations(recorded: Any, recomputed: Any, place: str) -> Iterator[float]:
    """Yield the relative deviations of two JSON values."""
    if isinstance(recorded, Mapping) and isinstance(recomputed, Mapping) and recorded.keys() == recomputed.keys():
        for name, value in recorded.items():
            yield from _value_deviations(value, recomputed[name], f"{place} {name}")
    elif isinstance(recorded, list) and isinstance(recomputed, list) and len(recorded) == len(recomputed):
        for index, pair in enumerate(zip(recorded, recomputed, strict=True)):
            yield from _value_deviations(*pair, f"{place}[{index}]")
    elif isinstance(recorded, float) and isinstance(recomputed, float):
        if not (recorded == recomputed or (math.isnan(recorded) and math.isnan(recomputed))):
            deviation = abs(recomputed - recorded)
            if not deviation <= ABSOLUTE + RELATIVE * abs(recorded):
                raise _Differs(f"{place}: {recomputed:.6g}, recorded {recorded:.6g}")
            yield deviation / max(abs(recorded), ABSOLUTE)
    elif recorded != recomputed:
        raise _Differs(f"{place}: {shorten(repr(recomputed), 60)}, recorded {shorten(repr(recorded), 60)}")


ONLY_TRUSTED = "runs only with --trust"
Verdict = Literal["same", "within_tolerance", "different", "not_comparable", "skipped"]
"""`not_comparable`: recomputed on inputs that are not the recorded ones. `skipped`: not recomputed."""


@dataclass(frozen=True)
class VerifiedStage:
    """Result of one stage."""

    label: str
    verdict: Verdict
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class PendingVerification:
    """Stage of a bundle before its verification."""

    stage: BundledStage
    request: Request
    skipped: str = ""
    """Reason why it will not be recomputed; empty if it will."""
    reaches: Sequence[str] = ()
    """Programs, servers, files and code that it uses."""


@dataclass
class Verification:
    """Verification of the stages of a bundle in a work folder, where recomputed artifacts are kept."""

    bundle: Bundle
    folder: Path
    """Folder of the bundle."""
    work: Path
    """Root of the recomputation."""
    trust: bool = False
    """Run also stages that reach out of the bundle, with the packages that it allows."""
    on_stage: Callable[[VerifiedStage], None] = lambda stage: None
    results: list[VerifiedStage] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.context = Context.at(self.work)
        self._by_key = {stage.key: stage for stage in self.bundle.stages}
        self._available: dict[str, Artifact] = {}
        """Artifact that stands for each recorded key: the recorded or a recomputed one."""
        for key in self.bundle.included:
            self._adopt_recorded(key)

    def verify(self, labels: Sequence[str] = ()) -> Verdict:
        """Recompute the stages with these labels, by default all, and the stages that they need. Return the worst
        verdict: `different`, else `within_tolerance`, else `same`; `skipped` if no stage could be compared.

        Raises ResourceError for a label that the bundle does not have."""
        try:
            for planned in self.planned(labels):
                self._finish(self._verified(planned))
        finally:
            self.context.warm.close()
        verdicts = {result.verdict for result in self.results}
        order: tuple[Verdict, ...] = ("different", "within_tolerance", "same")
        return next((verdict for verdict in order if verdict in verdicts), "skipped")

    def planned(self, labels: Sequence[str] = ()) -> list[PendingVerification]:
        """Return what `verify` will do with each stage. Raises ResourceError for a label that the bundle does not
        have, and SpecError for a request that is not valid."""
        chosen = [self.bundle.stage(label) for label in labels] or self.bundle.stages
        needed = self._needed([stage.key for stage in chosen])
        return [self._plan(stage) for stage in self.bundle.stages if stage.key in needed]

    def _plan(self, stage: BundledStage) -> PendingVerification:
        request = Request.from_json(stage.request)
        reaches = [f"allow = {', '.join(request.allow)} runs code"] if request.allow else []
        if reaches and not self.trust:  # validation already imports these packages
            return PendingVerification(stage, request, f"{reaches[0]}; {ONLY_TRUSTED}")
        if reason := unrepeatable(request):
            return PendingVerification(stage, request, f"{reason}; its files match their digests")
        reaches += [str(reach) for reach in accesses(stage_and_spec(request)[1])]
        reason = f"{reaches[0]}; {ONLY_TRUSTED}" if reaches and not self.trust else ""
        return PendingVerification(stage, request, reason, reaches)

    def _needed(self, keys: Sequence[str]) -> set[str]:
        """Return these keys and those of the stages that must be recomputed first, because the bundle does not include
        their artifacts."""
        needed: set[str] = set()
        pending = list(keys)
        while pending:
            key = pending.pop()
            if key in needed or key not in self._by_key:
                continue
            needed.add(key)
            inputs = self._by_key[key].request["inputs"].values()
            pending += [name for name in inputs if name not in self.bundle.included]
        return needed

    def _finish(self, result: VerifiedStage) -> None:
        self.results.append(result)
        self.on_stage(result)

    def _verified(self, planned: PendingVerification) -> VerifiedStage:
        """Recompute a stage and compare it."""
        stage, request = planned.stage, planned.request
        if planned.skipped:
            return VerifiedStage(stage.label, "skipped", planned.skipped)
        missing = [name for name, key in request.inputs.items() if key not in self._available]
        if missing:
            return VerifiedStage(stage.label, "skipped", f"no artifact for its input {', '.join(sorted(missing))}")
        changed = [name for name, key in request.inputs.items() if self._changed(key)]
        inputs = {name: self._available[key].key for name, key in request.inputs.items()}
        artifact = recompute(replace(request, inputs=inputs), self.context, Store(self.work / "recomputed"))
        verdict, detail = self._compared(stage, artifact, changed)
        if stage.key not in self._available:
            self._available[stage.key] = self._moved(artifact)
        return VerifiedStage(stage.label, verdict, detail, artifact.seconds)

    def _changed(self, key: str) -> bool:
        """Return True if the artifact that stands for a recorded key has another content."""
        return key in self._by_key and self._available[key].digest != self._by_key[key].digest

    def _compared(self, stage: BundledStage, artifact: Artifact, changed: Sequence[str]) -> tuple[Verdict, str]:
        if artifact.digest == stage.digest and not changed:
            return "same", ""
        if changed:
            return _evaluated_again(stage, artifact, f"other {', '.join(sorted(changed))}")
        if artifact.key != stage.key:
            return "different", f"its key is {artifact.key[:12]}, recorded {stage.key[:12]}: {_key_cause(stage)}"
        recorded = artifact_of(self.folder, stage.key, self.bundle.included)
        if recorded is None:
            return _evaluated_again(stage, artifact, "other bytes, and the bundle does not include the artifact")
        difference = compare_contents(recorded, artifact, stage.files)
        if difference.place:
            return "different", difference.place
        return "within_tolerance", f"largest relative deviation {difference.largest:.2g}"

    def _adopt_recorded(self, key: str) -> None:
        """Copy an artifact of the bundle into the work folder's store."""
        target = self.context.store.path(key)
        if not target.is_dir():
            shutil.copytree(self.folder / ARTIFACTS / key, target)
        artifact = self.context.store.find(key)
        assert artifact is not None, f"{key} was verified when the bundle was read"
        self._available[key] = artifact

    def _moved(self, artifact: Artifact) -> Artifact:
        """Move a recomputed artifact into the store from which later stages read."""
        target = self.context.store.path(artifact.key)
        if not target.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            artifact.path.rename(target)
        stored = self.context.store.find(artifact.key)
        if stored is None:
            raise ResourceError(f"{target} cannot be read back; is the disk full?")
        return stored


def _key_cause(stage: BundledStage) -> str:
    from flows.stages import STAGES

    current = STAGES[stage.request["stage"]].version
    if current != stage.version:
        return f"the stage has version {current}, recorded {stage.version}; check out the commit of the bundle"
    return "the model, the code or the data that it reads is another one"


def _evaluated_again(stage: BundledStage, artifact: Artifact, cause: str) -> tuple[Verdict, str]:
    """Judge a stage whose contents cannot be compared: an evaluation by the recorded interval of its success."""
    low, high = stage.metrics.get("success_low"), stage.metrics.get("success_high")
    if stage.kind != "evaluation" or low is None or high is None:
        return "not_comparable", cause
    value = artifact.metrics["success"]
    text = f"success {value:.3f}, recorded {stage.metrics['success']:.3f} [{low:.3f}, {high:.3f}] ({cause})"
    return ("within_tolerance" if low <= value <= high else "different"), text
