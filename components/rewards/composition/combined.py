"""The weighted sum, or the product, of several rewards; some of them only where others were good enough.

    sum       R = Σ weight_i · r_i
    product   R = Π r_i

A part that `needs` others counts 0 where one of them is below the value that is needed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal

from pydantic import Field, FiniteFloat

from components.errors import JudgeError, Problem, SpecError
from components.rewards.composition.composed import ComposedPerEpisode, Parts, Value, total
from components.specs import Spec, nearest
from components.specs.registered import registered
from components.trajectories.schema import Score, Trajectory


class Part(Spec):
    reward: Any
    """Any reward, a composition too."""
    weight: FiniteFloat = 1.0
    """In a sum. With 0 it does not count and is shown all the same: what others need, or a cost."""
    needs: dict[str, FiniteFloat] = Field(default_factory=dict)
    """Counts only where these parts reach these values, before their weights; else 0."""
    optional: bool = False
    """Left out where it says that it has nothing to say (a function of `reward=columns` that returns None). Otherwise
    the whole is then unscored."""


@registered("reward.combined")
class Combined(ComposedPerEpisode):
    """Rewards made into one.

    Args:
        parts: By name: `reward`, and of how it counts `weight`, `needs`, `optional`.
        how: `sum` or `product`. A product has no weights.
        ask: Whether a part that needs others is asked only about the episodes that have `passed`, which is cheaper, or
            about `all`. A judge that compares a group then sees only those that have passed.

    Step rewards of a sum are the sums of those of the parts; a part without any gives its share at the last step. Of a
    product they are those of the one part that has any, times the other rewards.
    """

    def __init__(
        self,
        parts: dict[str, Part],
        how: Literal["sum", "product"] = "sum",
        ask: Literal["passed", "all"] = "passed",
    ):
        if problems := _problems(parts, how):
            raise SpecError(problems)
        super().__init__({name: part.reward for name, part in parts.items()}, "reward.parts")
        self.how = how
        self.ask = ask
        self._told = parts
        needed = {name for part in parts.values() for name in part.needs}
        if ask == "passed" and (late := sorted(name for name in needed if self.parts[name].settles)):
            what = f"passed: {late[0]} keeps running statistics, so what it gives is known only after all were asked"
            raise SpecError([Problem("reward.ask", f"{what}; expected all")])

    def phases(self) -> list[list[str]]:
        if self.ask == "all":
            return super().phases()
        order = TopologicalSorter({name: list(part.needs) for name, part in self._told.items()})
        order.prepare()
        phases = []
        while order.is_active():
            ready = order.get_ready()
            phases.append(sorted(ready, key=list(self._told).index))
            order.done(*ready)
        return phases

    def about(self, name: str, one: Trajectory, parts: Parts) -> bool:
        return self.ask == "all" or not self._lacking(name, parts)

    def optional(self, name: str) -> bool:
        return self._told[name].optional

    def value(self, trajectory: Trajectory, parts: Parts) -> Value:
        counted = dict(parts)
        lacking = {name: why for name in self._told if (why := self._lacking(name, parts))}
        for name in lacking:
            counted[name] = Score(trajectory.id, 0.0)
        in_order = {name: counted[name] for name in self._told if name in counted}
        if self.how == "product":
            reward, steps = _product(in_order)
        else:
            reward, steps = total((self._told[name].weight, score) for name, score in in_order.items())
        said = [f"{name}: does not count, as {why}" for name, why in lacking.items()]
        return Value(reward, steps, explanation="\n".join(said))

    def _lacking(self, name: str, parts: Parts) -> str:
        """What keeps a part from counting; empty where nothing does."""
        for other, least in self._told[name].needs.items():
            reward = parts[other].reward if other in parts else None
            if self._told[other].needs and self._lacking(other, parts):
                return f"{other} does not count"
            if reward is None or reward < least:
                found = "says nothing" if reward is None else f"is {reward:g}"
                return f"{other} {found} and {least:g} is needed"
        return ""


def _product(parts: Parts) -> tuple[float, list[float]]:
    rewards = {name: score.reward for name, score in parts.items() if score.reward is not None}
    reward = math.prod(rewards.values())
    stepping = [name for name, score in parts.items() if score.step_rewards]
    if len(stepping) > 1:
        raise JudgeError(f"{' and '.join(stepping)} give step rewards, and a product takes those of one part; take sum")
    if not stepping:
        return reward, []
    others = math.prod(value for name, value in rewards.items() if name != stepping[0])
    return reward, [others * step for step in parts[stepping[0]].step_rewards]


def _problems(parts: Mapping[str, Part], how: str) -> list[Problem]:
    if not parts:
        return [Problem("reward.parts", "is empty; expected rewards by name, such as {task: {reward: {_target_: …}}}")]
    found = []
    for name, part in parts.items():
        place = f"reward.parts.{name}"
        if not re.fullmatch(r"[^\W\d][\w-]*", name):
            expected = "expected letters, digits, _ and -, beginning with a letter"
            found.append(Problem(place, f"{name!r} names no part; {expected}"))
        for other in part.needs:
            if other not in parts or other == name:
                others = sorted({*parts} - {name})
                expected = f"one of {', '.join(others)}" if others else "none: it is the only part"
                message = f"there is no other part {other!r}; expected {expected}"
                found.append(Problem(f"{place}.needs", message, nearest(other, others)))
        if how == "product" and part.weight != 1:
            message = f"{part.weight:g}: a product has no weights; expected 1, or how: sum"
            found.append(Problem(f"{place}.weight", message))
    if not any(part.weight for part in parts.values()):
        found.append(Problem("reward.parts", "all weights are 0, so every reward is; expected one that counts"))
    if not found:
        try:
            TopologicalSorter({name: list(part.needs) for name, part in parts.items()}).prepare()
        except CycleError as error:
            circle = " needs ".join(reversed(error.args[1]))
            found.append(Problem("reward.parts", f"{circle}: none of them could be asked first"))
    return found
