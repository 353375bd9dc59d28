"""Gymnasium environments with text actions and text observations.

Discrete actions have names; other actions are written as numbers. Observations are rendered as text: by a dedicated
renderer for the environments in `PRESETS`, by a general renderer for others, or by a user function. A user function may
shape rewards; success and `return` always use the environment's own rewards.

Episodes are reproducible: a scenario holds the reset seed and the arguments of the environment, so the saved state is
the list of actions. Environments that expose their transitions (`P`, as the toy-text ones do) are solved by value
iteration. A demonstration follows the optimal policy under the scenario's random seed, so in a stochastic environment
it may fail.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from components.environments.adapters.gym_presets import PRESETS, Goal, View, general
from components.environments.optional_packages import import_optional
from components.environments.restorable import RestorableActions
from components.environments.seeded import Count
from components.environments.tools import InvalidAction, acts, shorten
from components.errors import SpecError
from components.specs.base import nearest
from components.specs.marks import CODE, REFERENCE
from components.specs.registered import registered
from components.trajectories.schema import Scenario

LONGEST = 4_000
"""Maximum length of an action of numbers in characters; the end of a longer one is ignored."""
DISCOUNT = 0.99
"""Discount of value iteration."""


@dataclass(frozen=True)
class Move:
    """Argument of a `shaping` function: one transition."""

    before: Any
    """Observation before the action."""
    action: Any
    after: Any
    """Observation after the action."""
    reward: float
    """Reward from the environment, before shaping."""
    done: bool


@dataclass(frozen=True)
class Variant:
    """Return value of a `vary` function: the arguments of one scenario."""

    kwargs: dict[str, Any]
    """JSON data; overrides `kwargs` of the environment. Scenarios with duplicate arguments are dropped."""
    type: str = ""
    difficulty: int = 0


@registered("environment.gym")
class Gym(RestorableActions):
    """A Gymnasium environment played through text.

    For `actions`, `about`, `render` and `success`, null takes the preset of the environment or a general default.

    Scenario types: the id, or the type that `vary` returns. Difficulty: the difficulty that `vary` returns.

    Args:
        id: Id of a registered environment.
        make: Function `(**kwargs) -> gymnasium.Env` for an unregistered environment; `id` is then only its name.
        kwargs: Arguments of the environment.
        vary: Function `(seed) -> Variant` for arguments that differ per scenario.
        actions: Names of the discrete actions.
        about: Description of the task in the system prompt.
        render: Function `(View) -> str` that renders an observation.
        shaping: Function `(Move) -> float` that returns the reward of a step.
        success: Minimum return of a successful episode; or `terminated` or `truncated` if that end is a success.
        seed: Seed of the scenarios.
        train, heldout: Number of scenarios of the split.
        max_steps: Maximum number of steps; the episode is then truncated.
    """

    def __init__(
        self,
        id: Annotated[str, CODE] = "FrozenLake-v1",
        make: Callable[..., Any] | None = None,
        kwargs: Annotated[Mapping[str, Any] | None, REFERENCE] = None,
        vary: Callable[[int], Variant] | None = None,
        actions: Sequence[str] | None = None,
        about: str | None = None,
        render: Callable[[View], str] | None = None,
        shaping: Callable[[Move], float] | None = None,
        success: Goal | None = None,
        seed: int = 0,
        train: Count = 512,
        heldout: Count = 128,
        max_steps: Annotated[int, Field(ge=1)] = 40,
    ):
        self.gymnasium = import_optional("gymnasium", "gym")
        self.id, self.make, self.kwargs, self.vary = id, make, dict(kwargs or {}), vary
        self.shaping, self.max_steps = shaping, max_steps
        self.seed, self.counts = seed, {"train": train, "heldout": heldout}
        preset = None if make else PRESETS.get(id.rpartition("-")[0])
        self.environment: Any = self._make_environment(self.kwargs)
        self._current_kwargs = json.dumps(self.kwargs, sort_keys=True)
        self.render = render or (preset.render if preset else general)
        self.names = self._names(actions or (preset.actions if preset else None))
        goal = success if success is not None else preset.success if preset else self._threshold()
        if goal is None:
            message = f"null: {id} has no reward threshold; set a minimum return, 'terminated' or 'truncated'"
            raise SpecError.at("environment.success", message)
        self.success: Goal = goal
        text = about if about is not None else preset.about if preset else f"You act in {id}."
        self.system = f"{text} {self._action_help()}"

    def begin(self, scenario: Scenario) -> str:
        kwargs = {**self.kwargs, **scenario.input["kwargs"]}
        if json.dumps(kwargs, sort_keys=True) != self._current_kwargs:
            self.environment.close()
            self.environment = self._make_environment(kwargs)
            self._current_kwargs = json.dumps(kwargs, sort_keys=True)
        self.observation, _ = self.environment.reset(seed=scenario.input["seed"])
        self.total, self.terminated, self.truncated = 0.0, False, False
        return self._render()

    def act(self, action: str) -> str:
        move = self._move(action)
        before = self.observation
        self.observation, reward, terminated, truncated, _ = self.environment.step(move)
        self.action_log.append(action)
        self.total += float(reward)
        self.terminated = bool(terminated)
        self.truncated = not self.terminated and (bool(truncated) or len(self.action_log) >= self.max_steps)
        self.done = self.terminated or self.truncated
        shaped = float(reward)
        if self.shaping is not None:
            shaped = float(self.shaping(Move(before, move, self.observation, shaped, self.done)))
        self.reward += shaped
        return f"{self._render()}\nReward: {float(reward):g}."

    def legal_actions(self) -> list[str]:
        """Return the names of the discrete actions; empty if actions are written as numbers."""
        return self.names

    def outcome(self, answer: str) -> dict[str, Any]:
        steps = len(self.action_log)
        outcome: dict[str, Any] = {"return": self.total, "steps": steps}
        if self.success == "terminated":
            return {"success": self.terminated, **outcome}
        if self.success == "truncated":
            return {"success": self.truncated, "progress": steps / self.max_steps, **outcome}
        outcome["success"] = self.done and self.total >= self.success
        if self.success > 0:
            outcome["progress"] = min(1.0, max(0.0, self.total / self.success))
        return outcome

    def close(self) -> None:
        self.environment.close()

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        """Return the actions of the optimal policy. Raises SpecError if the environment exposes no transitions."""
        other = self._make_environment({**self.kwargs, **scenario.input["kwargs"]})
        try:
            table = getattr(other.unwrapped, "P", None)
            if not isinstance(table, Mapping) or not self.names:
                message = f"{self.id} exposes no transition table, so it cannot be solved; set warmup=none"
                raise SpecError.at("environment.id", message)
            best = _policy(table)
            state, _ = other.reset(seed=scenario.input["seed"])
            moves = []
            for _ in range(self.max_steps):
                moves.append(best[int(state)])
                state, _, terminated, truncated, _ = other.step(moves[-1])
                if terminated or truncated:
                    break
        finally:
            other.close()
        return acts([self.names[move] for move in moves])

    def check_solutions(self, scenarios: Sequence[Scenario]) -> None:
        """Raise SpecError if the environment exposes no transitions; this holds for all scenarios or for none."""
        for scenario in scenarios[:1]:
            self.solve(scenario)

    @functools.cached_property
    def _scenarios(self) -> list[Scenario]:  # type: ignore[override]  # computed at its first use
        """Return all scenarios, held-out ones first, so they do not depend on the size of the train split."""
        scenarios: list[Scenario] = []
        variants: set[str] = set()
        splits = ["heldout"] * self.counts["heldout"] + ["train"] * self.counts["train"]
        for number in range(50 * len(splits)):
            seed = self.seed * 1_000_003 + number
            variant = self.vary(seed) if self.vary is not None else Variant({})
            text = json.dumps(variant.kwargs, sort_keys=True)
            if variant.kwargs and text in variants:
                continue
            variants.add(text)
            input = {"kwargs": variant.kwargs, "seed": seed}
            kind = variant.type or self.id
            scenarios.append(Scenario(f"{self.id}-{seed}", input, splits[len(scenarios)], kind, variant.difficulty))
            if len(scenarios) == len(splits):
                return scenarios
        message = f"returns {len(scenarios)} distinct scenarios; train and heldout need {len(splits)}"
        raise SpecError.at("environment.vary", message)

    def _make_environment(self, kwargs: dict[str, Any]) -> Any:
        if self.make is not None:
            return self.make(**kwargs)
        ids = sorted(self.gymnasium.registry)
        if self.id not in ids:
            message = f"gymnasium has no environment {self.id!r}; set `make` for your own environment"
            raise SpecError.at("environment.id", message, nearest(self.id, ids))
        try:
            return self.gymnasium.make(self.id, max_episode_steps=self.max_steps, disable_env_checker=True, **kwargs)
        except TypeError as error:
            raise SpecError.at("environment.kwargs", f"{self.id} does not accept {kwargs}: {error}") from error

    def _names(self, actions: Sequence[str] | None) -> list[str]:
        """Return the names of the discrete actions; empty if actions are written as numbers."""
        space, spaces = self.environment.action_space, self.gymnasium.spaces
        if isinstance(space, spaces.Discrete):
            names = [str(name) for name in actions or range(int(space.start), int(space.start + space.n))]
            if len(names) != int(space.n) or len({_plain(name) for name in names}) != len(names):
                message = (
                    f"names {len(names)} actions ({', '.join(names)}); {self.id} has {space.n}, "
                    "each needs a unique name"
                )
                raise SpecError.at("environment.actions", message)
            return names
        if not isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
            message = f"the action space of {self.id} is {space}; expected Discrete, Box, MultiDiscrete or MultiBinary"
            raise SpecError.at("environment.id", message)
        if actions:
            message = f"the action space of {self.id} is {space}: its actions are numbers without names; set null"
            raise SpecError.at("environment.actions", message)
        return []

    def _threshold(self) -> float | None:
        spec = getattr(self.environment, "spec", None)
        return None if spec is None or spec.reward_threshold is None else float(spec.reward_threshold)

    def _action_help(self) -> str:
        if self.names:
            return f"Each turn, one action: {', '.join(self.names)}."
        return f"Each turn, one action: {math.prod(self.environment.action_space.shape)} numbers, such as 0.5, -1."

    def _move(self, action: str) -> Any:
        space = self.environment.action_space
        if self.names:
            for number, name in enumerate(self.names):
                if _plain(action) == _plain(name):
                    return int(space.start) + number
            raise InvalidAction(f"no action {action[:60]!r}; there are {', '.join(self.names)}")
        size = math.prod(space.shape)
        parts = [part for part in re.split(r"[,\s]+", action[:LONGEST].strip("[]() \n")) if part]
        try:
            numbers = [float(part) for part in parts]
        except ValueError:
            numbers = []
        if len(numbers) != size or not all(math.isfinite(number) for number in numbers):
            raise InvalidAction(f"an action is {size} numbers")
        numpy = import_optional("numpy", "gym")
        move = numpy.asarray(numbers).reshape(space.shape).astype(space.dtype)
        if not space.contains(move):
            raise InvalidAction(f"{numbers} is outside {space}")
        return move

    def _render(self) -> str:
        return shorten(str(self.render(View(self.observation, self.environment))))


@registered("environment.frozen_lakes")
def frozen_lakes(seed: int, sizes: Sequence[int] = (4, 5, 6, 7, 8)) -> Variant:
    """Return a random FrozenLake map, for `vary`. sizes: map sizes to cycle through, easiest first."""
    size = sizes[seed % len(sizes)]
    difficulty = 1 + round(4 * (seed % len(sizes)) / max(1, len(sizes) - 1))
    return Variant({"desc": list(_lake_map(seed, size)), "map_name": None}, f"{size}x{size}", difficulty)


@functools.lru_cache(maxsize=4096)  # a collector creates many environments with the same scenarios
def _lake_map(seed: int, size: int) -> tuple[str, ...]:
    maps = import_optional("gymnasium.envs.toy_text.frozen_lake", "gym")
    return tuple(maps.generate_random_map(size=size, p=0.75, seed=seed))


def _policy(table: Mapping[int, Mapping[int, Sequence[tuple[float, int, float, bool]]]]) -> dict[int, int]:
    """Return the optimal action of each state, by value iteration."""
    values = dict.fromkeys(table, 0.0)

    def worth(state: int, action: int) -> float:
        return sum(p * (r + (0.0 if end else DISCOUNT * values[after])) for p, after, r, end in table[state][action])

    for _ in range(1000):
        change = 0.0
        for state in table:
            value = max(worth(state, action) for action in table[state])
            change = max(change, abs(value - values[state]))
            values[state] = value
        if change < 1e-6:
            break
    return {state: max(table[state], key=lambda action: worth(state, action)) for state in table}


def _plain(name: str) -> str:
    return " ".join(name.lower().replace("_", " ").strip(" .!\"'`").split())
