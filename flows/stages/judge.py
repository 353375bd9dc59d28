"""Judge stage: scores each trajectory, from file to file. Finished scores are kept when the stage dies.

With `learned`, reward models score the trajectories: the inputs `reward_model`, `reward_model_2` and so on. The
declared reward is then used only if it has a weight. With `anchors`, a fixed sample of the trajectories is judged again
(`flows.stages.anchors`).
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
from components.artifacts.keys import json_digest
from components.errors import JudgeError, Problem, SpecError
from components.inference.protocol import ModelEngine
from components.inference.spec import EmbeddedSpec, InferenceSpec
from components.models.spec import ModelSpec
from components.rewards.composition.normalised import Moments
from components.rewards.llm.spec import asks_policy
from components.rewards.protocol import AskingReward, GroupReward, ModelReward, Reward, RewardResources
from components.rewards.spec import JudgeSpec, LearnedSpec
from components.specs import Target
from components.trajectories.schema import SCHEMA_VERSION, Failure, Score, Trajectory
from flows.stages.ahead_scores import read_ahead
from flows.stages.anchors import AnchorSpec, drift_of, sample_anchors
from flows.stages.base import WHOLE, Context, Inputs, Sharding, Stage, StagePart, StageSpec, base_model, with_progress
from flows.stages.finished import FinishedRows
from flows.stages.joining import (
    FIGURES,
    agreement_of,
    count_input_rows,
    joined_figures,
    part_of_scenarios,
    read_scored_shards,
)

if TYPE_CHECKING:
    from components.rewards.llm.budget import Meter

log = logging.getLogger(__name__)

T = TypeVar("T")


class JudgeStage(StageSpec):
    reward: Target
    model: ModelSpec | None = None
    """Model of the scored episodes; required by rewards that compute with a model, and part of the key only for
    them."""
    learned: LearnedSpec | None = None
    """Settings of reward models; None: the declared reward alone scores."""
    judge: JudgeSpec = JudgeSpec()
    """Concurrency and budget; not part of the key."""
    inference: InferenceSpec = EmbeddedSpec()
    """Engine of the policy; used only by a reward that queries the policy."""
    anchors: AnchorSpec | None = None
    """Judge a sample of the trajectories again; None: judge all of them. Part of the key only if set."""

    def key_part(self) -> dict[str, Any]:
        anchors = {} if self.anchors is None else {"anchors": self.anchors.model_dump(mode="json")}
        return self._reward_part() | anchors

    def _reward_part(self) -> dict[str, Any]:
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

    def applied_reward(self) -> Target | None:
        return self.reward if self.learned is None or self.learned.task_weight else None

    def build(self, inputs: Inputs) -> Reward | GroupReward:
        """Return the reward: the declared one, or the reward models in `inputs`."""
        if self.learned is None:
            return self.reward.build()
        from components.rewards.judges.learned import Learned

        folders = [str(inputs[name].path) for name in sorted(inputs, key=_number) if name.startswith(REWARD_MODEL)]
        task = self.reward.build() if self.learned.task_weight else None
        return Learned(folders, task=task, **self.learned.model_dump())


ANSWERS = "answers"
"""Folder below the root that caches answers of LLM judges."""
REWARD_MODEL = "reward_model"
"""Input name of the first reward model; the others have their number as a suffix."""


def models_by_input(keys: Sequence[T]) -> dict[str, T]:
    """Return the reward models by input name."""
    return {REWARD_MODEL if number == 1 else f"{REWARD_MODEL}_{number}": key for number, key in enumerate(keys, 1)}


def _number(name: str) -> int:
    suffix = name.rpartition("_")[2]
    return int(suffix) if suffix.isdecimal() else 1


def reward_digest(spec: JudgeStage) -> str:
    """Return the digest of what determines a score, besides the trajectories."""
    return json_digest([STAGE.version, spec.key_part()])


def judge(spec: JudgeStage, inputs: Inputs, draft: Draft, context: Context) -> dict[str, float]:
    """Write `scores.parquet`. Inputs: `trajectories`; with `learned`, the reward models; `policy`, for a reward that
    queries it (without: the base model); with `anchors`, the episodes of the `round`, and the scores of the `first`
    judgement and of its `control`."""
    from components.trajectories.store import count_trajectories, read_trajectories

    path = inputs["trajectories"].path / "trajectories.parquet"
    if spec.anchors is None:
        return _score(spec, inputs, draft, context, read_trajectories(path), count_trajectories(path))
    anchors = sample_anchors(path, spec.anchors.groups)
    metrics = _score(spec, inputs, draft, context, anchors, len(anchors))
    return metrics | drift_of(anchors, draft.path / "scores.parquet", inputs)


def judge_shard(spec: JudgeStage, inputs: Inputs, draft: Draft, context: Context, part: StagePart) -> dict[str, float]:
    """Write the scores of the scenarios that begin in a part of the episodes, as `judge` does."""
    from components.trajectories.store import count_trajectories, read_trajectories

    path = inputs["trajectories"].path / "trajectories.parquet"
    total = count_trajectories(path)
    first, end = part.bounds(total)
    rows = part_of_scenarios(read_trajectories(path), total, part)
    return _score(spec, inputs, draft, context, rows, end - first, part)


def join_judge(
    spec: JudgeStage, inputs: Inputs, shards: Sequence[Artifact], draft: Draft, context: Context
) -> dict[str, float]:
    """Write the scores of all shards. Raises JudgeError without scores."""
    from components.trajectories.store import read_trajectories, write_scores

    path, written = inputs["trajectories"].path / "trajectories.parquet", draft.path / "scores.parquet"
    parts: dict[str, str] = {}
    for _ in _record_parts(read_trajectories(path), parts):
        pass
    tally = Tally()
    write_scores(written, tally.over(read_scored_shards(shards), parts))
    tally.demand_some("reward models" if spec.learned else spec.reward.target)
    return tally.figures() | joined_figures(spec.build(inputs), shards, written)


def _score(
    spec: JudgeStage,
    inputs: Inputs,
    draft: Draft,
    context: Context,
    rows: Iterable[Trajectory],
    count: int,
    part: StagePart = WHOLE,
) -> dict[str, float]:
    """Write the scores of `rows`, about `count` trajectories, and return the metrics."""
    from components.trajectories.store import write_scores

    tally, written = Tally(), draft.path / "scores.parquet"
    parts: dict[str, str] = {}
    resources = (context, spec.judge.for_part(part.count), spec.model, inputs.get("policy"), spec.inference)
    with judging(spec.build(inputs), *resources, keep_answers=spec.anchors is None) as judged:
        judged.finished |= read_ahead(inputs["trajectories"].path, reward_digest(spec))
        scores = tally.over(judged(_record_parts(rows, parts)), parts)
        write_scores(written, with_progress(scores, count, context.progress))
        tally.demand_some("reward models" if spec.learned else spec.reward.target)
        return tally.figures() | judged.figures() | judged.agreement(written)


def _refusal(spec: JudgeStage) -> str | None:
    """Return the reason why a judgement cannot be split; None if it can."""
    if spec.anchors is not None:
        return "judges a sample of the episodes again"
    return running_statistics(spec.reward) if spec.applied_reward() is not None else None


def running_statistics(reward: Target) -> str | None:
    """Return the reason why the scores of a reward cannot be split; None if they can."""
    if getattr(reward.build(), "settles", False):
        return "has a reward with running statistics, which depend on all earlier episodes of the collection"
    return None


def _record_parts(trajectories: Iterable[Trajectory], parts: dict[str, str]) -> Iterator[Trajectory]:
    """Yield the trajectories, and add the part of the collection of each to `parts`, by its id."""
    from components.trajectories.parts import part_of

    for trajectory in trajectories:
        parts[trajectory.id] = part_of(trajectory)
        yield trajectory


class RewardJudge:
    """Reward with its models and meter. A call yields one Score per trajectory, in order.

    Scores of an earlier attempt of this stage are reused. Unscored trajectories are scored again; with a group reward,
    their whole group is.
    """

    def __init__(self, reward: Reward | GroupReward, meter: Meter, context: Context, settings: JudgeSpec, name: str):
        self._reward = reward
        self._meter = meter
        self._context = context
        self._settings = settings
        self._name = name
        self._paid = 0.0
        self.finished: dict[str, Score] = {}
        """Scores by trajectory id, before settling; those that are known before the call are not judged again."""

    def __call__(self, trajectories: Iterable[Trajectory]) -> Iterator[Score]:
        from components.rewards.judge import judge as apply
        from components.trajectories.store import read_scores, write_scores

        assert self._context.scratch is not None
        shards = FinishedRows(self._context.scratch, self._name, write_scores, read_scores)
        self.finished |= {score.trajectory_id: score for score in shards.read()}
        if self.finished:
            log.info("reusing %d scores of an earlier attempt", len(self.finished))
        self._paid = sum(score.cost or 0.0 for score in self.finished.values())
        self._meter.spent += self._paid

        def keep(scores: Sequence[Score]) -> None:
            if all(score.reward is not None for score in scores):
                shards.add(scores)
                self.finished |= {score.trajectory_id: score for score in scores}

        concurrency, finished = self._settings.concurrency, dict(self.finished)
        try:
            yield from apply(self._reward, trajectories, concurrency=concurrency, finished=finished, on_judged=keep)
        finally:
            shards.flush()

    @property
    def spent(self) -> float:
        """Cost of this attempt and of the reused scores of earlier ones."""
        return self._meter.spent

    def agreement(self, path: Path) -> dict[str, float]:
        """Return the agreement between the sources of the reward on the scores of a file; empty for a reward with a
        single source."""
        return agreement_of(self._reward, path)

    def figures(self) -> dict[str, float]:
        """Return the cost, calls and tokens of this attempt; empty without calls of a judge."""
        meter = self._meter
        if not meter.calls and not meter.cached:
            return {}
        tokens = (float(meter.prompt_tokens), float(meter.completion_tokens))
        counts = (float(meter.calls), float(meter.cached), float(meter.unpriced))
        return dict(zip(FIGURES, (meter.spent - self._paid, *counts, *tokens), strict=True))


@contextmanager
def judging(
    reward: Reward | GroupReward,
    context: Context,
    settings: JudgeSpec,
    model: ModelSpec | None,
    policy: Artifact | None = None,
    inference: InferenceSpec | None = None,
    name: str = "scores",
    keep_answers: bool = True,
) -> Iterator[RewardJudge]:
    """Provide the reward with its models and judges, and close them at the end.

    model: of the scored episodes. policy: the policy that produced them. inference: engine of the policy. name: of the
    shards that keep finished scores for a retry. keep_answers: use the cache of the judges' answers."""
    from components.rewards.llm.budget import Meter

    meter = Meter(settings.budget)
    if isinstance(reward, ModelReward):
        if model is None:
            problem = "null, but the reward computes with a model; expected the model of the experiment"
            raise SpecError([Problem("judge.model", problem)])
        resources = model_resources(meter, context, model, policy, inference)
        reward.use(resources if keep_answers else replace(resources, answers=None))
    try:
        yield RewardJudge(reward, meter, context, settings, name)
    finally:
        if isinstance(reward, AskingReward):
            reward.close()


