"""Judge: a reward for each trajectory, from file to file. Finished judgements are kept when the stage dies.

With `learned`, reward models judge, the artifacts of the inputs `reward_model`, `reward_model_2` and so on; the
declared reward is asked only where it has a weight.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from components.artifacts import Artifact, Draft
from components.errors import JudgeError, Problem, SpecError
from components.inference.protocol import Engine
from components.inference.spec import EmbeddedSpec, InferenceSpec
from components.models.spec import ModelSpec
from components.rewards.composition.moments import Moments
from components.rewards.llm.spec import asks_policy
from components.rewards.protocol import AskingReward, Comparing, GroupReward, Means, ModelReward, Reward
from components.rewards.spec import JudgeSpec, LearnedSpec
from components.specs import Target
from components.trajectories.schema import SCHEMA_VERSION, Failure, Score, Trajectory
from flows.stages.base import Context, Inputs, Stage, StageSpec, base_model, followed
from flows.stages.shards import Shards

if TYPE_CHECKING:
    from components.rewards.llm.budget import Meter

log = logging.getLogger(__name__)

T = TypeVar("T")


class JudgeStage(StageSpec):
    reward: Target
    model: ModelSpec | None = None
    """Whose episodes are judged; needed by rewards that compute with a model, and of their keys only."""
    learned: LearnedSpec | None = None
    """None judges by the declared reward alone."""
    judge: JudgeSpec = JudgeSpec()
    """How fast, and for how much; in no key."""
    inference: InferenceSpec = EmbeddedSpec()
    """Engine of the policy; read only by a reward that asks the policy itself."""

    def key_part(self) -> dict[str, Any]:
        if self.learned is None:
            part = {"reward": self.reward.resolved()}
            computes = self.reward.has("use") and self.model is not None
            if asks_policy(self.reward):
                part |= self.inference.key_part()
            return {**part, "model": base_model(self.model)} if computes and self.model else part
        learned: dict[str, Any] = {"learned": self.learned.model_dump(mode="json")}
        if self.model is not None:
            learned["model"] = base_model(self.model)
        return {"reward": self.reward.resolved(), **learned} if self.learned.task_weight else learned

    def build(self, inputs: Inputs) -> Reward | GroupReward:
        """The reward that judges."""
        if self.learned is None:
            return self.reward.build()
        from components.rewards.judges.learned import Learned

        folders = [str(inputs[name].path) for name in sorted(inputs, key=_number) if name.startswith(REWARD_MODEL)]
        task = self.reward.build() if self.learned.task_weight else None
        return Learned(folders, task=task, **self.learned.model_dump())


ANSWERS = "answers"
"""Folder below the root in which answers of judges are kept."""
REWARD_MODEL = "reward_model"
"""Input of the first reward model; the others have their number at the end."""


def reward_models(keys: Sequence[T]) -> dict[str, T]:
    """Names of reward models as inputs."""
    return {REWARD_MODEL if number == 1 else f"{REWARD_MODEL}_{number}": one for number, one in enumerate(keys, 1)}


def _number(name: str) -> int:
    end = name.rpartition("_")[2]
    return int(end) if end.isdecimal() else 1


def judge(spec: JudgeStage, inputs: Inputs, draft: Draft, context: Context) -> dict[str, float]:
    """Writes `scores.parquet`. Inputs: `trajectories`; with `learned`, the reward models; `policy`, for a
    reward that asks it (without: the base model)."""
    from components.trajectories.store import count_trajectories, read_trajectories, write_scores

    path = inputs["trajectories"].path / "trajectories.parquet"
    tally = Tally()
    parts: dict[str, str] = {}
    trajectories = _noted(read_trajectories(path), parts)
    with judging(spec.build(inputs), context, spec.judge, spec.model, inputs.get("policy"), spec.inference) as judged:
        scores = tally.over(judged(trajectories), parts)
        write_scores(draft.path / "scores.parquet", followed(scores, count_trajectories(path), context.progress))
        tally.demand_some("reward models" if spec.learned else spec.reward.target)
        return tally.figures() | judged.figures() | judged.agreement(draft.path / "scores.parquet")


def _noted(trajectories: Iterable[Trajectory], parts: dict[str, str]) -> Iterator[Trajectory]:
    """The trajectories as they come; to which part of the collection each belongs is noted by its id."""
    from components.trajectories.parts import part_of

    for one in trajectories:
        parts[one.id] = part_of(one)
        yield one


class Judged:
    """A reward with all that it needs. Gives one Score for each trajectory, in order.

    Those that an earlier try of this stage has kept are taken as they are. What could not be scored is judged again,
    and with a reward for groups the whole group of it.
    """

    def __init__(self, reward: Reward | GroupReward, meter: Meter, context: Context, how: JudgeSpec, name: str):
        self._reward = reward
        self._meter = meter
        self._context = context
        self._how = how
        self._name = name
        self._paid = 0.0

    def __call__(self, trajectories: Iterable[Trajectory]) -> Iterator[Score]:
        from components.rewards.judge import judge as apply
        from components.trajectories.store import read_scores, write_scores

        assert self._context.scratch is not None
        shards = Shards(self._context.scratch, self._name, write_scores, read_scores)
        finished = {score.trajectory_id: score for score in shards.read()}
        if finished:
            log.info("%d scores of an earlier try are taken as they are", len(finished))
        self._paid = sum(score.cost or 0.0 for score in finished.values())
        self._meter.spent += self._paid

        def keep(scores: Sequence[Score]) -> None:
            if all(score.reward is not None for score in scores):
                shards.add(scores)

        at_once = self._how.concurrency
        try:
            yield from apply(self._reward, trajectories, concurrency=at_once, finished=finished, on_judged=keep)
        finally:
            shards.flush()

    @property
    def spent(self) -> float:
        """In this try and, for what is kept of them, in earlier ones."""
        return self._meter.spent

    def agreement(self, path: Path) -> dict[str, float]:
        """How far the sources of the reward agree on the scores of a file; nothing of a reward that has one source."""
        from components.trajectories.store import read_scores

        if not isinstance(self._reward, Comparing):
            return {}
        return {f"agreement/{name}": value for name, value in self._reward.agreement(read_scores(path)).items()}

    def figures(self) -> dict[str, float]:
        """What was spent now, and on what."""
        meter = self._meter
        if not meter.calls and not meter.kept:
            return {}
        return {
            "spent": meter.spent - self._paid,
            "calls": float(meter.calls),
            "kept_answers": float(meter.kept),
            "unpriced_calls": float(meter.unpriced),
            "prompt_tokens": float(meter.prompt_tokens),
            "completion_tokens": float(meter.completion_tokens),
        }


@contextmanager
def judging(
    reward: Reward | GroupReward,
    context: Context,
    how: JudgeSpec,
    model: ModelSpec | None,
    policy: Artifact | None = None,
    inference: InferenceSpec | None = None,
    name: str = "scores",
    keep_answers: bool = True,
) -> Iterator[Judged]:
    """The reward, with its models and judges at hand until the end. model: whose episodes are judged. policy: the one
    that played them, and its engine. name: under which finished scores are kept for the next try. keep_answers: whether
    a judge's earlier answer to the same question is taken, and this one kept."""
    from components.rewards.llm.budget import Meter

    meter = Meter(how.budget)
    if isinstance(reward, ModelReward):
        if model is None:
            problem = "is not given, and the reward computes with a model; expected that of the experiment"
            raise SpecError([Problem("judge.model", problem)])
        means = _means(meter, context, model, policy, inference)
        reward.use(means if keep_answers else replace(means, answers=None))
    try:
        yield Judged(reward, meter, context, how, name)
    finally:
        if isinstance(reward, AskingReward):
            reward.close()


