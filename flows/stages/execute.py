"""Runs one stage: look its key up, lock it, look again, do the work, commit."""

from __future__ import annotations

import logging
import math
import tempfile
from dataclasses import replace
from typing import Any, Literal

from components.artifacts import Artifact, Store, stage_key
from components.compute.memory import give_back, resident_gb
from components.errors import ArtifactDamaged, Problem, ResourceError, SchemaMismatch, SpecError
from components.redaction import mask
from components.specs import nearest, validate
from flows.stages import STAGES
from flows.stages.base import Context, Request, Stage, StageSpec

logger = logging.getLogger(__name__)

Status = Literal["ran", "cached"]

WORTH_GIVING_BACK = 0.05
"""GB by which a stage must have grown the process before memory is looked for, which takes half a second."""


def run_stage(request: Request, context: Context) -> tuple[Artifact, Status]:
    """The artifact of the request, made now (`ran`) or found (`cached`).

    Equal requests in other threads and processes wait for each other. Raises SpecError for a request that is wrong,
    ArtifactDamaged where an input is not in the store, SchemaMismatch where a newer Espalier has written what is there,
    WaitTimeout, and whatever the stage raises.
    """
    stage, spec, inputs, key = resolve(request, context)
    if (artifact := _find(key, context)) is not None:
        return artifact, "cached"
    with context.store.lock(key, context.lock_timeout, context.on_wait):
        if (artifact := _find(key, context)) is not None:
            return artifact, "cached"
        return _make(stage, spec, inputs, key, replace(context, key=key, seed=request.seed)), "ran"


def repeat_stage(request: Request, context: Context) -> tuple[Artifact, Artifact]:
    """The artifact of the request as it is in the store, and as it comes out now, made anew without a look at the
    first; that one's files are gone when this returns. Equal digests mean equal content. Raises what `run_stage` does,
    and ResourceError where the store has no such artifact."""
    stage, spec, inputs, key = resolve(request, context)
    before = context.store.find(key)
    if before is None:
        raise ResourceError(f"{stage.name} {key[:12]} is not in {context.store.root}: there is nothing to compare with")
    with tempfile.TemporaryDirectory(prefix=".again-", dir=context.store.root.parent) as folder:
        own = replace(context, store=Store(folder), key=key, seed=request.seed)
        return before, _make(stage, spec, inputs, key, own)


def _make(stage: Stage, spec: StageSpec, inputs: dict[str, Artifact], key: str, context: Context) -> Artifact:
    held = resident_gb()
    with context.store.draft(
        key,
        stage=stage.name,
        kind=stage.kind,
        schema_version=stage.schema_version,
        inputs=inputs,
        volatile=stage.volatile,
        spec=mask(spec.key_part()),
    ) as draft:
        scratch = context.store.scratch(key)
        context.begin(draft.path, scratch)
        metrics = stage.function(spec, inputs, draft, replace(context, scratch=scratch))
        digests = {name: artifact.digest for name, artifact in inputs.items()}
        if stage_key(stage.name, stage.version, spec.key_part(), digests, context.seed) != key:
            raise ResourceError(
                f"{stage.name}: a model's folder, an adapter or code that the stage reads has changed on the disk "
                "while it ran, so its result belongs to neither version. Run the same command again"
            )
        logger.debug("%s holds %.2f GB at its end", stage.name, resident_gb())
        draft.metrics.update({name: float(value) for name, value in metrics.items() if math.isfinite(value)})
    if resident_gb() > held + WORTH_GIVING_BACK:
        give_back()
    artifact = _find(key, context)
    assert artifact is not None, f"{stage.name} {key} vanished after its commit"
    return artifact


def find_stage(request: Request, context: Context) -> Artifact | None:
    """The artifact of the request if it is there; nothing is run."""
    return _find(request_key(request, context), context)


def request_key(request: Request, context: Context) -> str:
    """The stage key of a request; its inputs must be in the store."""
    return resolve(request, context)[3]


def key_part(request: Request) -> dict[str, Any]:
    """What of the spec of a request is in its key."""
    return _spec(request)[1].key_part()


def _find(key: str, context: Context) -> Artifact | None:
    artifact = context.store.find(key)
    if artifact is not None:
        check_schema(artifact)
    return artifact


def check_schema(artifact: Artifact) -> None:
    """Raises SchemaMismatch for an artifact that a newer Espalier has written."""
    ours = STAGES[artifact.stage].schema_version if artifact.stage in STAGES else artifact.schema_version
    if artifact.schema_version > ours:
        raise SchemaMismatch(
            f"{artifact.path} was written by a newer Espalier ({artifact.kind} of version "
            f"{artifact.schema_version}, this one reads {ours}): update, or use another root and store"
        )


def _spec(request: Request) -> tuple[Stage, StageSpec]:
    stage = STAGES.get(request.stage)
    if stage is None:
        message = f"there is no stage '{request.stage}'; expected one of {', '.join(STAGES)}"
        raise SpecError([Problem("stage", message, nearest(request.stage, STAGES))])
    return stage, validate(stage.spec, request.spec, path=stage.name, allow=request.allow)


def resolve(request: Request, context: Context) -> tuple[Stage, StageSpec, dict[str, Artifact], str]:
    """The stage that a request names, its spec, its inputs and its key. Raises what `run_stage` does before it runs."""
    stage, spec = _spec(request)
    inputs = {}
    for name, key in request.inputs.items():
        artifact = _find(key, context)
        if artifact is None:
            raise ArtifactDamaged(f"{stage.name} needs {name} {key[:12]}, which is not in {context.store}")
        inputs[name] = artifact
    digests = {name: artifact.digest for name, artifact in inputs.items()}
    return stage, spec, inputs, stage_key(stage.name, stage.version, spec.key_part(), digests, request.seed)
