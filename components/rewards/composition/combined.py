"""Weighted sum or product of several rewards, with prerequisites between them.

    sum       R = Σ weight_i · r_i
    product   R = Π r_i

A part with `needs` counts 0 if one of the needed parts is below its threshold.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal

from pydantic import Field, FiniteFloat

from components.errors import JudgeError, Problem, SpecError
from components.rewards.composition.composed import ComposedPerEpisode, CompositionResult, Parts, total
from components.specs import Spec, nearest
from components.specs.registered import registered
from components.trajectories.schema import Score, Trajectory


class Part(Spec):
    """Part of a combined reward."""

    reward: Any
    """Any reward, including a composition."""
    weight: FiniteFloat = 1.0
    """Weight in a sum. With 0 the part does not count but its value is recorded: for `needs` of other parts, or as a
    cost."""
    needs: dict[str, FiniteFloat] = Field(default_factory=dict)
    """Thresholds by part name: the part counts 0 unless these parts reach these values, before weighting."""
    optional: bool = False
    """Leave the part out if it does not apply (a function of `reward=columns` that returns None). Otherwise the whole
    reward is then unscored."""


@registered("reward.combined")
class Combined(ComposedPerEpisode):
    """Weighted sum or product of named rewards.

    Args:
        parts: By name: `reward`, and how it counts: `weight`, `needs`, `optional`.
        how: `sum` or `product`. A product has no weights.
        ask: `passed` computes a part with `needs` only for the episodes that meet them, which is cheaper; `all`
            computes it for all. With `passed`, a judge that compares a group sees only the episodes that meet them.

    Step rewards of a sum are the sums of the parts' step rewards; a part without step rewards contributes at the last
    step. Step rewards of a product are those of the one part that has any, times the other rewards.
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
        self._specs = parts
        needed = {name for part in parts.values() for name in part.needs}
        if ask == "passed" and (running := sorted(name for name in needed if self.parts[name].settles)):
            message = f"passed: {running[0]} keeps running statistics, so its values are known only after all episodes"
            raise SpecError([Problem("reward.ask", f"{message} are scored; expected all")])

    def phases(self) -> list[list[str]]:
        if self.ask == "all":
            return super().phases()
        order = TopologicalSorter({name: list(part.needs) for name, part in self._specs.items()})
        order.prepare()
        phases = []
        while order.is_active():
            ready = order.get_ready()
            phases.append(sorted(ready, key=list(self._specs).index))
            order.done(*ready)
        return phases

    def applies_to(self, name: str, trajectory: Trajectory, parts: Parts) -> bool:
        return self.ask == "all" or not self._unmet(name, parts)

    def optional(self, name: str) -> bool:
        return self._specs[name].optional

    def value(self, trajectory: Trajectory, parts: Parts) -> CompositionResult:
        counted = dict(parts)
        unmet = {name: reason for name in self._specs if (reason := self._unmet(name, parts))}
        for name in unmet:
            counted[name] = Score(trajectory.id, 0.0)
        in_order = {name: counted[name] for name in self._specs if name in counted}
        if self.how == "product":
            reward, steps = _product(in_order)
        else:
            reward, steps = total((self._specs[name].weight, score) for name, score in in_order.items())
        notes = [f"{name}: does not count, as {reason}" for name, reason in unmet.items()]
        return CompositionResult(reward, steps, explanation="\n".join(notes))

    def _unmet(self, name: str, parts: Parts) -> str:
        """Return the reason why a part does not count; empty if it counts."""
        for other, threshold in self._specs[name].needs.items():
            reward = parts[other].reward if other in parts else None
            if self._specs[other].needs and self._unmet(other, parts):
                return f"{other} does not count"
            if reward is None or reward < threshold:
                status = "says nothing" if reward is None else f"is {reward:g}"
                return f"{other} {status} and {threshold:g} is needed"
        return ""


def _product(parts: Parts) -> tuple[float, list[float]]:
    rewards = {name: score.reward for name, score in parts.items() if score.reward is not None}
    reward = math.prod(rewards.values())
    with_steps = [name for name, score in parts.items() if score.step_rewards]
    if len(with_steps) > 1:
        raise JudgeError(
            f"{' and '.join(with_steps)} give step rewards, and a product takes those of one part; take sum"
        )
    if not with_steps:
        return reward, []
    others = math.prod(value for name, value in rewards.items() if name != with_steps[0])
    return reward, [others * step for step in parts[with_steps[0]].step_rewards]


def _problems(parts: Mapping[str, Part], how: str) -> list[Problem]:
    if not parts:
        return [Problem("reward.parts", "is empty; expected rewards by name, such as {task: {reward: {_target_: …}}}")]
    problems = []
    for name, part in parts.items():
        place = f"reward.parts.{name}"
        if not re.fullmatch(r"[^\W\d][\w-]*", name):
            expected = "expected letters, digits, _ and -, beginning with a letter"
            problems.append(Problem(place, f"{name!r} names no part; {expected}"))
        for other in part.needs:
            if other not in parts or other == name:
                others = sorted({*parts} - {name})
                expected = f"one of {', '.join(others)}" if others else "none: it is the only part"
                message = f"there is no other part {other!r}; expected {expected}"
                problems.append(Problem(f"{place}.needs", message, nearest(other, others)))
        if how == "product" and part.weight != 1:
            message = f"{part.weight:g}: a product has no weights; expected 1, or how: sum"
            problems.append(Problem(f"{place}.weight", message))
    if not any(part.weight for part in parts.values()):
        problems.append(
            Problem("reward.parts", "all weights are 0, so every reward is 0; expected a weight other than 0")
        )
    if not problems:
        try:
            TopologicalSorter({name: list(part.needs) for name, part in parts.items()}).prepare()
        except CycleError as error:
            cycle = " needs ".join(reversed(error.args[1]))
            problems.append(Problem("reward.parts", f"{cycle}: none of them can be computed first"))
    return problems
