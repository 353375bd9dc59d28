"""Shard stage: a part of another stage (`compute.shards`), with a key of its own.

A stage that declares `Sharding` can be split into shards, which run in any place and at any time. Their artifacts are
joined to the artifact of the whole stage, which has the key and the digest that it has without shards. A shard is an
artifact like any other: one that is finished is cached, so only those that died are computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, PrivateAttr, ValidationInfo, model_validator

from components.artifacts import Artifact, Draft
from components.specs import Target
from components.specs.marks import CODE
from flows.stages.base import Context, Inputs, Request, Sharding, Stage, StagePart, StageSpec

SHARD = "shard"
SHARD_SECONDS = "shard_seconds"
"""Metric of a joined artifact: sum of the times of its shards."""


class ShardStage(StageSpec):
    stage: str
    """Name of the whole stage."""
    spec: Annotated[dict[str, Any], CODE]
    """Data of the spec of the whole stage."""
    index: int = Field(ge=0)
    """Number of the shard, from 0."""
    count: int = Field(ge=1)
    """Number of shards."""
    copy_: int = Field(0, ge=0, alias="copy")
    """Number of a duplicate of a straggler, from 1. It computes the same content under a key of its own, so it does not
    wait for the first one."""
    _whole: StageSpec = PrivateAttr()

    @model_validator(mode="after")
    def _valid(self, info: ValidationInfo) -> ShardStage:
        self._whole = declaration(self.stage).spec.model_validate(self.spec, context=info.context)
        return self

    @property
    def whole(self) -> StageSpec:
        """Spec of the whole stage."""
        return self._whole

    @property
    def part(self) -> StagePart:
        return StagePart(self.index, self.count)

    def key_part(self) -> dict[str, Any]:
        stage = declaration(self.stage)
        part = {"stage": stage.name, "version": stage.version, "spec": self._whole.key_part()}
        copy = {"copy": self.copy_} if self.copy_ else {}
        return {**part, "shard": [self.index, self.count], **copy}

    def applied_reward(self) -> Target | None:
        return self._whole.applied_reward()

    def generation_cost(self) -> float | None:
        cost = self._whole.generation_cost()
        return None if cost is None else cost / self.count


def declaration(name: str) -> Stage:
    """Return the declaration of a stage. Raise ValueError for an unknown one."""
    from flows.stages import STAGES

    if name not in STAGES:
        raise ValueError(f"'{name}': expected one of {', '.join(STAGES)}")
    return STAGES[name]


def sharding_of(stage: str) -> Sharding:
    """Return the division of a stage into shards. Raise ValueError if it has none."""
    sharding = declaration(stage).sharding
    if sharding is None:
        raise ValueError(f"'{stage}': cannot be split into shards")
    return sharding


def shard(spec: ShardStage, inputs: Inputs, draft: Draft, context: Context) -> dict[str, float]:
    """Write the files of one shard. Inputs: those of the whole stage."""
    return sharding_of(spec.stage).shard(spec.whole, inputs, draft, context, spec.part)


def shard_request(request: Request, part: StagePart, copy: int = 0) -> Request:
    """Return the request of one shard of a stage. copy: number of a duplicate of a straggler; 0: the shard itself."""
    spec = {"stage": request.stage, "spec": request.spec, "index": part.index, "count": part.count, "copy": copy}
    return replace(request, stage=SHARD, spec=spec)


def joined(request: Request, shards: Sequence[Artifact], context: Context) -> Artifact:
    """Return the artifact of a stage, joined from those of its shards. Equal requests wait for each other."""
    from flows.stages.execute import make_stage

    sharding = sharding_of(request.stage)

    def join(spec: StageSpec, inputs: Inputs, draft: Draft, context: Context) -> dict[str, float]:
        metrics = sharding.join(spec, inputs, shards, draft, context)
        return metrics | {"shards": float(len(shards)), SHARD_SECONDS: sum(shard.seconds for shard in shards)}

    return make_stage(request, context, join)[0]


STAGE = Stage(
    SHARD,
    1,
    ShardStage,
    SHARD,
    1,
    shard,
    files={"*": "files of the whole stage, for a part of its rows"},
    volatile=("times.json", "report.json"),
    inputs={"*": "inputs of the whole stage"},
    order=200,
    placed=False,
)
