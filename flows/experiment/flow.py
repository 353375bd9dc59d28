"""Flow of an experiment: the recipe that its run executes, chosen by `flow`.

A recipe is a function `(run, spec) -> Policy`, decorated with `recipe`, which names the shared keys that it reads
(`SHARED_KEYS`). Its other parameters are its own keys, set below `flow`. A shared key that the recipe does not read is
rejected, so no key is accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import model_validator

from components.errors import Problem
from components.specs import Target
from components.specs.component_path import is_below, locate, target_error

SHARED_KEYS = ("rounds", "fork", "early_stopping", "warmup", "replay", "ewc", "feedback", "reward_model", "data")
"""Top-level keys that only some recipes read."""
EVOLVE = "evolve"
"""Config group of the ways to train that flow=agent_evol has."""
DEFAULT_FLOW = "flows.recipes.online_rl.online_rl"

F = TypeVar("F", bound=Callable[..., Any])


def recipe(*reads: str, offline: bool = False, generates: bool = False, files: bool = False) -> Callable[[F], F]:
    """Declare a function as a recipe. Raises ValueError for a key that is not shared.

    reads: the shared keys that it reads. offline: `algorithm` trains on imported data, so a warmup trains on
    demonstrations; otherwise a warmup trains on the imported data, if there is any. generates: it generates the
    scenarios of the environment. files: it needs demonstrations in `data` and preferences in `reward_model.data`."""
    if unknown := sorted(set(reads) - set(SHARED_KEYS)):
        raise ValueError(f"recipe({', '.join(unknown)}): expected some of {', '.join(SHARED_KEYS)}")

    def declare(function: F) -> F:
        function.reads = frozenset(reads)  # type: ignore[attr-defined]
        function.offline = offline  # type: ignore[attr-defined]
        function.generates = generates  # type: ignore[attr-defined]
        function.files = files  # type: ignore[attr-defined]
        return function

    return declare


class FlowTarget(Target):
    """Recipe of a run, with its own keys."""

    called_with: ClassVar[tuple[str, ...] | None] = ("run", "spec")
    built_in: ClassVar[tuple[str, ...]] = ("flows.recipes",)

    @model_validator(mode="after")
    def _is_recipe(self) -> FlowTarget:
        if not hasattr(self.factory(), "reads"):
            name = self.target.rpartition(".")[2]
            raise target_error(
                self.target,
                f"{self.target} is not a recipe; write @recipe(...) from flows.recipes above def {name}(run, spec), "
                "with the names of the shared keys that it reads",
            )
        return self

    @property
    def name(self) -> str:
        """Name of the recipe's function."""
        return self.target.rpartition(".")[2]

    @property
    def title(self) -> str:
        """Name of the flow in Prefect, such as `agent-evol`."""
        return self.name.replace("_", "-")

    @property
    def is_built_in(self) -> bool:
        """True for a recipe of the project."""
        return any(is_below(self.target, package) for package in self.built_in)

    @property
    def offline(self) -> bool:
        """True if its `algorithm` trains on imported data."""
        return self.factory().offline  # type: ignore[attr-defined]

    @property
    def generates(self) -> bool:
        """True if it generates the scenarios of the environment."""
        return self.factory().generates  # type: ignore[attr-defined]

    @property
    def files(self) -> bool:
        """True if it needs files of demonstrations and preferences."""
        return self.factory().files  # type: ignore[attr-defined]

    @property
    def reads(self) -> frozenset[str]:
        """Shared keys that the recipe reads."""
        return self.factory().reads  # type: ignore[attr-defined]


def unread_keys(data: Mapping[str, Any], allow: list[str]) -> Iterator[Problem]:
    """Yield a problem for each shared key in the data of an experiment that its recipe does not read."""
    flow = data.get("flow")
    for key in SHARED_KEYS:
        if _is_set(data, key) and isinstance(flow, Mapping) and not reads(flow, key, allow):
            yield Problem(key, unread_message(flow))


def _is_set(data: Mapping[str, Any], key: str) -> bool:
    """Return True if a shared key is set. `data` is set if it names a source."""
    if key != "data":
        return key in data
    source = data.get("data")
    return isinstance(source, Mapping) and any(source.get(name) is not None for name in ("path", "dataset"))


def reads(flow: Mapping[str, Any], key: str, allow: list[str]) -> bool:
    """Return True if a recipe reads a shared key, or is invalid itself. flow: its data. key: the key, or one below."""
    function = locate(flow.get("_target_"), (*allow, *FlowTarget.built_in))[1]
    return key.partition(".")[0] in getattr(function, "reads", SHARED_KEYS)


def unread_message(flow: Mapping[str, Any], key: str = "") -> str:
    """Return the message for a shared key, or the group `evolve`, that a recipe does not read."""
    name, other = str(flow["_target_"]).rpartition(".")[2], "agent_evol" if key == EVOLVE else "online_rl"
    return f"flow={name} does not read it; remove it, or choose a flow that does, such as flow={other}"