def model_resources(
    meter: Meter, context: Context, model: ModelSpec, policy: Artifact | None, inference: InferenceSpec | None
) -> RewardResources:
    """Return the resources of models that are asked in a stage."""

    def engine(other: ModelSpec | None, adapter: Path | None) -> ModelEngine:
        from flows.stages.episodes import warm_engine

        if other is None:
            return warm_engine(model, policy, context, inference)
        return warm_engine(other, None, context, adapter=adapter, kind="judge")

    answers = context.cache.parent / ANSWERS
    return RewardResources(context.cache, model, meter, answers, engine, context.on_wait, context.warm.get)


class Tally:
    """Metrics of a stream of scores."""

    def __init__(self) -> None:
        self._rewards: defaultdict[str, Moments] = defaultdict(Moments)
        self._components: defaultdict[str, defaultdict[str, Moments]] = defaultdict(lambda: defaultdict(Moments))
        self._parts: set[str] = set()
        self._scored = 0
        self._unscored = 0
        self._cost = 0.0
        self._unpriced = 0
        self._failed = 0
        self._first: Failure | None = None

    def over(self, scores: Iterable[Score], parts: Mapping[str, str] | None = None) -> Iterator[Score]:
        """Yield the scores, and count them. parts: part of the collection by trajectory id; None if there is one."""
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
            self._failed += 1
            self._first = self._first or score.failure

    def demand_some(self, judge: str) -> None:
        """Raise JudgeError if the reward scored no finished episode: the reward is broken, and the run would train on
        nothing."""
        if self._first is not None and not self._scored:
            raise JudgeError(
                f"reward: {judge} scored none of the {self._failed} finished episodes; first failure: "
                f"{self._first.kind}: {self._first.message}"
            )

    def figures(self) -> dict[str, float]:
        """Return the metrics: for the policy's own attempts the mean and standard deviation of the reward and the means
        of its components; for other parts of a collection the mean reward, such as `second/reward`; for all parts the
        numbers of scored and unscored episodes, the cost, and the number of scores without a known cost
        (`unpriced`)."""
        from components.trajectories.parts import main_of

        main = main_of(self._parts)
        values = {"scored": float(self._scored), "unscored": float(self._unscored), "cost": self._cost}
        if self._unpriced:
            values["unpriced"] = float(self._unpriced)
        if main in self._rewards:
            values |= {"reward": self._rewards[main].mean, "reward_std": self._rewards[main].std}
        others = {f"{part}/reward": moments.mean for part, moments in sorted(self._rewards.items()) if part != main}
        components = {f"components/{name}": m.mean for name, m in sorted(self._components[main].items())}
        return values | others | components


STAGE = Stage(
    "judge",
    5,
    JudgeStage,
    "scores",
    SCHEMA_VERSION,
    judge,
    files={"scores.parquet": "score of each episode"},
    inputs={
        "trajectories": "trajectories or dataset",
        "reward_model[_K]": "reward_model",
        "policy": "checkpoint",
        "round": "trajectories",
        "first": "scores",
        "control": "scores",
    },
    order=20,
    unit="scores",
    sharding=Sharding(judge_shard, join_judge, count_input_rows, _refusal),
    part_of_round=True,
    round_metrics={
        "reward": "reward",
        "components/spread": "spread",
        "*/reward": "*",
        "components/*": "*",
    },
    lineage="input",
)