def _means(
    meter: Meter, context: Context, model: ModelSpec, policy: Artifact | None, inference: InferenceSpec | None
) -> Means:
    def engine(other: ModelSpec | None) -> Engine:
        from flows.stages.episodes import warm_engine

        if other is None:
            return warm_engine(model, policy, context, inference)
        return warm_engine(other, None, context, kind="judge")

    answers = context.cache.parent / ANSWERS
    return Means(context.cache, model, meter, answers, engine, context.on_wait, context.warm.get)


class Tally:
    """What can be said of scores, counted while they pass."""

    def __init__(self) -> None:
        self._rewards: defaultdict[str, Moments] = defaultdict(Moments)
        self._components: defaultdict[str, defaultdict[str, Moments]] = defaultdict(lambda: defaultdict(Moments))
        self._parts: set[str] = set()
        self._scored = 0
        self._unscored = 0
        self._cost = 0.0
        self._unpriced = 0
        self._broken = 0
        self._first: Failure | None = None

    def over(self, scores: Iterable[Score], parts: Mapping[str, str] | None = None) -> Iterator[Score]:
        """The scores as they come. parts: of the collection, by the ids of the trajectories; None where it has one."""
        for score in scores:
            self._add(score, "" if parts is None else parts[score.trajectory_id])
            yield score

    def _add(self, score: Score, part: str) -> None:
        self._parts.add(part)
        self._cost += score.cost or 0.0
        self._unpriced += score.cost is None
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
        the mean reward, such as `second/reward`; of all what was scored and unscored, and what that costs, less those
        of which nobody knows it (`unpriced`)."""
        from components.trajectories.parts import main_of

        main = main_of(self._parts)
        values = {"scored": float(self._scored), "unscored": float(self._unscored), "cost": self._cost}
        if self._unpriced:
            values["unpriced"] = float(self._unpriced)
        if main in self._rewards:
            values |= {"reward": self._rewards[main].mean, "reward_std": self._rewards[main].std}
        beside = {f"{part}/reward": mean.mean for part, mean in sorted(self._rewards.items()) if part != main}
        return values | beside | {f"components/{name}": of.mean for name, of in sorted(self._components[main].items())}


STAGE = Stage("judge", 4, JudgeStage, "scores", SCHEMA_VERSION, judge)
