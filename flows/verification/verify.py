"""Verification of a bundle: recompute stages, and compare them with what the run recorded.

A stage is recomputed on its recorded inputs: those in the bundle, or those that were recomputed with equal digests.
Where an input could only be recomputed with another content (another processor rounds otherwise), the stages after it
run on the recomputed one, and of these only evaluations are judged: their success must lie in the recorded interval.

The author of a bundle is not trusted. Without `trust`, a stage that would start programs, contact servers, read paths
or run code that is not part of Espalier (`components.specs.access`) is skipped, and the bundle's list of allowed
packages does not count.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from components.artifacts import Artifact, Store
from components.errors import ResourceError
from components.specs.access import accesses
from flows.stages.base import Context, Request
from flows.stages.execute import recompute, stage_and_spec
from flows.verification.bundle import ARTIFACTS, Bundle, BundledStage, artifact_of, unrepeatable
from flows.verification.content import compare_contents

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
