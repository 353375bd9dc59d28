"""Applies a reward to trajectories.

What a reward does wrong stays with the trajectories it was asked about: where it raises, or returns something that is
no finite number, they are unscored and the Score says why. A failed episode is not shown to the reward; it is unscored
with its own failure. Nothing is ever scored zero because something broke.

Two kinds of error pass through, because every trajectory would meet them again: SpecError and ResourceError (a missing
key, a missing model). So does cancellation.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

from components.errors import JudgeError, Problem, ResourceError, SpecError
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
    finished: Mapping[str, Score] | None = None,
    on_judged: OnJudged | None = None,
) -> Iterator[Score]:
    """One Score for each trajectory, in order, with one group in memory at a time.

    A reward with `score_group` sees the episodes of a scenario together, failed ones left out; any other reward is
    called with one trajectory at a time. finished: scores of an earlier try by trajectory id; the reward is not asked
    for them again, and a group not where the scores of all its episodes are there. on_judged is called with the new
    scores of each trajectory, or of each group.

    Raises SpecError where `reward` is neither; ArtifactError where the episodes of a scenario, to be judged together,
    do not lie next to each other.
    """
    known, tell = finished or {}, on_judged or (lambda scores: None)
    if isinstance(reward, GroupReward):
        return _warned(_by_group(reward, trajectories, known, tell))
    if callable(reward):
        return _warned(_one_by_one(reward, trajectories, known, tell))
    # It was named in a configuration, so it can be anything.
    message = (  # type: ignore[unreachable]
        f"{type(reward).__name__} is no reward: expected a callable (trajectory) -> float or a `score_group`"
    )
    raise SpecError([Problem("reward", message)])


def _by_group(
    reward: GroupReward, trajectories: Iterable[Trajectory], finished: Mapping[str, Score], on_judged: OnJudged
) -> Scored:
    for group in adjacent_groups(trajectories):
        shown = [trajectory for trajectory in group if trajectory.failure is None]
        scores = [finished[trajectory.id] for trajectory in shown if trajectory.id in finished]
        if len(scores) < len(shown):
            scores = _judge_group(reward, shown)
            on_judged(scores)
        rest = iter(scores)
        for trajectory in group:
            yield trajectory, _failed(trajectory) if trajectory.failure else next(rest)


def _one_by_one(
    reward: Reward, trajectories: Iterable[Trajectory], finished: Mapping[str, Score], on_judged: OnJudged
) -> Scored:
    for trajectory in trajectories:
        score = _failed(trajectory) if trajectory.failure else finished.get(trajectory.id)
        if score is None:
            score = _judge_one(reward, trajectory)
            on_judged([score])
        yield trajectory, score


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


def _judge_one(reward: Reward, trajectory: Trajectory) -> Score:
    try:
        return Score(trajectory.id, _number(reward(trajectory), "the reward"))
    except (SpecError, ResourceError):
        raise
    except Exception as error:  # noqa: BLE001  a user's code: whatever it raises is data
        return _unscored(trajectory, error)


def _judge_group(reward: GroupReward, group: Sequence[Trajectory]) -> list[Score]:
    try:
        scores = _matched(reward.score_group(group), group)
    except (SpecError, ResourceError):
        raise
    except Exception as error:  # noqa: BLE001  a user's code: whatever it raises is data
        return [_unscored(trajectory, error) for trajectory in group]
    return [_checked(score, trajectory) for score, trajectory in zip(scores, group, strict=True)]


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
            cost=_number(score.cost, "the cost"),
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


def _unscored(trajectory: Trajectory, error: Exception) -> Score:
    log.debug("trajectory %s is unscored", trajectory.id, exc_info=error)
    return Score(trajectory.id, None, failure=Failure(JudgeError.boundary, type(error).__name__, str(error)))
