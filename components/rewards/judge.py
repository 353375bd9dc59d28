"""Application of a reward to trajectories.

An error of a reward affects only the trajectories it was called with: if it raises, or returns something that is not a
finite number, they are unscored and the Score states the reason. A failed episode is not shown to the reward; it is
unscored with its own failure. A failure never becomes a score of zero.

A composed reward (`components.rewards.composition.composed`) calls its parts through the same `RewardCaller`. If a part
keeps running statistics, scores are settled here in the order of the collection, whatever order they arrive in.

Errors that every trajectory would meet propagate: SpecError and ResourceError (a missing key, a missing model), and
BudgetExceeded after the judgements under way have finished. Cancellation propagates, too.
"""

from __future__ import annotations

import inspect
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

from components.aio import in_order, in_thread
from components.errors import BudgetExceeded, JudgeError, Problem, SpecError
from components.exceptions import is_foreign, log_traceback
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
    """Yield one Score for each trajectory, in order, with one group in memory at a time, or a few for each concurrent
    judgement.

    A reward with `score_group` receives the episodes of a scenario together, without failed ones; any other reward is
    called with one trajectory at a time. concurrency: maximum number of concurrent judgements of a reward that waits
    (`async`, or `blocking`). finished: scores of an earlier, interrupted run by trajectory id; the reward is not called
    for these trajectories, nor for a group whose episodes all have one. on_judged is called with the new scores of each
    trajectory, or of each group, always in the same thread.

    Raises SpecError if `reward` is neither form of a reward; BudgetExceeded; ArtifactError if the episodes of a
    scenario that are judged together are not adjacent.
    """
    finished_scores, report = finished or {}, on_judged or (lambda scores: None)
    caller = RewardCaller(reward)
    units = adjacent_groups(trajectories) if caller.grouped else ([trajectory] for trajectory in trajectories)
    return _with_warning(_scored(caller, units, concurrency, finished_scores, report))


async def ask(reward: Any, group: Sequence[Trajectory]) -> list[Score]:
    """Return one Score for each trajectory of a scenario, in order, on behalf of a composed reward. As in `judge`,
    errors of the reward leave trajectories unscored, and failed episodes are not shown to it."""
    caller = RewardCaller(reward)
    finished = [trajectory for trajectory in group if trajectory.failure is None]
    scores = iter(await caller.call_group_async(finished) if caller.waits else caller.call_group(finished))
    return [_failed(trajectory) if trajectory.failure else next(scores) for trajectory in group]


def reject_running_statistics(reward: Any, key: str) -> None:
    """Raise SpecError if a reward that another reward calls group by group needs settling."""
    if getattr(reward, "settles", False):
        message = "keeps running statistics over the whole collection; make both parts of reward=combined"
        raise SpecError([Problem(key, message)])


class RewardCaller:
    """Uniform interface to a reward: by group or by trajectory; in the main thread, in a worker thread, or awaited.

    Raises SpecError if the object is not a reward.
    """

    def __init__(self, reward: Any, place: str = "reward"):
        """Inspect the reward. place: the configuration key that names it."""
        self.grouped = isinstance(reward, GroupReward)
        if inspect.isclass(reward) or not (self.grouped or callable(reward)):
            # The object comes from a configuration, so it can be anything.
            message = f"{type(reward).__name__} is no reward"
            raise SpecError(
                [Problem(place, f"{message}: expected a callable (trajectory) -> float or a `score_group`")]
            )
        self._ask = reward.score_group if self.grouped else reward
        self._awaited = bool(getattr(reward, "waits", False)) or (
            inspect.iscoroutinefunction(self._ask) or inspect.iscoroutinefunction(type(self._ask).__call__)
        )
        self.waits = self._awaited or bool(getattr(reward, "blocking", False))
        self.settles = bool(getattr(reward, "settles", False))
        self.reward = reward
        self._lock = threading.Lock()

    def call_group(self, group: Sequence[Trajectory]) -> list[Score]:
        """Return one score for each finished trajectory of a group, from a reward that does not wait."""
        return [score for unit in self._units(group) for score in self.call(unit)]

    async def call_group_async(self, group: Sequence[Trajectory]) -> list[Score]:
        """Return the same for any reward, without blocking the event loop. A reward that does not wait is called in a
        thread, still one judgement at a time."""
        if self.waits:
            return [score for unit in self._units(group) for score in await self.call_async(unit)]

        def call_sequentially() -> list[Score]:
            with self._lock:
                return self.call_group(group)

        return list(await in_thread(call_sequentially))

    def _units(self, group: Sequence[Trajectory]) -> list[list[Trajectory]]:
        if self.grouped:
            return [list(group)] if group else []
        return [[trajectory] for trajectory in group]

    def call(self, unit: Sequence[Trajectory]) -> list[Score]:
        """Return the scores of trajectories that are judged together."""
        try:
            return self._read(self._ask(*self._arguments(unit)), unit)
        except BaseException as error:
            if not is_foreign(error, BudgetExceeded):
                raise
            return [unscored(trajectory, error) for trajectory in unit]

    async def call_async(self, unit: Sequence[Trajectory]) -> list[Score]:
        """Return the scores of trajectories that are judged together."""
        arguments = self._arguments(unit)
        try:
            result = await (self._ask(*arguments) if self._awaited else in_thread(lambda: self._ask(*arguments)))
            return self._read(result, unit)
        except BaseException as error:
            if not is_foreign(error, BudgetExceeded):
                raise
            return [unscored(trajectory, error) for trajectory in unit]

    def _arguments(self, unit: Sequence[Trajectory]) -> Sequence[Any]:
        return [unit] if self.grouped else unit

    def _read(self, result: Any, unit: Sequence[Trajectory]) -> list[Score]:
        if not self.grouped and not isinstance(result, Score):
            return [Score(unit[0].id, number(result, "the reward"))]
        result = result if self.grouped else [result]
        return [_checked(score, trajectory) for score, trajectory in zip(_matched(result, unit), unit, strict=True)]


