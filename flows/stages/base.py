"""Base types of stages. A stage is a function `(spec part, input artifacts, draft, context) -> metrics`, without
Prefect.

A stage reads only its arguments and writes its files to the draft. `key_part` of its spec returns the values that
determine the result. Concurrency, speed and device do not, so the artifact stays cached when they change. A `Request`
is the complete input of a stage as JSON, so the stage can run in this process, in another one, or on another machine.

`Context.warm` caches objects that are slow to build, such as a loaded engine or a trainer. It affects speed only: each
object is stored with the recipe that it was built from, and another recipe rebuilds it.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from components.artifacts import Artifact, Draft, Store
from components.artifacts.roots import check_root, private_root
from components.compute.spec import Strategy
from components.errors import ResourceError
from components.models.spec import OF_MACHINE, ModelSpec
from components.models.weights import CACHE
from components.specs import Spec, Target
from components.tracking.stages import METRICS_ONLY, StageTracking
from components.trajectories.schema import Trajectory

logger = logging.getLogger(__name__)

Inputs = Mapping[str, Artifact]
"""Input artifacts by name."""


class StageSpec(Spec):
    """Part of an experiment that one stage reads."""

    def key_part(self) -> dict[str, Any]:
        """Return the JSON data that determines the result, for the stage key."""
        return self.model_dump(mode="json")

    def applied_reward(self) -> Target | None:
        """Return the reward that the stage applies, whose judges may be paid; None if it applies none."""
        return None

    def generation_cost(self) -> float | None:
        """Return the estimated cost of paid models that the stage asks besides a reward's judges; None if unknown."""
        return 0.0


class Progress(Protocol):
    """Callback for the progress of a stage."""

    def __call__(self, done: int, total: int, values: Mapping[str, float] | None = None) -> None:
        """Report that `done` of `total` episodes or gradient steps are done; `values` are metrics to show, by name."""
        ...


Row = TypeVar("Row")

PROGRESS_SECONDS = 0.2
"""Minimum time between two progress reports on a stream of rows, in seconds."""


def with_progress(
    rows: Iterable[Row], total: int, progress: Progress, size: Callable[[Row], int] = lambda row: 1
) -> Iterator[Row]:
    """Yield the rows, and report their number of `total` to `progress` regularly and at the end. size: number of rows
    that an item counts for."""
    reported = time.monotonic()
    done = 0
    progress(0, total)
    for row in rows:
        done += size(row)
        yield row
        if time.monotonic() - reported > PROGRESS_SECONDS:
            reported = time.monotonic()
            progress(done, total)
    progress(done, total)


class TrainingProgress:
    """Progress of a training in gradient steps. Nothing is reported before their number is known."""

    def __init__(self, progress: Progress):
        self._progress = progress
        self._done = 0
        self._total: int | None = None

    def on_total(self, total: int) -> None:
        """Receive the number of gradient steps, including those that an interrupted run took."""
        self._total = total
        self._progress(self._done, total)

    def on_step(self, metrics: Mapping[str, float]) -> None:
        """Receive the metrics of one gradient step, of this or of an interrupted run."""
        self._done += 1
        if self._total is not None:
            self._progress(self._done, self._total, metrics)


class Warm:
    """Cache of objects that stay loaded between the stages of one run, each with the recipe that it was built from."""

    def __init__(self) -> None:
        self._built: dict[str, tuple[Any, Any]] = {}
        self._building: defaultdict[str, threading.RLock] = defaultdict(threading.RLock)
        self.trainer: dict = {}
        """State of the trainer; only `components.algorithms.train` reads it."""

    def get(self, kind: str, recipe: Any, build: Callable[[], Any]) -> Any:
        """Return the cached object of this kind if its recipe is equal; else close it and build another. Thread-safe:
        concurrent calls for the same kind wait."""
        with self._building[kind]:
            cached = self._built.get(kind)
            if cached is not None and cached[0] == recipe:
                return cached[1]
            self._close(kind)
            instance = build()
            self._built[kind] = (recipe, instance)
            return instance

    def close(self) -> None:
        """Close and drop all objects."""
        for kind in list(self._built):
            self._close(kind)
        self.trainer.clear()

    def _close(self, kind: str) -> None:
        _, instance = self._built.pop(kind, (None, None))
        if hasattr(instance, "close"):
            instance.close()


def silent(done: int, total: int, values: Mapping[str, float] | None = None) -> None:
    """Ignore progress."""


def _no_followers(draft: Path, scratch: Path) -> None:
    """Do nothing: no other process takes part in the stage."""


COMPILED = {"TORCHINDUCTOR_CACHE_DIR": "torch", "TRITON_CACHE_DIR": "triton"}
"""Environment variables of the caches of compiled kernels, with their folders below `ROOT/compiled`."""


