"""Execution of one stage: look up its key, lock it, look up again, compute, commit."""

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
from components.specs.code import code_digest
from flows.stages import STAGES
from flows.stages.base import Context, Request, Stage, StageFunction, StageSpec
from flows.stages.code import stage_code

logger = logging.getLogger(__name__)

Status = Literal["ran", "cached"]

WORTH_GIVING_BACK = 0.05
"""Growth of the process by a stage, in GB, above which memory is released; the release takes half a second."""


def run_stage(request: Request, context: Context) -> tuple[Artifact, Status]:
    """Return the artifact of the request, computed (`ran`) or from the store (`cached`).

    Equal requests in other threads and processes wait for each other. Raises SpecError for an invalid request,
    ArtifactDamaged for an input that is not in the store, SchemaMismatch for an artifact of a newer version of
    Espalier, WaitTimeout, and the errors of the stage.
    """
    return make_stage(request, context)


def make_stage(request: Request, context: Context, function: StageFunction | None = None) -> tuple[Artifact, Status]:
    """Return the result of `run_stage`, computed by `function` in place of the stage's own."""
    stage, spec, inputs, key = resolve(request, context)
    if (artifact := _find(key, context)) is not None:
        return artifact, "cached"
    with context.store.lock(key, context.lock_timeout, context.on_wait):
        if (artifact := _find(key, context)) is not None:
            return artifact, "cached"
        context = replace(context, key=key, seed=request.seed)
        return _make(stage, spec, inputs, key, context, function), "ran"


def repeat_stage(request: Request, context: Context) -> tuple[Artifact, Artifact]:
    """Return the stored artifact of the request, and the artifact of a fresh computation, whose files are deleted on
    return. Equal digests mean equal content. Raises the errors of `run_stage`, and ResourceError if the artifact is not
    in the store."""
    key = request_key(request, context)
    before = context.store.find(key)
    if before is None:
        raise ResourceError(f"{request.stage} {key[:12]} is not in {context.store.root}: nothing to compare with")
    with tempfile.TemporaryDirectory(prefix=".again-", dir=context.store.root.parent) as folder:
        return before, recompute(request, context, Store(folder))


def recompute(request: Request, context: Context, store: Store) -> Artifact:
    """Return the artifact of a fresh computation in another store; its inputs are in the store of the context. Raises
    the errors of `run_stage`."""
    stage, spec, inputs, key = resolve(request, context)
    return _make(stage, spec, inputs, key, replace(context, store=store, key=key, seed=request.seed))


def _make(
    stage: Stage,
    spec: StageSpec,
    inputs: dict[str, Artifact],
    key: str,
    context: Context,
    function: StageFunction | None = None,
) -> Artifact:
    before = resident_gb()
    with context.store.draft(
        key,
        stage=stage.name,
        kind=stage.kind,
        schema_version=stage.schema_version,
        inputs=inputs,
        volatile=stage.volatile,
        spec=mask(spec.key_part()),
    ) as draft:
        draft.code = code_digest(stage_code(stage, spec))
        scratch = context.store.scratch(key)
        context.begin(draft.path, scratch)
        metrics = (function or stage.function)(spec, inputs, draft, replace(context, scratch=scratch))
        digests = {name: artifact.digest for name, artifact in inputs.items()}
        if stage_key(stage.name, stage.version, spec.key_part(), digests, context.seed) != key:
            raise ResourceError(
                f"{stage.name}: a model folder, an adapter or code that the stage reads changed on disk while it ran, "
                "so the result belongs to neither version. Run the same command again"
            )
        logger.debug("%s: %.2f GB resident at the end", stage.name, resident_gb())
        draft.metrics.update({name: float(value) for name, value in metrics.items() if math.isfinite(value)})
    if resident_gb() > before + WORTH_GIVING_BACK:
        give_back()
    artifact = _find(key, context)
    assert artifact is not None, f"{stage.name} {key} vanished after its commit"
    return artifact


def find_stage(request: Request, context: Context) -> Artifact | None:
    """Return the artifact of the request if it is in the store, else None. Runs nothing."""
    return _find(request_key(request, context), context)


def request_key(request: Request, context: Context) -> str:
    """Return the stage key of a request, whose inputs must be in the store."""
    return resolve(request, context)[3]


def key_part(request: Request) -> dict[str, Any]:
    """Return the part of a request's spec that determines its key."""
    return stage_and_spec(request)[1].key_part()


def _find(key: str, context: Context) -> Artifact | None:
    artifact = context.store.find(key)
    if artifact is not None:
        check_schema(artifact)
    return artifact


def check_schema(artifact: Artifact) -> None:
    """Raise SchemaMismatch if a newer version of Espalier wrote the artifact."""
    supported = STAGES[artifact.stage].schema_version if artifact.stage in STAGES else artifact.schema_version
    if artifact.schema_version > supported:
        raise SchemaMismatch(
            f"{artifact.path} was written by a newer version of Espalier: {artifact.kind} has schema version "
            f"{artifact.schema_version}, expected at most {supported}. Update, or use another root and store"
        )


def stage_and_spec(request: Request) -> tuple[Stage, StageSpec]:
    """Return the stage of a request and its valid spec. Raises SpecError."""
    stage = STAGES.get(request.stage)
    if stage is None:
        message = f"no such stage '{request.stage}'; expected one of {', '.join(STAGES)}"
        raise SpecError([Problem("stage", message, nearest(request.stage, STAGES))])
    return stage, validate(stage.spec, request.spec, path=stage.name, allow=request.allow)


def resolve(request: Request, context: Context) -> tuple[Stage, StageSpec, dict[str, Artifact], str]:
    """Return the stage of a request, its spec, its inputs and its key. Raises the errors of `run_stage` before it
    runs."""
    stage, spec = stage_and_spec(request)
    inputs = {}
    for name, key in request.inputs.items():
        artifact = _find(key, context)
        if artifact is None:
            raise ArtifactDamaged(f"{stage.name} needs {name} {key[:12]}, which is not in {context.store}")
        inputs[name] = artifact
    digests = {name: artifact.digest for name, artifact in inputs.items()}
    return stage, spec, inputs, stage_key(stage.name, stage.version, spec.key_part(), digests, request.seed)
