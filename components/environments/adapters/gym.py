"""Any Gymnasium environment, played in words.

Discrete actions have names; other actions are written as numbers. Observations are rendered as text, by a renderer of
this module for the environments in `KNOWN`, by a general one for the rest, or by a function of yours. Rewards may be
shaped by a function; success and `return` are always judged on the environment's own rewards.

An episode is repeatable: a scenario holds the seed of its reset and the arguments of the environment. What was done is
therefore all that has to be saved. Environments that state their transitions (`P`, as the toy ones do) are solved by
value iteration: the demonstration is what the best policy does under the scenario's own luck, so in a slippery world
it fails now and then.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from components.environments.optional_packages import import_optional
from components.environments.scenario_counts import Count
from components.environments.tools import Invalid, TextEnvironment, acts
from components.errors import Problem, SpecError
from components.specs.base import nearest
from components.specs.registered import registered
from components.trajectories.schema import Scenario

LONGEST = 4_000
"""Characters of an observation; what is longer is cut."""
DISCOUNT = 0.99

Goal = float | Literal["terminated", "truncated"]


@dataclass(frozen=True)
class View:
    """What is rendered: the argument of a function for `render`."""

    observation: Any
    environment: Any


@dataclass(frozen=True)
class Move:
    """What is rewarded: the argument of a function for `shaping`."""

    before: Any
    """The observation before the action."""
    action: Any
    after: Any
    reward: float
    """The environment's own."""
    done: bool


@dataclass(frozen=True)
class Variant:
    """What is particular to a scenario: what a function for `vary` returns."""

    kwargs: dict[str, Any]
    """JSON data; over those of all scenarios. A scenario with the same ones as another is left out."""
    type: str = ""
    difficulty: int = 0


@dataclass(frozen=True)
class Known:
    """What this module knows of an environment."""

    about: str
    actions: tuple[str, ...]
    success: Goal
    render: Callable[[View], str]


