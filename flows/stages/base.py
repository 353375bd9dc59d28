"""What a stage is: a function `(spec part, input artifacts, draft, context) -> metrics`, without Prefect.

A stage reads its arguments and nothing else, and leaves its files in the draft. Its spec says with `key_part` which
of its values determine the result; how wide, how fast and on which device it runs does not, so a change of these
finds the artifact that is there. A `Request` is all that a stage needs, as JSON: it can run here, in a process of its
own, or on another machine.

`Context.warm` holds what is slow to build: a loaded engine, a trainer. It is only speed: each thing is filed under
what it was built from, and another recipe builds it anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar

from components.artifacts import Artifact, Draft, Store
from components.compute.spec import Strategy
from components.errors import ResourceError
from components.models.spec import ModelSpec
from components.specs import Spec

logger = logging.getLogger(__name__)

Inputs = Mapping[str, Artifact]
"""Input artifacts by name."""


class StageSpec(Spec):
    """The part of an experiment that one stage reads."""

    def key_part(self) -> dict[str, Any]:
        """JSON data that determine the result, for the stage key."""
        return self.model_dump(mode="json")


class Progress(Protocol):
    """Told how far a stage is."""

    def __call__(self, done: int, total: int, values: Mapping[str, float] | None = None) -> None:
        """`done` of `total` episodes or gradient steps; `values` are figures worth showing, by name."""
        ...


Row = TypeVar("Row")

PROGRESS_SECONDS = 0.2
"""Time between two words about a stream of rows."""


def followed(rows: Iterable[Row], total: int, progress: Progress) -> Iterator[Row]:
    """The rows as they come; `progress` is told how many of `total` have, now and then and at the end."""
    told = time.monotonic()
    done = 0
    progress(0, total)
    for done, row in enumerate(rows, 1):
        yield row
        if time.monotonic() - told > PROGRESS_SECONDS:
            told = time.monotonic()
            progress(done, total)
    progress(done, total)


class Warm:
    """Things that stay built between the stages of one run, each under what it was built from."""

    def __init__(self) -> None:
        self._built: dict[str, tuple[Any, Any]] = {}
        self._building: defaultdict[str, threading.RLock] = defaultdict(threading.RLock)
        self.trainer: dict = {}
        """The trainer's own; only `components.algorithms.train` reads it."""

    def get(self, kind: str, recipe: Any, build: Callable[[], Any]) -> Any:
        """The thing of this kind, if it was built from an equal recipe; else the old one is closed and `build` makes
        another. Other threads that want it wait meanwhile."""
        with self._building[kind]:
            held = self._built.get(kind)
            if held is not None and held[0] == recipe:
                return held[1]
            self._close(kind)
            thing = build()
            self._built[kind] = (recipe, thing)
            return thing

    def close(self) -> None:
        """Lets go of everything."""
        for kind in list(self._built):
            self._close(kind)
        self.trainer.clear()

    def _close(self, kind: str) -> None:
        _, thing = self._built.pop(kind, (None, None))
        if hasattr(thing, "close"):
            thing.close()


def silent(done: int, total: int, values: Mapping[str, float] | None = None) -> None:
    """Shows nothing."""


def _alone(draft: Path, scratch: Path) -> None:
    """Nobody else is to know."""


@dataclass(frozen=True)
class Context:
    """Where stages run. All stages of a run share it, but for `key`, `seed` and `scratch`, which are a stage's own."""

    store: Store
    cache: Path
    """Folder of converted model weights."""
    warm: Warm = field(default_factory=Warm)
    progress: Progress = silent
    on_wait: Callable[[str], None] = logger.info
    """Told when another process makes the same artifact and we wait for it."""
    watch: Callable[[Mapping[str, Any]], None] | None = None
    """Told of one episode at a time as it is played (`components.rollout.live_view`)."""
    lock_timeout: float = 12 * 3600.0
    """Seconds to wait for it."""
    key: str = ""
    """Key of the stage that runs."""
    seed: int = 0
    scratch: Path | None = None
    """What the stage writes here is there again if it dies and is started again."""
    begin: Callable[[Path, Path], None] = _alone
    """Told of the folder of the draft and of `scratch` when the work begins."""
    strategy: Strategy = "ddp"
    """Of several processes that train together: what lies in parts on them."""

    @classmethod
    def at(cls, root: str | Path, store: str | None = None, **options: Any) -> Context:
        """The context of the run root `root`. store: URI of the remote store behind its artifacts, if there is one."""
        root = Path(root).absolute()
        return cls(Store(root / "artifacts", store), root / "models", **options)


@dataclass(frozen=True)
class Request:
    """One stage to run: plain data."""

    stage: str
    spec: dict[str, Any]
    """Data of the stage's spec model."""
    inputs: dict[str, str] = field(default_factory=dict)
    """Name of each input and the key of its artifact."""
    seed: int = 0
    allow: tuple[str, ...] = ()
    """Packages from which a `_target_` may come besides ours. Not part of the key."""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "allow": list(self.allow)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Request:
        """Raises ResourceError where the data are no request."""
        names = [one.name for one in fields(cls)]
        if not isinstance(data, Mapping) or not {"stage", "spec"} <= set(data) <= set(names):
            given = ", ".join(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
            raise ResourceError(f"a request has {', '.join(names)}, the first two at least; this one has {given}")
        return cls(**{**data, "allow": tuple(data.get("allow", ()))})


@dataclass(frozen=True)
class Stage:
    """A stage by name: what it reads, what it makes, and the function."""

    name: str
    version: int
    """Raised when the same spec and inputs come to mean another result."""
    spec: type[StageSpec]
    kind: str
    """Kind of its artifact."""
    schema_version: int
    """Version of the layout of the artifact's files."""
    function: Callable[[Any, Inputs, Draft, Context], dict[str, float]]
    volatile: tuple[str, ...] = ()
    """Files that the artifact's digest does not cover."""


def base_model(model: ModelSpec) -> dict[str, Any]:
    """What of a model determines the results of stages that do not train."""
    return {name: value for name, value in model.base().items() if name != "device"} | model.content()
