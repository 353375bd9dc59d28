"""Rewards that are made of other rewards.

A composition names its parts and says what it makes of their scores (`value`, or `values` for a group). The rest is
the same for all and stands here:

    reward, step rewards     what the composition makes of those of its parts
    components               the reward of each part under its name, its own components under NAME/…
    explanation              "NAME: …" for each part that gave one
    cost                     the sum; unknown (None) where that of a part is
    failure                  a part that could not score leaves the whole unscored, and is named

Parts that wait are asked at once, beside each other. Where a part keeps running statistics, `score_group` gives the
scores of the parts laid into one Score, and `settling` takes them out again and makes the rewards of them.

One rule for step rewards: with them, they add up to what they did, so what changes a reward as a whole falls to the
last one.
"""

from __future__ import annotations

import asyncio
import copy
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from components.errors import JudgeError, ResourceError, SpecError
from components.rewards.judge import RewardCaller
from components.rewards.protocol import AskingReward, Means, ModelReward
from components.trajectories.schema import Failure, Score, Trajectory

NOT_APPLICABLE = "NotApplicable"
"""Kind of the failure of a reward that says that it has nothing to say of an episode."""
STEP = "@step"
"""Under NAME/@step/i, a Score that waits to be settled keeps step reward i of a part."""

Parts = Mapping[str, Score]


@dataclass
class Value:
    """What a composition makes of one trajectory."""

    reward: float
    steps: list[float] = field(default_factory=list)
    components: dict[str, float] = field(default_factory=dict)
    """Beside those of the parts."""
    explanation: str = ""
    """Beside those of the parts."""


