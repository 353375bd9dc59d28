"""Several environments as one, so that one policy learns all of them at once (AgentGym, arXiv:2406.04151).

    environment:
      _target_: components.environments.mixture.Mixture
      environments:
        shop: {_target_: components.environments.worlds.shop.Shop}
        guess: {_target_: components.environments.games.guess.Guess}

Scenarios are taken from the environments in turn. Their ids and types begin with the name of their environment, so
reports by type show each environment. An episode has the tools of its own environment only.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from components.environments.protocol import Messages, Step
from components.errors import SpecError
from components.specs.registered import registered
from components.trajectories.schema import Scenario


@registered("environment.mixture")
class Mixture:
    """Several environments as one.

    Args:
        environments: Targets of the environments, by name.
    """

    def __init__(self, environments: dict[str, Any]):
        if not environments:
            raise SpecError.at("environment.environments", "{}: expected at least one environment")
        if wrong := [name for name in environments if not name.isidentifier()]:
            raise SpecError.at("environment.environments", f"{wrong[0]!r}: expected names such as shop")
        self._environments: Mapping[str, Any] = environments
        self._current: Any = None

    async def scenarios(self, split: str) -> Sequence[Scenario]:
        """Return the scenarios of all environments, one of each in turn."""
        lists = [
            [_named(scenario, name) for scenario in await _result_of(environment.scenarios, split)]
            for name, environment in self._environments.items()
        ]
        rows = itertools.zip_longest(*lists)
        return [scenario for row in rows for scenario in row if scenario is not None]

    async def tools(self) -> list[dict[str, Any]]:
        """Return the tools of the episode's environment; before the first episode none."""
        return [] if self._current is None else await _result_of(self._current.tools)

    async def reset(self, scenario: Scenario) -> Messages:
        """Start an episode in the environment of the scenario."""
        self._current, own = self._own(scenario)
        return await _result_of(self._current.reset, own)

    async def step(self, action: dict[str, Any]) -> Step:
        """Execute an action in the episode's environment."""
        return await _result_of(self._current.step, action)

    async def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        """Return the solution by the environment of the scenario."""
        environment, own = self._own(scenario)
        return await _result_of(environment.solve, own)

    def check_program(self, scenarios: Sequence[Scenario]) -> None:
        """Raise SpecError if tasks of an environment are files, whose folder a program would not get."""
        for name, environment in self._environments.items():
            if "workspace" in dir(type(environment)):
                text = "its tasks are files, and agent.command does not get their folder in a mixture; expected "
                raise SpecError.at(f"environment.environments.{name}", f"{text}agent=default, or no mixture")

    async def close(self) -> None:
        """Close all environments."""
        for environment in self._environments.values():
            await _result_of(environment.close)

    def _own(self, scenario: Scenario) -> tuple[Any, Scenario]:
        """Return the environment of a scenario, and the scenario as this environment lists it."""
        name, _, id_ = scenario.id.partition("/")
        type_ = scenario.type.partition("/")[2]
        own = Scenario(id_, scenario.input, scenario.split, type_, scenario.difficulty)
        return self._environments[name], own


async def _result_of(method: Callable[..., Any], *arguments: Any) -> Any:
    """Call a method, which may be `async`, and return its result."""
    result = method(*arguments)
    return await result if inspect.isawaitable(result) else result


def _named(scenario: Scenario, name: str) -> Scenario:
    """Return a scenario of the environment `name` as the mixture lists it."""
    type_ = f"{name}/{scenario.type}" if scenario.type else name
    return Scenario(f"{name}/{scenario.id}", scenario.input, scenario.split, type_, scenario.difficulty)