@registered("environment.gym")
class Gym(TextEnvironment):
    """id: of a registered environment. make: a function `(**kwargs) -> gymnasium.Env`, for one that is not registered;
    id is then only its name. kwargs: arguments of the environment. vary: a function `(seed) -> Variant`, for scenarios
    with arguments of their own. actions: names of discrete actions. about: what the agent is told of the task.
    render: a function `(View) -> str`. shaping: a function `(Move) -> float`, which gives the step's reward. success:
    the return from which an episode is one, or `terminated` or `truncated` where ending so is. For all of these, null:
    what is known of the environment, or something general. seed: of the scenarios. train, heldout: scenarios of the
    two splits. max_steps: after which an episode is cut.

    Scenario types: the id, or what `vary` says. Difficulty: what `vary` says.
    """

    def __init__(
        self,
        id: str = "FrozenLake-v1",
        make: Callable[..., Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
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
        known = None if make else KNOWN.get(id.rpartition("-")[0])
        self.environment: Any = self._made(self.kwargs)
        self._made_with = json.dumps(self.kwargs, sort_keys=True)
        self.render = render or (known.render if known else general)
        self.names = self._names(actions or (known.actions if known else None))
        goal = success if success is not None else known.success if known else self._threshold()
        if goal is None:
            message = f"{id} does not say what success is; give a return, 'terminated' or 'truncated'"
            raise SpecError([Problem("environment.success", message)])
        self.success: Goal = goal
        text = about if about is not None else known.about if known else f"You act in {id}."
        self.system = f"{text} {self._how()}"

    def scenarios(self, split: str) -> Sequence[Scenario]:
        return [scenario for scenario in self._scenarios if scenario.split == split]

    def begin(self, scenario: Scenario) -> str:
        given = {**self.kwargs, **scenario.input["kwargs"]}
        if json.dumps(given, sort_keys=True) != self._made_with:
            self.environment.close()
            self.environment = self._made(given)
            self._made_with = json.dumps(given, sort_keys=True)
        self.seen, _ = self.environment.reset(seed=scenario.input["seed"])
        self.done_actions: list[str] = []
        self.total, self.terminated, self.truncated = 0.0, False, False
        return self._shown()

    def act(self, action: str) -> str:
        if self.terminated or self.truncated:
            raise Invalid("the episode is over")
        move = self._move(action)
        before = self.seen
        self.seen, reward, terminated, truncated, _ = self.environment.step(move)
        self.done_actions.append(action)
        self.total += float(reward)
        self.terminated = bool(terminated)
        self.truncated = not self.terminated and (bool(truncated) or len(self.done_actions) >= self.max_steps)
        self.done = self.terminated or self.truncated
        shaped = float(reward)
        if self.shaping is not None:
            shaped = float(self.shaping(Move(before, move, self.seen, shaped, self.done)))
        self.reward += shaped
        return f"{self._shown()}\nReward: {float(reward):g}."

    def outcome(self, answer: str) -> dict[str, Any]:
        steps = len(self.done_actions)
        found: dict[str, Any] = {"return": self.total, "steps": steps}
        if self.success == "terminated":
            return {"success": self.terminated, **found}
        if self.success == "truncated":
            return {"success": self.truncated, "progress": steps / self.max_steps, **found}
        over = self.terminated or self.truncated
        found["success"] = over and self.total >= self.success
        if self.success > 0:
            found["progress"] = min(1.0, max(0.0, self.total / self.success))
        return found

    def close(self) -> None:
        self.environment.close()

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        """Raises SpecError where the environment does not state its transitions."""
        other = self._made({**self.kwargs, **scenario.input["kwargs"]})
        try:
            table = getattr(other.unwrapped, "P", None)
            if not isinstance(table, Mapping) or not self.names:
                message = f"{self.id} states no transitions, so it cannot be solved here; write warmup=none"
                raise SpecError([Problem("environment.id", message)])
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
        """Raises SpecError where the environment does not state its transitions: for none of them, then."""
        for scenario in scenarios[:1]:
            self.solve(scenario)

    def save(self) -> Any:
        return [self.done_actions, self.invalid_actions]

    def restore(self, scenario: Scenario, state: Any) -> None:
        self.reset(scenario)
        done, invalid = state
        for action in done:
            self.act(action)
        self.invalid_actions = invalid

    @functools.cached_property
    def _scenarios(self) -> list[Scenario]:
        """Heldout first: a larger train split then leaves it as it is."""
        found: list[Scenario] = []
        variants: set[str] = set()
        splits = ["heldout"] * self.counts["heldout"] + ["train"] * self.counts["train"]
        for number in range(50 * len(splits)):
            seed = self.seed * 1_000_003 + number
            variant = self.vary(seed) if self.vary is not None else Variant({})
            text = json.dumps(variant.kwargs, sort_keys=True)
            if variant.kwargs and text in variants:
                continue
            variants.add(text)
            given = {"kwargs": variant.kwargs, "seed": seed}
            kind = variant.type or self.id
            found.append(Scenario(f"{self.id}-{seed}", given, splits[len(found)], kind, variant.difficulty))
            if len(found) == len(splits):
                return found
        message = f"gives {len(found)} different scenarios; train and heldout need {len(splits)}"
        raise SpecError([Problem("environment.vary", message)])

    def _made(self, kwargs: dict[str, Any]) -> Any:
        if self.make is not None:
            return self.make(**kwargs)
        known = sorted(self.gymnasium.registry)
        if self.id not in known:
            message = f"there is no environment {self.id!r} in gymnasium; for one of yours give `make`"
            raise SpecError([Problem("environment.id", message, nearest(self.id, known))])
        try:
            return self.gymnasium.make(self.id, max_episode_steps=self.max_steps, disable_env_checker=True, **kwargs)
        except TypeError as error:
            raise SpecError([Problem("environment.kwargs", f"{self.id} does not take {kwargs}: {error}")]) from error

    def _names(self, actions: Sequence[str] | None) -> list[str]:
        """Of discrete actions; none where actions are written as numbers."""
        space, spaces = self.environment.action_space, self.gymnasium.spaces
        if isinstance(space, spaces.Discrete):
            names = [str(name) for name in actions or range(int(space.start), int(space.start + space.n))]
            if len(names) != int(space.n) or len({_plain(name) for name in names}) != len(names):
                message = (
                    f"names {len(names)} actions ({', '.join(names)}); {self.id} has {space.n}, each needs its own"
                )
                raise SpecError([Problem("environment.actions", message)])
            return names
        if not isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
            message = f"actions of {self.id} are {space}; expected discrete ones or an array of numbers"
            raise SpecError([Problem("environment.id", message)])
        if actions:
            message = f"actions of {self.id} are {space}, numbers that have no names; write null"
            raise SpecError([Problem("environment.actions", message)])
        return []

    def _threshold(self) -> float | None:
        spec = getattr(self.environment, "spec", None)
        return None if spec is None or spec.reward_threshold is None else float(spec.reward_threshold)

    def _how(self) -> str:
        if self.names:
            return f"Each turn, one action: {', '.join(self.names)}."
        return f"Each turn, one action: {math.prod(self.environment.action_space.shape)} numbers, such as 0.5, -1."

    def _move(self, action: str) -> Any:
        space = self.environment.action_space
        if self.names:
            for number, name in enumerate(self.names):
                if _plain(action) == _plain(name):
                    return int(space.start) + number
            raise Invalid(f"no action {action[:60]!r}; there are {', '.join(self.names)}")
        size = math.prod(space.shape)
        parts = [part for part in re.split(r"[,\s]+", action[:LONGEST].strip("[]() \n")) if part]
        try:
            numbers = [float(part) for part in parts]
        except ValueError:
            numbers = []
        if len(numbers) != size or not all(math.isfinite(number) for number in numbers):
            raise Invalid(f"an action is {size} numbers")
        numpy = import_optional("numpy", "gym")
        move = numpy.asarray(numbers).reshape(space.shape).astype(space.dtype)
        if not space.contains(move):
            raise Invalid(f"{numbers} is outside {space}")
        return move

    def _shown(self) -> str:
        text = str(self.render(View(self.seen, self.environment)))
        return text if len(text) <= LONGEST else text[:LONGEST] + " … (cut)"


@registered("environment.frozen_lakes")
def frozen_lakes(seed: int, sizes: Sequence[int] = (4, 5, 6, 7, 8)) -> Variant:
    """For `vary`: a frozen lake of its own for each scenario, of these sizes, the easiest first."""
    size = sizes[seed % len(sizes)]
    difficulty = 1 + round(4 * (seed % len(sizes)) / max(1, len(sizes) - 1))
    return Variant({"desc": list(_lake_map(seed, size)), "map_name": None}, f"{size}x{size}", difficulty)


@functools.lru_cache(maxsize=4096)  # a collector makes many environments of the same scenarios
def _lake_map(seed: int, size: int) -> tuple[str, ...]:
    maps = import_optional("gymnasium.envs.toy_text.frozen_lake", "gym")
    return tuple(maps.generate_random_map(size=size, p=0.75, seed=seed))


def general(view: View) -> str:
    """Numbers, arrays, mappings and texts, readably."""
    return _readable(view.observation)


def _readable(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {_readable(one)}" for name, one in value.items())
    if isinstance(value, tuple | list):
        return ", ".join(_readable(one) for one in value)
    array = import_optional("numpy", "gym").asarray(value)
    if array.ndim == 0:
        number = array.item()
        return f"{number:.4g}" if isinstance(number, float) else str(number)
    if array.ndim == 1:
        return " ".join(_readable(one) for one in array[:500])
    return "\n".join(_readable(row) for row in array[:100]) + "\n" * (array.ndim - 2)


def _policy(table: Mapping[int, Mapping[int, Sequence[tuple[float, int, float, bool]]]]) -> dict[int, int]:
    """The best action in each state, by value iteration."""
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


def _grid(rows: Sequence[str], state: int) -> str:
    """With A where the agent is."""
    row, column = divmod(int(state), len(rows[0]))
    marked = [list(line) for line in rows]
    marked[row][column] = "A"
    drawn = "\n".join("".join(line) for line in marked)
    return f"{drawn}\nYou are in row {row + 1}, column {column + 1}."


def _lake(view: View) -> str:
    return _grid([b"".join(row).decode() for row in view.environment.unwrapped.desc], view.observation)


def _cliff(view: View) -> str:
    return _grid(["." * 12] * 3 + ["S" + "C" * 10 + "G"], view.observation)


def _taxi(view: View) -> str:
    row, column, passenger, goal = view.environment.unwrapped.decode(int(view.observation))
    places = [
        f"{name} (row {at[0] + 1}, column {at[1] + 1})"
        for name, at in zip(("Red", "Green", "Yellow", "Blue"), view.environment.unwrapped.locs, strict=True)
    ]
    rows = "\n".join(b"".join(line).decode() for line in view.environment.unwrapped.desc)
    where = "in the taxi" if passenger == 4 else f"at {places[passenger]}"
    return (
        f"{rows}\nThe taxi is in row {row + 1}, column {column + 1}. The passenger is {where} and wants to "
        f"{places[goal]}."
    )


def _cards(view: View) -> str:
    mine, dealer, ace = (int(one) for one in view.observation)
    shown = "an ace" if dealer == 1 else dealer
    return f"Your cards sum to {mine}{' with an ace as 11' if ace else ''}. The dealer shows {shown}."


def _pole(view: View) -> str:
    place, speed, angle, turning = (float(one) for one in view.observation)
    return (
        f"Cart at {place:+.2f} (ends at 2.4), moving {speed:+.2f}. "
        f"Pole at {math.degrees(angle):+.1f} degrees (falls at 12), turning {math.degrees(turning):+.0f} a second. "
        "Plus is right."
    )


KNOWN: dict[str, Known] = {
    "FrozenLake": Known(
        "Cross the lake from S to G (A is you, F is ice, H is a hole: falling in ends it).",
        ("left", "down", "right", "up"),
        1.0,
        _lake,
    ),
    "CliffWalking": Known(
        "Walk from S to G (A is you). C is a cliff: stepping there costs 100 and takes you back to S.",
        ("up", "right", "down", "left"),
        "terminated",
        _cliff,
    ),
    "Taxi": Known(
        "Drive the taxi to the passenger, pick up, drive to where the passenger wants, drop off. | is a wall, : none.",
        ("south", "north", "east", "west", "pick up", "drop off"),
        "terminated",
        _taxi,
    ),
    "Blackjack": Known(
        "Play blackjack: come closer to 21 than the dealer, and not above.", ("stick", "hit"), 1.0, _cards
    ),
    "CartPole": Known("Keep the pole upright by pushing the cart.", ("push left", "push right"), "truncated", _pole),
}
"""By id without version."""
