"""Applies a reward to trajectories.

What a reward does wrong stays with the trajectories it was asked about: where it raises, or returns something that is
no finite number, they are unscored and the Score says why. A failed episode is not shown to the reward; it is unscored
with its own failure. Nothing is ever scored zero because something broke.

A reward made of others (`components.rewards.composition.composed`) asks its parts by the same `Asked`. Where one of
them keeps running statistics, scores are settled here, in the order of the collection, whatever the order in which they
came.

Errors pass through that every trajectory would meet again: SpecError and ResourceError (a missing key, a missing
model), and BudgetSpent, once the judgements that are under way are there. So does cancellation.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

from components.aio import in_order, in_thread
from components.errors import BudgetSpent, JudgeError, Problem, ResourceError, SpecError
from components.rewards.protocol import GroupReward, Reward
from components.trajectories.groups import adjacent_groups
from components.trajectories.schema import Failure, Score, Trajectory

log = logging.getLogger(__name__)

Scored = Iterator[tuple[Trajectory, Score]]
OnJudged = Callable[[Sequence[Score]], object]


def judge(
    reward: Reward | GroupReward,
    trajectories: Iterable[Trajectory],
    *,
    concurrency: int = 1,
    finished: Mapping[str, Score] | None = None,
    on_judged: OnJudged | None = None,
) -> Iterator[Score]:
    """One Score for each trajectory, in order, with one group in memory at a time, or a few for each judgement that is
    under way.

    A reward with `score_group` sees the episodes of a scenario together, failed ones left out; any other reward is
    called with one trajectory at a time. concurrency: judgements under way at once, of a reward that waits (`async`, or
    `blocking`). finished: scores of an earlier try by trajectory id; the reward is not asked for them again, and a
    group not where the scores of all its episodes are there. on_judged is called with the new scores of each
    trajectory, or of each group, always in the same thread.

    Raises SpecError where `reward` is neither; BudgetSpent; ArtifactError where the episodes of a scenario, to be
    judged together, do not lie next to each other.
    """
    known, tell = finished or {}, on_judged or (lambda scores: None)
    asked = RewardCaller(reward)
    units = adjacent_groups(trajectories) if asked.grouped else ([one] for one in trajectories)
    return _warned(_scored(asked, units, concurrency, known, tell))


async def ask(reward: Any, group: Sequence[Trajectory]) -> list[Score]:
    """One Score for each trajectory of a scenario, in order: for a reward that is made of others. As in `judge`, what
    the reward does wrong stays with the trajectories, and failed episodes are not shown to it."""
    asked = RewardCaller(reward)
    shown = [one for one in group if one.failure is None]
    rest = iter(await asked.call_group_async(shown) if asked.waits else asked.call_group(shown))
    return [_failed(one) if one.failure else next(rest) for one in group]


def reject_running_statistics(reward: Any, key: str) -> None:
    """Raises SpecError where a reward that is asked group by group, for another one, would have to be settled."""
    if getattr(reward, "settles", False):
        message = "keeps running statistics, which only the whole collection has; make both parts of reward=combined"
        raise SpecError([Problem(key, message)])


class RewardCaller:
    """A reward, and how it is asked: as a group, or a trajectory; in the main thread, in a thread, or awaited.

    Raises SpecError where `reward` is none.
    """

    def __init__(self, reward: Any, place: str = "reward"):
        """place: the key that names it."""
        self.grouped = isinstance(reward, GroupReward)
        if inspect.isclass(reward) or not (self.grouped or callable(reward)):
            # It was named in a configuration, so it can be anything.
            what = f"{type(reward).__name__} is no reward"
            raise SpecError([Problem(place, f"{what}: expected a callable (trajectory) -> float or a `score_group`")])
        self._ask = reward.score_group if self.grouped else reward
        self._awaited = bool(getattr(reward, "waits", False)) or (
            inspect.iscoroutinefunction(self._ask) or inspect.iscoroutinefunction(type(self._ask).__call__)
        )
        self.waits = self._awaited or bool(getattr(reward, "blocking", False))
        self.settles = bool(getattr(reward, "settles", False))
        self.reward = reward
        self._turn = threading.Lock()

    def call_group(self, group: Sequence[Trajectory]) -> list[Score]:
        """One score for each finished trajectory of a group, of a reward that does not wait."""
        return [score for unit in self._units(group) for score in self.now(unit)]

    async def call_group_async(self, group: Sequence[Trajectory]) -> list[Score]:
        """The same of any reward, without holding up the loop. One that does not wait is asked in a thread, and still
        one judgement after the other."""
        if self.waits:
            return [score for unit in self._units(group) for score in await self.later(unit)]

        def in_turn() -> list[Score]:
            with self._turn:
                return self.call_group(group)

        return list(await in_thread(in_turn))

    def _units(self, group: Sequence[Trajectory]) -> list[list[Trajectory]]:
        if self.grouped:
            return [list(group)] if group else []
        return [[one] for one in group]

    def now(self, shown: Sequence[Trajectory]) -> list[Score]:
        try:
            return self._read(self._ask(*self._given(shown)), shown)
        except (Exception, SystemExit) as error:  # noqa: BLE001  a user's code: whatever it raises is data
            return _broken(shown, error)

    async def later(self, shown: Sequence[Trajectory]) -> list[Score]:
        given = self._given(shown)
        try:
            found = await (self._ask(*given) if self._awaited else in_thread(lambda: self._ask(*given)))
            return self._read(found, shown)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return _broken(shown, error)  # nobody asked for it: the other side broke
        except (Exception, SystemExit) as error:  # noqa: BLE001  as above
            return _broken(shown, error)

    def _given(self, shown: Sequence[Trajectory]) -> Sequence[Any]:
        return [shown] if self.grouped else shown

    def _read(self, found: Any, shown: Sequence[Trajectory]) -> list[Score]:
        if not self.grouped and not isinstance(found, Score):
            return [Score(shown[0].id, number(found, "the reward"))]
        found = found if self.grouped else [found]
        return [_checked(score, one) for score, one in zip(_matched(found, shown), shown, strict=True)]


def _scored(
    asked: RewardCaller,
    units: Iterable[list[Trajectory]],
    concurrency: int,
    finished: Mapping[str, Score],
    on_judged: OnJudged,
) -> Scored:
    """units: trajectories that are judged together."""

    def shown(unit: Sequence[Trajectory]) -> list[Trajectory]:
        return [one for one in unit if one.failure is None]

    def known(unit: Sequence[Trajectory]) -> list[Score] | None:
        scores = [finished[one.id] for one in shown(unit) if one.id in finished]
        return scores if len(scores) == len(shown(unit)) else None

    def told(scores: list[Score]) -> list[Score]:
        on_judged(scores)
        return scores

    spent: list[BudgetSpent] = []

    async def later(unit: list[Trajectory]) -> tuple[list[Trajectory], list[Score]]:
        scores = known(unit)
        if scores is None and not spent:
            try:
                scores = told(await asked.later(shown(unit)))
            except BudgetSpent as error:  # what is under way is paid for, and kept
                spent.append(error)
        return unit, scores or []

    def now(unit: list[Trajectory]) -> tuple[list[Trajectory], list[Score]]:
        scores = known(unit)
        return unit, told(asked.now(shown(unit))) if scores is None else scores

    settling = asked.reward.settling() if asked.settles else None

    def settled(group: list[Trajectory], scores: list[Score]) -> list[Score]:
        if settling is None:
            return scores
        return [_checked(score, one) for score, one in zip(settling(group, scores), group, strict=True)]

    judged = in_order(later, units, concurrency) if asked.waits else map(now, units)
    for unit, scores in judged:
        if spent:
            continue
        rest = iter(settled(shown(unit), scores))
        for one in unit:
            yield one, _failed(one) if one.failure else next(rest)
    if spent:
        raise spent[0]


def _failed(trajectory: Trajectory) -> Score:
    """The score of an episode that failed itself."""
    return Score(trajectory.id, None, failure=trajectory.failure)


def _warned(scored: Scored) -> Iterator[Score]:
    """The scores, and at their end a warning about finished episodes that have none."""
    episodes = unscored = 0
    first = None
    for trajectory, score in scored:
        yield score
        if trajectory.failure is None:
            episodes += 1
            if score.failure is not None:
                unscored += 1
                first = first or score.failure
    if first is not None:
        message = "%d of %d finished episodes could not be scored; the first one: %s: %s"
        log.warning(message, unscored, episodes, first.kind, first.message)


def _matched(scores: Any, group: Sequence[Trajectory]) -> list[Score]:
    """The scores, if there is one for each trajectory in the same order."""
    if not isinstance(scores, Sequence) or not all(isinstance(score, Score) for score in scores):
        raise JudgeError(f"score_group returned {_shown(scores)}, expected a list of Score")
    expected = [trajectory.id for trajectory in group]
    if (found := [score.trajectory_id for score in scores]) != expected:
        raise JudgeError(f"the reward returned scores for {found}, expected {expected}, in this order")
    return list(scores)


def _checked(score: Score, trajectory: Trajectory) -> Score:
    """The score with plain finite floats, or unscored. A score that says itself that it has no reward is kept."""
    try:
        return Score(
            trajectory_id=score.trajectory_id,
            reward=None if score.reward is None else number(score.reward, "the reward"),
            components={name: number(value, f"component '{name}'") for name, value in score.components.items()},
            step_rewards=[number(value, "a step reward") for value in score.step_rewards],
            explanation=score.explanation,
            cost=None if score.cost is None else number(score.cost, "the cost"),
            failure=score.failure or (_no_reason() if score.reward is None else None),
        )
    except JudgeError as error:
        return unscored(trajectory, error)


def number(value: Any, what: str) -> float:
    if not isinstance(value, Real):
        raise JudgeError(f"{what} is {_shown(value)}, expected a number")
    if not math.isfinite(value):
        raise JudgeError(f"{what} is {float(value)}, expected a finite number")
    return float(value)


def _shown(value: Any) -> str:
    return f"{repr(value)[:80]} ({type(value).__name__})"


def _no_reason() -> Failure:
    return Failure(JudgeError.boundary, JudgeError.__name__, "the reward gave no number and no reason")


def _broken(shown: Sequence[Trajectory], error: BaseException) -> list[Score]:
    """What the reward raised; every trajectory would meet a missing key or model again, so that is raised."""
    if isinstance(error, SpecError | ResourceError | BudgetSpent):
        raise error
    return [unscored(one, error) for one in shown]


def unscored(trajectory: Trajectory, error: BaseException) -> Score:
    log.debug("trajectory %s is unscored", trajectory.id, exc_info=error)
    return Score(trajectory.id, None, failure=Failure(JudgeError.boundary, type(error).__name__, str(error)))
