"""Base classes of rewards made of other rewards.

A composition names its parts and combines their scores (`value`, or `values` for a group). The rest is common to all:

    reward, step rewards     computed by the composition from those of its parts
    components               the reward of each part under its name, its own components under NAME/…
    explanation              "NAME: …" for each part that gave one
    cost                     the sum; unknown (None) if that of a part is
    failure                  a part without a score leaves the whole unscored, and is named

Parts that wait run concurrently. If a part keeps running statistics, `score_group` packs the scores of the parts into
one Score, and `settling` unpacks them and computes the rewards.

Step rewards keep their sum rule: if they add up to the reward before, they do so after. So a change of the reward as a
whole goes to the last step.
"""

from __future__ import annotations

import asyncio
import copy
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from components.errors import JudgeError
from components.exceptions import is_foreign, log_traceback
from components.rewards.judge import RewardCaller
from components.rewards.protocol import AskingReward, ModelReward, RewardResources
from components.trajectories.schema import Failure, Score, Trajectory

NOT_APPLICABLE = "NotApplicable"
"""Failure kind of a reward that does not apply to an episode."""
STEP = "@step"
"""Key of packed step rewards: NAME/@step/i holds step reward i of a part in an unsettled Score."""

Parts = Mapping[str, Score]


@dataclass
class CompositionResult:
    """Result of a composition for one trajectory."""

    reward: float
    steps: list[float] = field(default_factory=list)
    components: dict[str, float] = field(default_factory=dict)
    """Components in addition to those of the parts."""
    explanation: str = ""
    """Explanation in addition to those of the parts."""


