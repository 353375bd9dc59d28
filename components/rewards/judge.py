"""Applies a reward to trajectories.

What a reward does wrong stays with the trajectories it was asked about: where it raises, or returns something that is
no finite number, they are unscored and the Score says why. A failed episode is not shown to the reward; it is unscored
with its own failure. Nothing is ever scored zero because something broke.

Errors pass through that every trajectory would meet again: SpecError and ResourceError (a missing key, a missing
model), and BudgetSpent, once the judgements that are under way are there. So does cancellation.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

from components.errors import BudgetSpent, JudgeError, Problem, ResourceError, SpecError
from components.loops import in_order, in_thread
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
    grouped = isinstance(reward, GroupReward)
    if not grouped and not callable(reward):
        # It was named in a configuration, so it can be anything.
        message = f"{type(reward).__name__} is no reward: expected a callable (trajectory) -> float or a `score_group`"
        raise SpecError([Problem("reward", message)])
    units = adjacent_groups(trajectories) if grouped else ([one] for one in trajectories)
    return _warned(_scored(_Asked(reward), units, concurrency, known, tell))


class _Asked:
    """A reward, and how it is asked: as a group, or a trajectory; in the main thread, in a thread, or awaited."""

    def __init__(self, reward: Any):
        self._grouped = isinstance(reward, GroupReward)
        self._ask = reward.score_group if self._grouped else reward
        self._awaited = inspect.iscoroutinefunction(self._ask) or inspect.iscoroutinefunction(type(self._ask).__call__)
        self.waits = self._awaited or bool(getattr(reward, "blocking", False))

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
        return [shown] if self._grouped else shown

    def _read(self, found: Any, shown: Sequence[Trajectory]) -> list[Score]:
        if not self._grouped:
            return [Score(shown[0].id, _number(found, "the reward"))]
        return [_checked(score, one) for score, one in zip(_matched(found, shown), shown, strict=True)]


def _scored(
    asked: _Asked,
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

    judged = in_order(later, units, concurrency) if asked.waits else map(now, units)
    for unit, scores in judged:
        if spent:
            continue
        rest = iter(scores)
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
        raise JudgeError(f"score_group returned scores for {found}, expected {expected}, in this order")
    return list(scores)


def _checked(score: Score, trajectory: Trajectory) -> Score:
    """The score with plain finite floats, or unscored. A score that says itself that it has no reward is kept."""
    try:
        return Score(
            trajectory_id=score.trajectory_id,
            reward=None if score.reward is None else _number(score.reward, "the reward"),
            components={name: _number(value, f"component '{name}'") for name, value in score.components.items()},
            step_rewards=[_number(value, "a step reward") for value in score.step_rewards],
            explanation=score.explanation,
            cost=None if score.cost is None else _number(score.cost, "the cost"),
            failure=score.failure or (_no_reason() if score.reward is None else None),
        )
    except JudgeError as error:
        return _unscored(trajectory, error)


def _number(value: Any, what: str) -> float:
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
    return [_unscored(one, error) for one in shown]


def _unscored(trajectory: Trajectory, error: BaseException) -> Score:
    log.debug("trajectory %s is unscored", trajectory.id, exc_info=error)
    return Score(trajectory.id, None, failure=Failure(JudgeError.boundary, type(error).__name__, str(error)))