def _scored(
    caller: RewardCaller,
    units: Iterable[list[Trajectory]],
    concurrency: int,
    finished: Mapping[str, Score],
    on_judged: OnJudged,
) -> Scored:
    """Yield each trajectory with its score, in order. units: trajectories that are judged together."""

    def judgeable(unit: Sequence[Trajectory]) -> list[Trajectory]:
        return [trajectory for trajectory in unit if trajectory.failure is None]

    def finished_scores(unit: Sequence[Trajectory]) -> list[Score] | None:
        scores = [finished[trajectory.id] for trajectory in judgeable(unit) if trajectory.id in finished]
        return scores if len(scores) == len(judgeable(unit)) else None

    def report(scores: list[Score]) -> list[Score]:
        on_judged(scores)
        return scores

    budget_errors: list[BudgetExceeded] = []

    async def judge_async(unit: list[Trajectory]) -> tuple[list[Trajectory], list[Score]]:
        scores = finished_scores(unit)
        if scores is None and not budget_errors:
            try:
                scores = report(await caller.call_async(judgeable(unit)))
            except (
                BudgetExceeded
            ) as error:  # judgements under way are paid for, so they finish and their scores are kept
                budget_errors.append(error)
        return unit, scores or []

    def judge_now(unit: list[Trajectory]) -> tuple[list[Trajectory], list[Score]]:
        scores = finished_scores(unit)
        return unit, report(caller.call(judgeable(unit))) if scores is None else scores

    settling = caller.reward.settling() if caller.settles else None

    def settle(group: list[Trajectory], scores: list[Score]) -> list[Score]:
        if settling is None:
            return scores
        return [_checked(score, trajectory) for score, trajectory in zip(settling(group, scores), group, strict=True)]

    judged = in_order(judge_async, units, concurrency) if caller.waits else map(judge_now, units)
    for unit, scores in judged:
        if budget_errors:
            continue
        settled_scores = iter(settle(judgeable(unit), scores))
        for trajectory in unit:
            yield trajectory, _failed(trajectory) if trajectory.failure else next(settled_scores)
    if budget_errors:
        raise budget_errors[0]


def _failed(trajectory: Trajectory) -> Score:
    """Return the score of a failed episode: unscored, with the episode's own failure."""
    return Score(trajectory.id, None, failure=trajectory.failure)


def _with_warning(scored: Scored) -> Iterator[Score]:
    """Yield the scores, then warn about finished episodes without a score."""
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
        message = "%d of %d finished episodes could not be scored; first failure: %s: %s"
        log.warning(message, unscored, episodes, first.kind, first.message)


def _matched(scores: Any, group: Sequence[Trajectory]) -> list[Score]:
    """Return the scores if there is one for each trajectory, in the same order. Raises JudgeError otherwise."""
    if not isinstance(scores, Sequence) or not all(isinstance(score, Score) for score in scores):
        raise JudgeError(f"score_group returned {_described(scores)}, expected a list of Score")
    expected = [trajectory.id for trajectory in group]
    if (ids := [score.trajectory_id for score in scores]) != expected:
        raise JudgeError(f"the reward returned scores for {ids}, expected {expected}, in this order")
    return list(scores)


def _checked(score: Score, trajectory: Trajectory) -> Score:
    """Return the score with plain finite floats, or an unscored one. A score that declares itself unscored stays so."""
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


def number(value: Any, name: str) -> float:
    """Return the value as a finite float. Raises JudgeError otherwise. name: what the message calls the value."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # a scalar of NumPy, also of bool, or a tensor
        value = value.item()
    if not isinstance(value, Real):
        raise JudgeError(f"{name} is {_described(value)}, expected a number")
    if not math.isfinite(value):
        raise JudgeError(f"{name} is {float(value)}, expected a finite number")
    return float(value)


def _described(value: Any) -> str:
    return f"{repr(value)[:80]} ({type(value).__name__})"


def _no_reason() -> Failure:
    return Failure(JudgeError.boundary, JudgeError.__name__, "the reward gave no number and no reason")


def unscored(trajectory: Trajectory, error: BaseException) -> Score:
    """Return an unscored Score whose failure is the error."""
    log_traceback(error)
    return Score(trajectory.id, None, failure=Failure.of(error, JudgeError.boundary))