@dataclass(frozen=True)
class Context:
    """Environment of stages. All stages of a run share it, except `key`, `seed` and `scratch`, which belong to one
    stage."""

    store: Store
    cache: Path
    """Folder of converted model weights."""
    warm: Warm = field(default_factory=Warm)
    progress: Progress = silent
    on_wait: Callable[[str], None] = logger.info
    """Callback when the stage waits for another process that computes the same artifact."""
    watch: Callable[[Mapping[str, Any]], None] | None = None
    """Callback with the messages of one episode at a time while it runs (`components.rollout.live_view`)."""
    on_episode: Callable[[Trajectory], None] | None = None
    """Callback with each finished episode of a stage that plays, those of an interrupted attempt included."""
    lock_timeout: float = 12 * 3600.0
    """Maximum time to wait for another process, in seconds."""
    key: str = ""
    """Key of the stage that runs."""
    seed: int = 0
    scratch: Path | None = None
    """Folder whose files survive if the stage dies and is retried."""
    begin: Callable[[Path, Path], None] = _no_followers
    """Callback with the folder of the draft and `scratch` when the work begins."""
    strategy: Strategy = "ddp"
    """Parallelism strategy of several processes that train together."""

    @classmethod
    def at(cls, root: str | Path, store: str | None = None, **options: Any) -> Context:
        """Return the context of the run root `root`. store: URI of the remote artifact store, if there is one. Raises
        ResourceError for a root that is not private (`components.artifacts.roots`). Kernels that torch compiles in this
        process and its children are cached below the root, unless the user has set another folder."""
        root = Path(root).absolute()
        check_root(root)
        for name, folder in COMPILED.items():
            os.environ.setdefault(name, str(root / "compiled" / folder))
        return cls(Store(root / "artifacts", store), root / CACHE, **options)

    @classmethod
    def created(cls, root: str | Path, store: str | None = None, **options: Any) -> Context:
        """Return the context of the run root `root`, which is created if it does not exist. Raises ResourceError if it
        is not private or not writable."""
        try:
            private_root(Path(root).absolute())
            with tempfile.TemporaryFile(dir=root):
                pass
        except OSError as error:
            raise ResourceError(
                f"root={root}: not writable: {error.strerror or error}. Choose another folder: root=DIR"
            ) from None
        return cls.at(root, store, **options)


