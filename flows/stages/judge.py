"""Judge: a reward for each trajectory, from file to file. Finished judgements are kept when the stage dies.

With `learned`, reward models judge, the artifacts of the inputs `reward_model`, `reward_model_2` and so on; the
declared reward is asked only where it has a weight.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from components.artifacts import Draft
from components.errors import JudgeError, Problem, SpecError
from components.models.spec import ModelSpec
from components.rewards.protocol import GroupReward, ModelReward, Reward
from components.rewards.spec import JudgeSpec, LearnedSpec
from components.specs import Target
from components.trajectories.schema import SCHEMA_VERSION, Failure, Score, Trajectory
from flows.stages.base import Context, Inputs, Stage, StageSpec, base_model, followed
from flows.stages.shards import Shards

log = logging.getLogger(__name__)

T = TypeVar("T")


class JudgeStage(StageSpec):
    reward: Target
    model: ModelSpec | None = None
    """Whose episodes are judged; needed by rewards that compute with a model, and of their keys only."""
    learned: LearnedSpec | None = None
    """None judges by the declared reward alone."""
    judge: JudgeSpec = JudgeSpec()
    """How fast; in no key."""

    def key_part(self) -> dict[str, Any]:
        if self.learned is None:
            part = {"reward": self.reward.resolved()}
            computes = hasattr(self.reward.factory(), "use") and self.model is not None
            return {**part, "model": base_model(self.model)} if computes and self.model else part
        learned: dict[str, Any] = {"learned": self.learned.model_dump(mode="json")}
        if self.model is not None:
            learned["model"] = base_model(self.model)
        return {"reward": self.reward.resolved(), **learned} if self.learned.task_weight else learned

    def build(self, inputs: Inputs) -> Reward | GroupReward:
        """The reward that judges."""
        if self.learned is None:
            return self.reward.build()
        from components.rewards.learned import Learned

        folders = [str(inputs[name].path) for name in sorted(inputs, key=_number) if name.startswith(REWARD_MODEL)]
        task = self.reward.build() if self.learned.task_weight else None
        return Learned(folders, task=task, **self.learned.model_dump())


REWARD_MODEL = "reward_model"
"""Input of the first reward model; the others have their number at the end."""


def reward_models(keys: Sequence[T]) -> dict[str, T]:
    """Names of reward models as inputs."""
    return {REWARD_MODEL if number == 1 else f"{REWARD_MODEL}_{number}": one for number, one in enumerate(keys, 1)}


def _number(name: str) -> int:
    end = name.rpartition("_")[2]
    return int(end) if end.isdecimal() else 1


def judge(spec: JudgeStage, inputs: Inputs, draft: Draft, context: Context) -> dict[str, float]:
    """Writes `scores.parquet`. Input: `trajectories`; with `learned`, the reward models."""
    from components.trajectories.store import count_trajectories, read_trajectories, write_scores

    path = inputs["trajectories"].path / "trajectories.parquet"
    tally = Tally()
    recipe = [spec.key_part(), sorted((name, one.digest) for name, one in inputs.items() if name != "trajectories")]
    reward = ready(spec.build(inputs), recipe, context, spec.model)
    parts: dict[str, str] = {}
    trajectories = _noted(read_trajectories(path), parts)
    scores = tally.over(judged(reward, trajectories, context, spec.judge), parts)
    write_scores(draft.path / "scores.parquet", followed(scores, count_trajectories(path), context.progress))
    tally.demand_some("reward models" if spec.learned else spec.reward.target)
    return tally.figures()


def _noted(trajectories: Iterable[Trajectory], parts: dict[str, str]) -> Iterator[Trajectory]:
    """The trajectories as they come; to which part of the collection each belongs is noted by its id."""
    from components.trajectories.parts import part_of

    for one in trajectories:
        parts[one.id] = part_of(one)
        yield one


def ready(reward: Reward | GroupReward, recipe: Any, context: Context, model: ModelSpec | None) -> Reward | GroupReward:
    """The reward, with its models loaded where it computes with any; those stay warm. recipe: what decides the reward.
    model: whose episodes are judged."""
    if not isinstance(reward, ModelReward):
        return reward
    if model is None:
        problem = "is not given, and the reward computes with a model; expected that of the experiment"
        raise SpecError([Problem("judge.model", problem)])

    def load() -> ModelReward:
        reward.use(context.cache, model)
        return reward

    return context.warm.get("reward", [recipe, model.model_dump(mode="json")], load)


def judged(
    reward: Reward | GroupReward, trajectories: Iterable[Trajectory], context: Context, how: JudgeSpec
) -> Iterator[Score]:
    """One Score for each trajectory, in order.

    Those that an earlier try of this stage has kept are taken as they are. What could not be scored is judged again,
    and with a reward for groups the whole group of it.
    """
    from components.rewards.judge import judge as apply
    from components.trajectories.store import read_scores, write_scores

    assert context.scratch is not None
    shards = Shards(context.scratch, "scores", write_scores, read_scores)
    finished = {score.trajectory_id: score for score in shards.read()}
    if finished:
        log.info("%d scores of an earlier try are taken as they are", len(finished))

    def keep(scores: Sequence[Score]) -> None:
        if all(score.reward is not None for score in scores):
            shards.add(scores)

    try:
        yield from apply(reward, trajectories, concurrency=how.concurrency, finished=finished, on_judged=keep)
    finally:
        shards.flush()


class Mean:
    """Mean and standard deviation of numbers that are not kept (Welford's method)."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        difference = value - self.mean
        self.mean += difference / self.count
        self._squares += difference * (value - self.mean)

    @property
    def std(self) -> float:
        """Of the numbers themselves (the population), 0 for a single one."""
        return math.sqrt(self._squares / self.count)


class Tally:
    """What can be said of scores, counted while they pass."""

    def __init__(self) -> None:
        self._rewards: defaultdict[str, Mean] = defaultdict(Mean)
        self._components: defaultdict[str, defaultdict[str, Mean]] = defaultdict(lambda: defaultdict(Mean))
        self._parts: set[str] = set()
        self._scored = 0
        self._unscored = 0
        self._cost = 0.0
        self._broken = 0
        self._first: Failure | None = None

    def over(self, scores: Iterable[Score], parts: Mapping[str, str] | None = None) -> Iterator[Score]:
        """The scores as they come. parts: of the collection, by the ids of the trajectories; None where it has one."""
        for score in scores:
            self._add(score, "" if parts is None else parts[score.trajectory_id])
            yield score

    def _add(self, score: Score, part: str) -> None:
        self._parts.add(part)
        self._cost += score.cost
        if score.reward is None:
            self._unscored += 1
        else:
            self._scored += 1
            self._rewards[part].add(score.reward)
        for name, value in score.components.items():
            self._components[part][name].add(value)
        if score.failure is not None and score.failure.boundary == JudgeError.boundary:
            self._broken += 1
            self._first = self._first or score.failure

    def demand_some(self, judge: str) -> None:
        """Raises JudgeError where the reward could score none of the finished episodes: then it is the reward that is
        broken, and a run that went on would train on nothing."""
        if self._first is not None and not self._scored:
            raise JudgeError(
                f"reward: {judge} could score none of the {self._broken} finished episodes; the first one: "
                f"{self._first.kind}: {self._first.message}"
            )

    def figures(self) -> dict[str, float]:
        """Of the policy's own attempts mean reward, its spread, and components by name; of other parts of a collection
        the mean reward, such as `second/reward`; of all what was scored and unscored, and what it cost."""
        from components.trajectories.parts import main_of

        main = main_of(self._parts)
        values = {"scored": float(self._scored), "unscored": float(self._unscored), "cost": self._cost}
        if main in self._rewards:
            values |= {"reward": self._rewards[main].mean, "reward_std": self._rewards[main].std}
        beside = {f"{part}/reward": mean.mean for part, mean in sorted(self._rewards.items()) if part != main}
        return values | beside | {f"components/{name}": of.mean for name, of in sorted(self._components[main].items())}


STAGE = Stage("judge", 2, JudgeStage, "scores", SCHEMA_VERSION, judge)