class Composed(ABC):
    """parts: rewards by name. A subclass has `value`, or `values`."""

    settles_itself = False
    """Whether the scores of this composition depend on those before."""

    def __init__(self, parts: Mapping[str, Any], place: str = "reward"):
        """place: key below which the parts lie, for errors. Raises SpecError where one is no reward."""
        self.parts = {name: RewardCaller(part, f"{place}.{name}") for name, part in parts.items()}
        self.waits = any(part.waits for part in self.parts.values())
        self.settles = self.settles_itself or any(part.settles for part in self.parts.values())
        # Of plain rewards it computes with no model, and says so by having no such method.
        self._computing = [part.reward for part in self.parts.values() if isinstance(part.reward, ModelReward)]
        if self._computing:
            self.use = self._use
            self.close = self._close

    # What a composition says

    @abstractmethod
    def values(self, group: Sequence[Trajectory], scores: Sequence[Parts]) -> list[Value | Failure]:
        """Of the trajectories of a group that all parts have scored. scores: of each, those of the parts that were
        asked about it by name, all with a reward."""

    def phases(self) -> list[list[str]]:
        """The parts in the order in which they are asked: those of one list beside each other."""
        return [list(self.parts)]

    def about(self, name: str, one: Trajectory, parts: Parts) -> bool:
        """Whether a part is asked about a trajectory. parts: what the phases before gave."""
        return True

    def optional(self, name: str) -> bool:
        """Whether a part may have nothing to say."""
        return False

    # How it is asked

    def _use(self, means: Means) -> None:
        """Hands on to its parts what they compute with."""
        for part in self._computing:
            part.use(means)

    def _close(self) -> None:
        """Hands on that there is nothing more to ask."""
        for part in self._computing:
            if isinstance(part, AskingReward):
                part.close()

    def score_group(self, group: Sequence[Trajectory]) -> list[Score] | Awaitable[list[Score]]:
        """One score for each trajectory of a scenario."""
        if self.waits:
            return self._later(group)
        scores: list[dict[str, Score]] = [{} for _ in group]
        for names in self.phases():
            for name, shown in self._asked_about(names, group, scores):
                _laid(name, self.parts[name].call_group([group[place] for place in shown]), shown, scores)
        return self._ended(group, scores)

    async def _later(self, group: Sequence[Trajectory]) -> list[Score]:
        scores: list[dict[str, Score]] = [{} for _ in group]
        for names in self.phases():
            asked = self._asked_about(names, group, scores)
            work = [self.parts[name].call_group_async([group[place] for place in shown]) for name, shown in asked]
            found = await asyncio.gather(*work, return_exceptions=True)  # none goes on alone where another raises
            for (name, shown), given in zip(asked, found, strict=True):
                if isinstance(given, BaseException):
                    raise given
                _laid(name, given, shown, scores)
        return self._ended(group, scores)

    def _asked_about(
        self, names: Iterable[str], group: Sequence[Trajectory], scores: Sequence[Parts]
    ) -> list[tuple[str, list[int]]]:
        """Parts, and the places in the group that each is asked about."""
        return [(name, [i for i, one in enumerate(group) if self.about(name, one, scores[i])]) for name in names]

    def _ended(self, group: Sequence[Trajectory], scores: Sequence[Parts]) -> list[Score]:
        if not self.settles:
            return self._made(group, scores)
        return [self._unsettled(one, parts) for one, parts in zip(group, scores, strict=True)]

    # What becomes of the scores of the parts

    def _made(self, group: Sequence[Trajectory], scores: Sequence[Parts]) -> list[Score]:
        """The scores of the whole."""
        broken = [self._broken(parts) for parts in scores]
        left = [i for i, failure in enumerate(broken) if failure is None]
        counted = [{name: one for name, one in scores[i].items() if one.reward is not None} for i in left]
        values = dict(zip(left, self.values([group[i] for i in left], counted), strict=True))
        return [
            _score(one, parts, values.get(i) or broken[i])
            for i, (one, parts) in enumerate(zip(group, scores, strict=True))
        ]

    def _broken(self, parts: Parts) -> Failure | None:
        """Why the whole cannot be scored."""
        for name, score in parts.items():
            if score.reward is None and not (self.optional(name) and _not_applicable(score)):
                return _named(name, score.failure)
        if self.parts and not any(score.reward is not None for score in parts.values()):
            return Failure(JudgeError.boundary, NOT_APPLICABLE, "no part has anything to say of this episode")
        return None

    def _unsettled(self, one: Trajectory, parts: Parts) -> Score:
        """The scores of the parts as one, to be taken out by `settling`."""
        if (broken := self._broken(parts)) is not None:
            return _score(one, parts, broken)
        laid = _components(parts)
        for name, score in parts.items():
            laid |= {f"{name}/{STEP}/{i}": step for i, step in enumerate(score.step_rewards)}
        return replace(_score(one, parts, Value(0.0)), components=laid)

    def settling(self) -> Callable[[Sequence[Trajectory], Sequence[Score]], list[Score]]:
        """Begins anew: what makes the scores of a group of what `score_group` has laid together."""
        own = self.with_fresh_statistics()
        below = {name: part.reward.settling() for name, part in self.parts.items() if part.settles}

        def settle(group: Sequence[Trajectory], kept: Sequence[Score]) -> list[Score]:
            left = [i for i, score in enumerate(kept) if score.reward is not None]
            scores = [{name: out for name in own.parts if (out := _taken(name, kept[i])) is not None} for i in left]
            for name, settled in below.items():
                having = [i for i, parts in enumerate(scores) if name in parts and parts[name].reward is not None]
                shown = [group[left[i]] for i in having]
                _laid(name, settled(shown, [scores[i][name] for i in having]), having, scores)
            made = iter(own._made([group[i] for i in left], scores))
            return [_told(score, next(made)) if score.reward is not None else score for score in kept]

        return settle

    def with_fresh_statistics(self) -> Composed:
        """Itself, with statistics of its own where it keeps any."""
        return copy.copy(self)


class ComposedPerEpisode(Composed):
    """What a trajectory is worth depends on its own scores alone."""

    @abstractmethod
    def value(self, trajectory: Trajectory, parts: Parts) -> Value:
        """Of one trajectory. parts: scores by name, all with a reward, of those parts that were asked about it."""

    def values(self, group: Sequence[Trajectory], scores: Sequence[Parts]) -> list[Value | Failure]:
        return [_tried(self.value, one, parts) for one, parts in zip(group, scores, strict=True)]