@dataclass(frozen=True)
class Request:
    """Request to run one stage: plain data."""

    stage: str
    spec: dict[str, Any]
    """Data of the stage's spec model."""
    inputs: dict[str, str] = field(default_factory=dict)
    """Keys of the input artifacts, by input name."""
    seed: int = 0
    allow: tuple[str, ...] = ()
    """Packages from which a `_target_` may come besides ours. Not part of the key."""

    def to_json(self) -> dict[str, Any]:
        """Return the request as JSON data."""
        return {**asdict(self), "allow": list(self.allow)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Request:
        """Return the request from JSON data. Raises ResourceError if the data is not a request."""
        names = [attribute.name for attribute in fields(cls)]
        if not isinstance(data, Mapping) or not {"stage", "spec"} <= set(data) <= set(names):
            actual = ", ".join(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
            raise ResourceError(f"request has the keys {actual}; expected {', '.join(names)}, at least the first two")
        return cls(**{**data, "allow": tuple(data.get("allow", ()))})


class StageRunner(Protocol):
    """Function that runs one stage and returns its artifact."""

    def __call__(self, label: str, step: int, request: Request) -> Artifact: ...


def unknown(request: Request) -> int | None:
    """Return None: the number is unknown, or the stage has none."""
    return None


MAIN_METRICS = ("episodes", "failed", "success", "reward", "loss", "heldout_accuracy", "unscored")
"""Metrics in the console line of a stage."""


def main_figures(metrics: Mapping[str, float]) -> str:
    """Return the metrics in the console line of a stage as text."""
    return "  ".join(f"{name} {metrics[name]:.4g}" for name in MAIN_METRICS if name in metrics)


StageFunction = Callable[[Any, Inputs, Draft, Context], dict[str, float]]
"""Function `(spec, inputs, draft, context) -> metrics` of a stage."""


@dataclass(frozen=True)
class StagePart:
    """Part of the rows of a stage: part `index` of `count` parts of about equal size."""

    index: int = 0
    count: int = 1

    def bounds(self, total: int) -> tuple[int, int]:
        """Return the first row, and the row after the last, of `total` rows."""
        return total * self.index // self.count, total * (self.index + 1) // self.count

    def of(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Return the rows of this part."""
        first, end = self.bounds(len(rows))
        return rows[first:end]

    def __str__(self) -> str:
        return f"shard {self.index + 1}/{self.count}"


WHOLE = StagePart()


def no_refusal(spec: Any) -> str | None:
    """Return None: every request of the stage can be split."""
    return None


@dataclass(frozen=True)
class Sharding:
    """Division of a stage into shards, which are stages of their own (`flows.stages.shard`), and the join of their
    artifacts to the artifact of the whole stage: same key, same digest."""

    shard: Callable[[Any, Inputs, Draft, Context, StagePart], dict[str, float]]
    """Function of one shard."""
    join: Callable[[Any, Inputs, Sequence[Artifact], Draft, Context], dict[str, float]]
    """Function of the whole stage that reads the artifacts of all shards, in order."""
    rows: Callable[[Any, Mapping[str, Artifact | None], Context], int | None]
    """Function of a spec and its inputs, None for those that are pending: the number of rows, which
    `compute.shard_rows` divides; None if it depends on a pending input."""
    refusal: Callable[[Any], str | None] = no_refusal
    """Reason why a request with this spec cannot be split; None if it can."""


@dataclass(frozen=True)
class Stage:
    """Declaration of a stage: everything that is known of it. Placement, plans, progress, tracking, reports, lineage
    and documentation derive from the declarations (`flows.stages.STAGES`)."""

    name: str
    version: int
    """Version of the computation; incremented when the same spec and inputs produce another result."""
    spec: type[StageSpec]
    kind: str
    """Kind of the artifact."""
    schema_version: int
    """Version of the layout of the artifact's files."""
    function: StageFunction
    files: Mapping[str, str] = field(default_factory=dict)
    """Files of the artifact by name or glob pattern, each with a description. A name that ends with `/` is a folder."""
    optional: tuple[str, ...] = ()
    """Names of `files` that only some artifacts have."""
    volatile: tuple[str, ...] = ()
    """Files that the artifact's digest does not cover."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Kinds of the input artifacts (`trajectories or feedback`) by name (`input_pattern`)."""
    order: int = 100
    """Position in lists of stages; stages of the same position are sorted by name."""
    unit: str = "parts"
    """Unit of progress."""
    plays: bool = False
    """True if it plays episodes: they can be watched, and count as episodes of the run."""
    distributed: bool = False
    """True if several processes can train together in it."""
    placed: bool = True
    """True if `compute` can place it; False if it runs only in the process of its command."""
    episodes: Callable[[Request], int | None] = unknown
    """Maximum number of episodes that a request plays."""
    size: Callable[[Request], int | None] = unknown
    """Amount of work of a request, to which its time is proportional."""
    sharding: Sharding | None = None
    """Division into shards (`compute.shards`); None if it runs as a whole."""
    tracking: StageTracking = METRICS_ONLY
    """Presentation in MLflow."""
    summary: Callable[[Mapping[str, float]], str] = main_figures
    """Metrics as text for the console line of the stage."""
    part_of_round: bool = False
    """True if each round runs it: the console summarizes it in the line of the round, and the report plots its time."""
    round_metrics: Mapping[str, str] = field(default_factory=dict)
    """Names of its metrics among those of a round, by glob pattern of the metric; `*` keeps the metric's own name."""
    lineage: Literal["step", "input", "result"] = "result"
    """Role in the lineage. `step`: its artifact is a model, and each model is a step. `input`: training data, which
    belongs to the step of the model that is trained on it. `result`: belongs to the step of its inputs."""

    def rounds_ago(self, name: str) -> int | None:
        """Return the number of rounds or collections ago that the data of an input comes from, 0 for the current one;
        None for an input that belongs to none, such as a checkpoint."""
        for declared in self.inputs:
            match = re.fullmatch(input_pattern(declared), name)
            if match is not None and "ago" in match.re.groupindex:
                return int(match["ago"] or 0)
        return None


@functools.cache
def input_pattern(declared: str) -> str:
    """Return the regular expression of a declared input name such as `trajectories[+K][-N]`: parts in brackets are
    optional, K is a number, N a number of rounds or collections ago; `*` is any name."""
    pattern = re.escape(declared).replace(r"\[", "(?:").replace(r"\]", ")?").replace(r"\*", ".+")
    return re.sub(r"(?<![A-Za-z])K\b", r"[1-9]\\d*", re.sub(r"(?<![A-Za-z])N\b", r"(?P<ago>[1-9]\\d*)", pattern))


def base_model(model: ModelSpec) -> dict[str, Any]:
    """Return the parts of a model spec that determine the results of stages that do not train, for the stage key."""
    return model.model_dump(exclude={"lora", *OF_MACHINE}) | model.content()
