"""Base class of places: the declaration of all that is known of one kind of place.

A place is a package below this one whose module `spec` defines one subclass of `Place`: its settings, its runner, and
the answers to what plans, checks and the executor ask. `components.compute.spec` discovers the packages, so a new place
is its package, its file in `conf/compute`, and its test.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from components.errors import Problem
from components.specs import Spec

if TYPE_CHECKING:
    from components.compute.runners import Runner, RunnerContext
    from components.compute.training_group import TrainingGroup
    from components.inference.spec import InferenceSpec
    from components.models.precision import Hardware
    from components.models.spec import ModelSpec


@dataclass(frozen=True)
class Offer:
    """Machine that a provider would choose for a place."""

    machine: str
    """Cloud, region and type; without an offer, the request."""
    price: float | None
    """US dollars per hour for all nodes; None without an offer."""
    problem: str | None = None
    """Reason why there is no offer; None with one."""
    source: str | None = None
    """Source of the price; None: the provider's `price_source`."""


def offers(places: Mapping[str, Place]) -> dict[str, Offer]:
    """Return the offers by name of the place. Each provider is asked once."""
    result: dict[str, Offer] = {}
    for kind in dict.fromkeys(type(place) for place in places.values()):
        result |= kind.offers({name: place for name, place in places.items() if type(place) is kind})
    return result


LOCAL_SCHEMES = ("file:", "memory:", "local:")
"""Schemes of stores on this machine."""


class Place(Spec):
    """Place where stages run. A subclass narrows `name` to the literal by which a configuration selects it."""

    name: str

    remote: ClassVar[bool] = False
    """True if stages run on other machines."""
    concurrent: ClassVar[bool] = True
    """True if several stages can run at the same time."""
    price_source: ClassVar[str | None] = None
    """Provider that is asked for `offers`, for messages; None if it has none."""

    @abstractmethod
    def runner(self, name: str, context: RunnerContext) -> Runner:
        """Return the runner of the stages of one run on this place. name: key of the place in `compute.places`.

        A failure of the place itself (a killed process, no machine, a full disk) is raised by the runner as an error
        of our own tree that says what to do; errors of stages are raised unchanged."""

    def describe(self) -> str:
        """Return the requested machine, for plans; empty if it is this one."""
        return ""

    @classmethod
    def offers(cls, places: Mapping[str, Self]) -> dict[str, Offer]:
        """Return the provider's offers for several places, by name; empty without a `price_source`."""
        return {}

    @property
    def group(self) -> TrainingGroup | None:
        """Processes that train together; None for a single process."""
        return None

    def parallel_problems(self, name: str, parallel: int) -> Iterator[Problem]:
        """Yield a problem if this place cannot run several stages at the same time although it should. parallel:
        `compute.parallel`."""
        return iter(())

    @property
    def hardware(self) -> Hardware:
        """Hardware on which its stages compute with `device: auto`, which determines `dtype: auto`."""
        return "this machine"

    @property
    def gpus(self) -> int:
        """Number of GPUs of a machine that a stage has for itself; 0 without GPUs, and if it shares the machine."""
        return 0

    @property
    def own_machines(self) -> bool:
        """True if stages that run at the same time have a machine each, which is paid for."""
        return self.remote

    @property
    def shares_folders(self) -> bool:
        """True if a folder of this machine can also be visible to the stage."""
        return not self.remote

    def refusal(self, name: str, stage: str, distributed: Sequence[str]) -> str | None:
        """Return the reason why a stage cannot run on this place, and what to do; None if it can.

        distributed: stages in which several processes can train together."""
        return None

    def training_problems(self, key: str, model: ModelSpec, max_grad_norm: float) -> Iterator[Problem]:
        """Yield the settings of a training that contradict those of this place. key: key path of the place."""
        return iter(())

    def group_problems(self, key: str, scenarios: int, model: ModelSpec, unsharded: str | None) -> Iterator[Problem]:
        """Yield the settings of a training that the group of this place does not support; parameters as in
        `TrainingGroup.problems`."""
        return iter(()) if self.group is None else self.group.problems(key, scenarios, model, unsharded)

    def notes(self) -> Iterator[str]:
        """Yield a message on each setting that another one replaces: the key below this place, and the replacement."""
        return iter(())

    def prerequisites(self) -> Iterator[str]:
        """Yield a message for each missing prerequisite on this machine: the key below this place, and what to do."""
        return iter(())

    def check_engine(self, name: str, engine: InferenceSpec) -> None:
        """Raise ResourceError if stages on this place lack something that an engine needs. name: key of the place in
        `compute.places`."""
        engine.check_prerequisites()

    def store_problems(self, name: str, store: str | None, workload: str) -> Iterator[Problem]:
        """Yield a problem if stages on this place cannot reach the store. workload: what runs here, for the message."""
        if self.remote and store is None:
            example = "file:///SHARED/FOLDER" if self.shares_folders else "s3://BUCKET/PREFIX"
            message = (
                f"null, but {workload} run on remote machines ({name}); expected a URI that both machines reach: "
                f"store={example}"
            )
            yield Problem("store", message)
        elif store is not None and store.startswith(LOCAL_SCHEMES) and not self.shares_folders:
            message = (
                f"{store!r} is on this machine, and {self.describe()} cannot reach it ({name}); expected an object "
                "store: store=s3://BUCKET/PREFIX, or a place that shares folders with this machine"
            )
            yield Problem("store", message)