class Composed(ABC):
    """Base class of compositions. parts: rewards by name. A subclass implements `values`."""

    settles_itself = False
    """True if scores of this composition depend on earlier ones."""

    def __init__(self, parts: Mapping[str, Any], place: str = "reward"):
        """Inspect the parts. place: configuration key of the parts, for errors. Raises SpecError if a part is not a
        reward."""
        self.parts = {name: RewardCaller(part, f"{place}.{name}") for name, part in parts.items()}
        self.waits = any(part.waits for part in self.parts.values())
        self.settles = self.settles_itself or any(part.settles for part in self.parts.values())
        # Only a composition with a model-based part has `use` and `close`: their presence marks it as a ModelReward.
        self._model_parts = [part.reward for part in self.parts.values() if isinstance(part.reward, ModelReward)]
        if self._model_parts:
            self.use = self._use
            self.close = self._close

    # Interface of subclasses

    @abstractmethod
    def values(self, group: Sequence[Trajectory], scores: Sequence[Parts]) -> list[CompositionResult | Failure]:
        """Return the results for the trajectories of a group that all parts have scored. scores: for each trajectory,
        the scores of the parts that were called for it, by name, all with a reward."""

    def phases(self) -> list[list[str]]:
        """Return the parts in the order in which they run; the parts of one list run concurrently."""
        return [list(self.parts)]

    def applies_to(self, name: str, trajectory: Trajectory, parts: Parts) -> bool:
        """Return True if a part is to score a trajectory. parts: scores of the earlier phases."""
        return True

    def part_of_episode(self, name: str, trajectory: Trajectory) -> Trajectory:
        """Return what a part sees of a trajectory."""
        return trajectory

    def optional(self, name: str) -> bool:
        """Return True if a part may be left out when it does not apply."""
        return False

    # Calling the parts

    def _use(self, resources: RewardResources) -> None:
        """Pass the resources on to the parts that compute with a model."""
        for part in self._model_parts:
            part.use(resources)

    def _close(self) -> None:
        """Close the parts that hold resources open."""
        for part in self._model_parts:
            if isinstance(part, AskingReward):
                part.close()

    def score_group(self, group: Sequence[Trajectory]) -> list[Score] | Awaitable[list[Score]]:
        """Return one score for each trajectory of a scenario."""
        if self.waits:
            return self._score_async(group)
        scores: list[dict[str, Score]] = [{} for _ in group]
        for names in self.phases():
            for name, places in self._selected(names, group, scores):
                episodes = [self.part_of_episode(name, group[place]) for place in places]
                _insert(name, self.parts[name].call_group(episodes), places, scores)
        return self._packed_or_combined(group, scores)

    async def _score_async(self, group: Sequence[Trajectory]) -> list[Score]:
        scores: list[dict[str, Score]] = [{} for _ in group]
        for names in self.phases():
            selected = self._selected(names, group, scores)
            work = [
                self.parts[name].call_group_async([self.part_of_episode(name, group[place]) for place in places])
                for name, places in selected
            ]
            results = await asyncio.gather(*work, return_exceptions=True)  # wait for all, also if one raises
            for (name, places), result in zip(selected, results, strict=True):
                if isinstance(result, BaseException):
                    raise result
                _insert(name, result, places, scores)
        return self._packed_or_combined(group, scores)

    def _selected(
        self, names: Iterable[str], group: Sequence[Trajectory], scores: Sequence[Parts]
    ) -> list[tuple[str, list[int]]]:
        """Return the parts, each with the indices in the group of the trajectories that it is to score."""
        return [
            (name, [i for i, trajectory in enumerate(group) if self.applies_to(name, trajectory, scores[i])])
            for name in names
        ]

    def _packed_or_combined(self, group: Sequence[Trajectory], scores: Sequence[Parts]) -> list[Score]:
        if not self.settles:
            return self._combine(group, scores)
        return [self._pack(trajectory, parts) for trajectory, parts in zip(group, scores, strict=True)]

    # Combining the scores of the parts

    def _combine(self, group: Sequence[Trajectory], scores: Sequence[Parts]) -> list[Score]:
        """Return the scores of the whole."""
        failures = [self._failure(parts) for parts in scores]
        scorable = [i for i, failure in enumerate(failures) if failure is None]
        counted = [{name: score for name, score in scores[i].items() if score.reward is not None} for i in scorable]
        values = dict(zip(scorable, self.values([group[i] for i in scorable], counted), strict=True))
        return [
            _whole(trajectory, parts, values.get(i) or failures[i])
            for i, (trajectory, parts) in enumerate(zip(group, scores, strict=True))
        ]

    def _failure(self, parts: Parts) -> Failure | None:
        """Return the failure of the whole; None if it can be scored."""
        for name, score in parts.items():
            if score.reward is None and not (self.optional(name) and _not_applicable(score)):
                return _prefixed(name, score.failure)
        if self.parts and not any(score.reward is not None for score in parts.values()):
            return Failure(JudgeError.boundary, NOT_APPLICABLE, "no part has anything to say of this episode")
        return None

    def _pack(self, trajectory: Trajectory, parts: Parts) -> Score:
        """Return the scores of the parts packed into one Score, for `settling`."""
        if (failure := self._failure(parts)) is not None:
            return _whole(trajectory, parts, failure)
        packed = _components(parts)
        for name, score in parts.items():
            packed |= {f"{name}/{STEP}/{i}": step for i, step in enumerate(score.step_rewards)}
        return replace(_whole(trajectory, parts, CompositionResult(0.0)), components=packed)

    def settling(self) -> Callable[[Sequence[Trajectory], Sequence[Score]], list[Score]]:
        """Return a settling function with fresh statistics: it computes the scores of a group from its packed
        scores."""
        fresh = self.with_fresh_statistics()
        settle_parts = {name: part.reward.settling() for name, part in self.parts.items() if part.settles}

        def settle(group: Sequence[Trajectory], packed: Sequence[Score]) -> list[Score]:
            scorable = [i for i, score in enumerate(packed) if score.reward is not None]
            scores = [
                {name: score for name in fresh.parts if (score := _unpack(name, packed[i])) is not None}
                for i in scorable
            ]
            for name, settle_part in settle_parts.items():
                places = [i for i, parts in enumerate(scores) if name in parts and parts[name].reward is not None]
                trajectories = [self.part_of_episode(name, group[scorable[i]]) for i in places]
                _insert(name, settle_part(trajectories, [scores[i][name] for i in places]), places, scores)
            combined = iter(fresh._combine([group[i] for i in scorable], scores))
            return [
                _with_explanation_and_cost(score, next(combined)) if score.reward is not None else score
                for score in packed
            ]

        return settle

    def with_fresh_statistics(self) -> Composed:
        """Return a copy with fresh statistics, if it keeps any."""
        return copy.copy(self)