def total(rewards: Iterable[tuple[float, Score]]) -> tuple[float, list[float]]:
    """Σ weight · reward, and the same of the step rewards. What a part without any gives falls to the last step. Raises
    JudgeError where parts differ in the number of their steps."""
    counted = [(weight, score) for weight, score in rewards if weight]
    reward = sum(weight * score.reward for weight, score in counted if score.reward is not None)
    lengths = {len(score.step_rewards) for _, score in counted if score.step_rewards}
    if not lengths:
        return reward, []
    if len(lengths) > 1:
        raise JudgeError(
            f"the parts give {' and '.join(map(str, sorted(lengths)))} step rewards; expected as many each"
        )
    steps = [0.0] * lengths.pop()
    for weight, score in counted:
        if score.step_rewards:
            steps = [step + weight * own for step, own in zip(steps, score.step_rewards, strict=True)]
        else:
            assert score.reward is not None
            steps[-1] += weight * score.reward
    return reward, steps


def replace_reward(score: Score, reward: float) -> Value:
    """Another reward in place of the score's; the difference falls to the last step."""
    assert score.reward is not None
    steps = list(score.step_rewards)
    if steps:
        steps[-1] += reward - score.reward
    return Value(reward, steps)


def required_step_rewards(score: Score, what: str) -> list[float]:
    """The step rewards of a score. Raises JudgeError where it has none. what: needs them."""
    if not score.step_rewards:
        raise JudgeError(f"{what} needs step rewards, and this reward gave none")
    return score.step_rewards


def not_applicable(trajectory: Trajectory, why: str) -> Score:
    """The score of a reward that has nothing to say of an episode."""
    return Score(trajectory.id, None, failure=Failure(JudgeError.boundary, NOT_APPLICABLE, why))


def _not_applicable(score: Score) -> bool:
    return score.failure is not None and score.failure.kind == NOT_APPLICABLE


def _tried(work: Callable[..., Value], one: Trajectory, parts: Parts) -> Value | Failure:
    try:
        return work(one, parts)
    except (SpecError, ResourceError):
        raise
    except Exception as error:  # noqa: BLE001  a user's function may be in it: whatever it raises is data
        return Failure(JudgeError.boundary, type(error).__name__, str(error))


def _laid(name: str, given: Sequence[Score], places: Sequence[int], scores: Sequence[dict[str, Score]]) -> None:
    """Puts the scores of a part to those of the others."""
    for place, score in zip(places, given, strict=True):
        scores[place][name] = score


def _taken(name: str, kept: Score) -> Score | None:
    """The score of a part, of what was laid together; None where it was not asked, or has nothing to say."""
    if name not in kept.components:
        return None
    below = {key[len(name) + 1 :]: value for key, value in kept.components.items() if key.startswith(f"{name}/")}
    steps = {key: below.pop(key) for key in list(below) if key.startswith(f"{STEP}/")}
    by_turn = [steps[f"{STEP}/{i}"] for i in range(len(steps))]
    return Score(kept.trajectory_id, kept.components[name], below, by_turn)


def _components(parts: Parts) -> dict[str, float]:
    found = {}
    for name, score in parts.items():
        if score.reward is not None:
            found[name] = score.reward
        found |= {f"{name}/{key}": value for key, value in score.components.items()}
    return found


def _score(one: Trajectory, parts: Parts, value: Value | Failure | None) -> Score:
    """A whole, or why there is none; what was said and paid stays either way."""
    assert value is not None
    said = [f"{name}: {score.explanation}" for name, score in parts.items() if score.explanation]
    costs = [score.cost for score in parts.values()]
    score = Score(
        one.id,
        None,
        components=_components(parts),
        explanation="\n".join(said),
        cost=None if None in costs else sum(cost for cost in costs if cost is not None),
    )
    if isinstance(value, Failure):
        return replace(score, failure=value)
    return replace(
        score,
        reward=value.reward,
        components={**score.components, **value.components},
        step_rewards=value.steps,
        explanation="\n".join([*said, *([value.explanation] if value.explanation else [])]),
    )


def _told(kept: Score, settled: Score) -> Score:
    """What was said and paid when it was asked stays."""
    said = [text for text in (kept.explanation, settled.explanation) if text]
    return replace(settled, explanation="\n".join(said), cost=kept.cost)


def _named(name: str, failure: Failure | None) -> Failure:
    assert failure is not None
    return replace(failure, message=f"{name}: {failure.message}")
