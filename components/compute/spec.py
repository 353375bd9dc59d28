"""Where each stage runs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from components.compute.sky.spec import SkyPlace
from components.compute.torchrun import AcceleratePlace, Strategy
from components.specs import Spec

__all__ = ["AcceleratePlace", "ComputeSpec", "LocalPlace", "Place", "ProcessPlace", "StageName", "Strategy"]

StageName = Literal["collect", "judge", "filter", "feedback", "train", "reward_model", "evaluate", "deploy"]


class LocalPlace(Spec):
    """The process of the flow."""

    name: Literal["local"] = "local"


class ProcessPlace(Spec):
    """A process of its own, `python -m flows.stage`."""

    name: Literal["process"] = "process"


Place = Annotated[LocalPlace | ProcessPlace | AcceleratePlace | SkyPlace, Field(discriminator="name")]
"""Where stages can run, told apart by `name`."""


class ComputeSpec(Spec):
    """How stages run, not what they compute: it is in no stage key."""

    default: str = "local"
    """Where stages run: one of the places."""
    stages: dict[StageName, str] = {}
    """Where single stages run, if elsewhere: `{train: process}`."""
    places: dict[str, Place] = {"local": LocalPlace(), "process": ProcessPlace()}
    """What is meant by each name."""
    save_every: float = Field(30.0, ge=0)
    """Seconds between two saves of a training that goes on, from which it continues if it is killed. 0: after each
    gradient step."""
    stall_timeout: float = Field(3600.0, ge=0)
    """Seconds in which nothing of a stage moves (no answer of the model, no episode, no gradient step, no part ends)
    after which it is ended with an error that says what it was doing. 0: never."""
    stage_timeout: float = Field(604800.0, gt=0)
    """Seconds that one stage may take in a process of its own."""
    lock_timeout: float = Field(43200.0, gt=0)
    """Seconds to wait for another process that makes the same artifact."""
    retries: int = Field(0, ge=0)
    """Times that a stage is tried again, from what it had finished, when its process was killed or an engine or
    environment failed. A mistake, a guard that struck and a training that diverged are not tried again."""
    retry_delay: float = Field(30.0, ge=0)
    """Seconds before that."""
    price: float = Field(0.0, ge=0)
    """What an hour of the machine costs on which stages run, in a currency of your choice. Plans and costs use it."""
    prices: dict[StageName, Annotated[float, Field(ge=0)]] = {}
    """The same for single stages: `{train: 2.5}`."""

    def placement(self, stage: StageName) -> str:
        """Name of the place."""
        return self.stages.get(stage, self.default)

    def place(self, stage: StageName) -> Place:
        return self.places[self.placement(stage)]

    def hourly_price(self, stage: StageName) -> float:
        return self.prices.get(stage, self.price)