class ComposedPerEpisode(Composed):
    """Base class of compositions that score each trajectory by itself."""

    @abstractmethod
    def value(self, trajectory: Trajectory, parts: Parts) -> CompositionResult:
        """Return the result for one trajectory. parts: scores by name, all with a reward, of the parts that scored
        it."""

    def values(self, group: Sequence[Trajectory], scores: Sequence[Parts]) -> list[CompositionResult | Failure]:
        return [_guarded(self.value, trajectory, parts) for trajectory, parts in zip(group, scores, strict=True)]


def total(rewards: Iterable[tuple[float, Score]]) -> tuple[float, list[float]]:
    """Return Σ weight · reward, and the same for the step rewards. A part without step rewards contributes at the last
    step. Raises JudgeError if parts differ in their number of steps."""
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


def replace_reward(score: Score, reward: float) -> CompositionResult:
    """Return the score with another reward; the difference goes to the last step."""
    assert score.reward is not None
    steps = list(score.step_rewards)
    if steps:
        steps[-1] += reward - score.reward
    return CompositionResult(reward, steps)


def required_step_rewards(score: Score, purpose: str) -> list[float]:
    """Return the step rewards of a score. Raises JudgeError if it has none. what: the consumer that needs them, for the
    message."""
    if not score.step_rewards:
        raise JudgeError(f"{purpose} needs step rewards, and this reward gave none")
    return score.step_rewards


def not_applicable(trajectory: Trajectory, reason: str) -> Score:
    """Return the Score of a reward that does not apply to an episode."""
    return Score(trajectory.id, None, failure=Failure(JudgeError.boundary, NOT_APPLICABLE, reason))


def _not_applicable(score: Score) -> bool:
    return score.failure is not None and score.failure.kind == NOT_APPLICABLE


def _guarded(
    work: Callable[[Trajectory, Parts], CompositionResult], trajectory: Trajectory, parts: Parts
) -> CompositionResult | Failure:
    try:
        return work(trajectory, parts)
    except BaseException as error:
        if not is_foreign(error):
            raise
        log_traceback(error)
        return Failure.of(error, JudgeError.boundary)


def _insert(name: str, part_scores: Sequence[Score], places: Sequence[int], scores: Sequence[dict[str, Score]]) -> None:
    """Add the scores of a part to those of the other parts."""
    for place, score in zip(places, part_scores, strict=True):
        scores[place][name] = score


def _unpack(name: str, packed: Score) -> Score | None:
    """Return the score of a part from a packed Score; None if the part did not score it or does not apply."""
    if name not in packed.components:
        return None
    components = {key[len(name) + 1 :]: value for key, value in packed.components.items() if key.startswith(f"{name}/")}
    steps = {key: components.pop(key) for key in list(components) if key.startswith(f"{STEP}/")}
    by_turn = [steps[f"{STEP}/{i}"] for i in range(len(steps))]
    return Score(packed.trajectory_id, packed.components[name], components, by_turn)


def _components(parts: Parts) -> dict[str, float]:
    components = {}
    for name, score in parts.items():
        if score.reward is not None:
            components[name] = score.reward
        components |= {f"{name}/{key}": value for key, value in score.components.items()}
    return components


def _whole(trajectory: Trajectory, parts: Parts, value: CompositionResult | Failure | None) -> Score:
    """Return the Score of the whole, or its failure; explanations and cost of the parts are kept in both cases."""
    assert value is not None
    explanations = [f"{name}: {score.explanation}" for name, score in parts.items() if score.explanation]
    costs = [score.cost for score in parts.values()]
    score = Score(
        trajectory.id,
        None,
        components=_components(parts),
        explanation="\n".join(explanations),
        cost=None if None in costs else sum(cost for cost in costs if cost is not None),
    )
    if isinstance(value, Failure):
        return replace(score, failure=value)
    return replace(
        score,
        reward=value.reward,
        components={**score.components, **value.components},
        step_rewards=value.steps,
        explanation="\n".join([*explanations, *([value.explanation] if value.explanation else [])]),
    )


def _with_explanation_and_cost(packed: Score, settled: Score) -> Score:
    """Return the settled Score with the explanations and the cost of the packed one."""
    explanations = [text for text in (packed.explanation, settled.explanation) if text]
    return replace(settled, explanation="\n".join(explanations), cost=packed.cost)


def _prefixed(name: str, failure: Failure | None) -> Failure:
    assert failure is not None
    return replace(failure, message=f"{name}: {failure.message}")
