"""Spec of where each stage runs, and discovery of the places."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from components.compute.local.spec import LocalPlace
from components.compute.place import Place
from components.compute.process.spec import ProcessPlace
from components.compute.training_group import Strategy
from components.specs import Spec
from components.specs.declared import discover, union_of
from components.specs.marks import FILES, PROGRAM

__all__ = ["PLACES", "ComputeSpec", "SaveEvery", "Strategy"]


SaveEvery = Annotated[float, Field(ge=0)] | Literal["auto"]
"""Seconds between two checkpoints of a running training."""
MAX_SHARDS = 4096
"""Maximum number of shards of a stage."""
PLACES = discover("components.compute", Place, "spec")  # type: ignore[type-abstract]
"""Places where stages can run, by name."""

if TYPE_CHECKING:
    AnyPlace = Place
else:
    AnyPlace = union_of(PLACES.values())


class ComputeSpec(Spec):
    """Placement, timeouts, retries and prices of stages. It does not affect results, so it is in no stage key."""

    default: str = "local"
    """Place of stages without an entry in `stages`: a name from `places`."""
    stages: dict[str, str] = {}
    """Places of single stages: `{train: process}`."""
    places: Annotated[dict[str, AnyPlace], PROGRAM] = {"local": LocalPlace(), "process": ProcessPlace()}
    """Places by name."""
    config_file: Annotated[str | None, FILES] = None
    """Configuration file of the place of `compute=accelerate`; None for other options."""
    parallel: int = Field(1, ge=1)
    """Maximum number of independent stages of a recipe that run at the same time, each in its own process or on its
    own machine: reward models of an ensemble, and branches of `run.parallel`. Stages on `local` run one after the
    other."""
    shards: int = Field(1, ge=1, le=MAX_SHARDS)
    """Number of parts into which collect, judge, evaluate, import and filter are split. Each part is a stage of its own
    and runs where its stage does; the joined artifact is that of the whole stage. 1: stages run as a whole."""
    shard_rows: int | None = Field(None, ge=1)
    """Rows of a shard, in place of a number of shards: a stage of N rows has ceil(N / shard_rows) shards. Rows are
    episodes, and for an import rows of the data. The episodes of a scenario stay in one shard. null: `shards`."""
    stage_shards: dict[str, Annotated[int, Field(ge=1, le=MAX_SHARDS)] | None] = {}
    """Number of shards of single stages: `{judge: 1}`. null: as `shards` or `shard_rows` determines."""
    shard_workers: int | None = Field(None, ge=1)
    """Maximum number of shards of a stage that run at the same time. null: all of them. In processes of one machine,
    each loads its own engine unless the engine is a server."""
    duplicate_after: float = Field(0.0, ge=0)
    """Start a second copy of a shard on an idle worker once it takes this many times the median time of the finished
    shards; the copy that finishes first counts, and the other is stopped. 0: never."""
    save_every: SaveEvery = "auto"
    """Seconds between two checkpoints of a running training, from which it resumes if it is killed; they are written
    while it goes on. 0: after each gradient step, which waits for it. `auto`: 30, or 20 times the seconds that the
    last one took, which grow with its size."""
    stall_timeout: float = Field(3600.0, ge=0)
    """Seconds without progress (model response, episode, gradient step or finished part) after which a stage is ended
    with an error that names its last activity. 0: never."""
    stage_timeout: float = Field(604800.0, gt=0)
    """Time limit in seconds of one stage in a subprocess."""
    lock_timeout: float = Field(43200.0, gt=0)
    """Seconds to wait for another process that computes the same artifact."""
    retries: int = Field(0, ge=0)
    """Number of retries of a stage whose process was killed, or whose engine or environment failed. A retry resumes
    from the finished work. Configuration errors, guards and diverged training are not retried."""
    retry_delay: float = Field(30.0, ge=0)
    """Seconds before a retry."""
    price: float = Field(0.0, ge=0)
    """Hourly price of the machine on which stages run, in a currency of your choice. Used by plans and costs."""
    prices: dict[str, Annotated[float, Field(ge=0)]] = {}
    """Hourly prices of single stages: `{train: 2.5}`."""

    def placement(self, stage: str) -> str:
        """Return the name of the place of a stage."""
        return self.stages.get(stage, self.default)

    def place(self, stage: str) -> Place:
        return self.places[self.placement(stage)]

    def hourly_price(self, stage: str) -> float:
        return self.prices.get(stage, self.price)

    def shards_of(self, stage: str) -> int | None:
        """Return the number of shards of a stage; None if its rows determine it (`shard_rows`)."""
        if (own := self.stage_shards.get(stage)) is not None:
            return own
        return self.shards if self.shard_rows is None else None

    def shards_for(self, rows: int) -> int:
        """Return the number of shards of a stage with so many rows, each of about `shard_rows`; more rows if the number
        would exceed `MAX_SHARDS`."""
        assert self.shard_rows is not None
        return min(MAX_SHARDS, max(1, math.ceil(rows / self.shard_rows)))

    def workers(self, shards: int) -> int:
        """Return the number of shards that run at the same time."""
        return min(shards, self.shard_workers or shards)

    @property
    def places_in_use(self) -> dict[str, Place]:
        """Places to which stages are assigned, by name; without names that `places` does not define."""
        names = sorted({self.default, *self.stages.values()})
        return {name: self.places[name] for name in names if name in self.places}
