"""Collect stage: episodes of the policy, or demonstrations of the environment's solver or a teacher."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from components.artifacts import Artifact, Draft
from components.inference.spec import EmbeddedSpec, InferenceSpec
from components.models.spec import FrozenModelSpec, ModelSpec
from components.rollout.collect_spec import CollectSpec
from components.rollout.request import episode_requests
from components.rollout.spec import AgentSpec
from components.specs import Target
from components.tracking.stages import StageTracking
from components.trajectories.schema import SCHEMA_VERSION, Trajectory
from flows.stages.base import WHOLE, Context, Inputs, Request, Sharding, Stage, StagePart, StageSpec, base_model
from flows.stages.episodes import Actor, figures, play, scenarios_of, write_times
from flows.stages.generate import TASKS, with_tasks
from flows.stages.joining import joined_speed, of_shard, read_episodes, read_times, refuse_failures
from flows.stages.judge import JudgeStage

SPLIT = "train"


class CollectStage(StageSpec):
    model: ModelSpec
    environment: Target
    agent: AgentSpec
    collect: CollectSpec
    inference: InferenceSpec = EmbeddedSpec()
    actor: Literal["policy", "solver", "teacher"] = "policy"
    """`solver`: the environment solves each scenario, without a model. `teacher`: the model `teacher` acts, or the
    model of a remote `inference`."""
    teacher: FrozenModelSpec | None = None
    round: int = Field(0, ge=0)
    """Index of the round, from 0; each round continues in the order of scenarios where the one before ended."""
    further: tuple[int, int] | None = None
    """(n, k) of a refill with other scenarios: the round itself has n scenarios, and k were collected since."""
    ahead: JudgeStage | None = None
    """Judge of the episodes while others are played; None: they are judged after the collection. Not part of the
    key."""
    split: str = SPLIT
    """Split of the environment; rounds use the training split."""

    def key_part(self) -> dict[str, Any]:
        part: dict[str, Any] = {"actor": self.actor, "round": self.round, "environment": self.environment.resolved()}
        if self.further is not None:
            part["further"] = list(self.further)
        if self.split != SPLIT:
            part["split"] = self.split
        if self.actor == "solver":
            return part | {"scenarios": self.collect.scenarios, "agent": self.agent.shown_part()}
        if self.actor == "teacher":
            length = {"max_length": self.model.max_length}
            actor = {"teacher": self.teacher.key_part() | length if self.teacher else None}
        else:
            actor = {"model": base_model(self.model)}
        return part | {
            **actor,
            "agent": self.agent.key_part(),
            "collect": self.collect.key_part(),
            **self.inference.key_part(),
        }


def collect(spec: CollectStage, inputs: Inputs, draft: Draft, context: Context) -> dict[str, float]:
    """Write `trajectories.parquet` and `times.json`. Inputs: `policy`, a checkpoint; without it the base model acts.
    `paused`, an earlier collection whose paused episodes continue (`flows.stages.partial`). `tasks`, of the stage
    `generate`; without them the environment has its own."""
    trajectories, times, speed = _play(spec, inputs, draft, context, WHOLE)
    return _write(spec, trajectories, times, draft, speed)


def collect_shard(
    spec: CollectStage, inputs: Inputs, draft: Draft, context: Context, part: StagePart
) -> dict[str, float]:
    """Write the episodes of a part of the scenarios, as `collect` does."""
    from components.trajectories.store import write_trajectories

    trajectories, times, speed = _play(spec, inputs, draft, context, part)
    write_trajectories(draft.path / "trajectories.parquet", trajectories)
    write_times(draft.path / "times.json", times)
    return figures(trajectories) | speed


def join_collect(
    spec: CollectStage, inputs: Inputs, shards: Sequence[Artifact], draft: Draft, context: Context
) -> dict[str, float]:
    """Write the files of `collect` from those of its shards. Raises TooManyFailures."""
    trajectories = read_episodes(shards)
    refuse_failures(trajectories, _allowed(spec), spec.collect.max_failures, "collect", _description(spec))
    return _write(spec, trajectories, read_times(shards), draft, joined_speed(shards))


def played_together(collect: CollectSpec, ahead: bool) -> str | None:
    """Return the reason why a collection cannot be split; None if it can. ahead: it judges its episodes."""
    return collect.player.whole_collection or (
        "judges episodes while others are played (judge.ahead)" if ahead else None
    )


def _play(
    spec: CollectStage, inputs: Inputs, draft: Draft, context: Context, part: StagePart
) -> tuple[Sequence[Trajectory], dict[str, float], dict[str, float]]:
    """Return the episodes of a part of the scenarios, the seconds of each by id, and throughput metrics."""
    from components.models.weights import prepare
    from components.rollout.collector import choose_further, choose_scenarios, demonstrate
    from components.trajectories.parts import TEACHER
    from flows.stages.ahead import judging_ahead
    from flows.stages.partial import Carried

    spec = with_tasks(spec, inputs)
    available = scenarios_of(spec.environment, spec.split, context)
    if spec.further is None:
        scenarios = choose_scenarios(available, spec.collect.scenarios, spec.round, context.seed)
    else:
        count, begin = spec.further
        scenarios = choose_further(available, count, spec.round, context.seed, begin=begin, more=spec.collect.scenarios)
    scenarios = list(part.of(scenarios))
    if not scenarios:  # more shards than scenarios
        return [], {}, {}
    if spec.actor == "solver":
        trajectories = demonstrate(spec.environment.build, scenarios, spec.agent.presentation(), spec.agent.roles)
        context.progress(len(trajectories), len(trajectories))
        return trajectories, {}, {}
    model = spec.teacher.model(spec.model.max_length) if spec.teacher else spec.model
    if spec.actor == "teacher" and spec.teacher is None:
        model = model.of_server()
    limits = spec.collect
    if part != WHOLE or (spec.further is not None and limits.max_failures < 1):
        # a share of the whole stage or round, not of the shard or of the smaller refill
        limits = limits.model_copy(update={"max_failures": max(limits.max_failures, float(_allowed(spec)))})
    carried = Carried(inputs.get("paused"))
    requests = carried.requests(spec.agent.max_turns) + episode_requests(
        scenarios,
        spec.collect.group_size,
        sampling=spec.collect.sampling(spec.agent.max_tokens, spec.agent.max_thinking_tokens),
        max_turns=spec.agent.max_turns,
        seed=context.seed * 1_000_003 + spec.round,
        temperature_step=spec.collect.temperature_step,
    )
    with judging_ahead(spec.ahead, context, spec.collect) as (context, ahead):
        if ahead is not None:
            ahead.add(*carried.ended)
        played, times, speed = play(
            Actor(model, spec.inference, inputs.get("policy"), spec.teacher.adapter_dir() if spec.teacher else None),
            spec.environment,
            spec.agent,
            requests,
            limits,
            context,
            description={"stage": "collect", "what": _description(spec) + of_shard(part)},
            collect=spec.collect,
        )
    if ahead is not None:
        ahead.write(draft.path)
        speed |= ahead.metrics
    if spec.collect.partial is not None:
        complete, counts = carried.join(played, spec.round + 1, draft.path)
        speed |= counts | {"tokens_per_s": speed["tokens_per_s"] - carried.sampled_tokens / speed["seconds"]}
        return complete, times, speed
    if spec.actor == "teacher":
        played = played.changed(_mark(prepare(model, context.cache) if spec.teacher else None))
    elif (teaching := spec.collect.teacher) is not None:
        teacher = teaching.model.model(spec.model.max_length) if teaching.model else None
        mark = _mark(prepare(teacher, context.cache) if teacher else None)
        played = played.changed(lambda t: mark(t) if t.policy == TEACHER else t)
    return played, times, speed


def _allowed(spec: CollectStage) -> int:
    """Return the number of episodes that may fail; for a refill that of the round."""
    from components.rollout.collector import failures_allowed

    scenarios = spec.collect.scenarios
    if spec.further is not None and spec.collect.max_failures < 1:
        scenarios = spec.further[0]
    return failures_allowed(spec.collect.max_failures, scenarios * spec.collect.group_size)


def _write(
    spec: CollectStage,
    trajectories: Sequence[Trajectory],
    times: dict[str, float],
    draft: Draft,
    speed: Mapping[str, float],
) -> dict[str, float]:
    """Write the files of the artifact and return its metrics."""
    from components.rollout.players.reflection import demonstrations
    from components.trajectories.groups import adjacent_groups, by_scenario
    from components.trajectories.store import write_trajectories

    metrics = figures(trajectories) | dict(speed)
    written: Iterable[Trajectory] = trajectories
    if spec.collect.reflection is not None and spec.collect.reflection.demonstrate and spec.actor == "policy":
        shown = by_scenario(demonstrations(trajectories, spec.collect.group_size))
        metrics["demonstrations"] = float(sum(map(len, shown.values())))
        written = (t for group in adjacent_groups(trajectories) for t in [*group, *shown.get(group[0].group, [])])
    write_trajectories(draft.path / "trajectories.parquet", written)
    write_times(draft.path / "times.json", times)
    return metrics


def _description(spec: CollectStage) -> str:
    """Return a description of the collection for live views."""
    if spec.actor == "teacher":
        return "collect, a teacher's episodes"
    if spec.split != SPLIT:
        return f"collect, split {spec.split}"
    further = " (further scenarios)" if spec.further is not None else ""
    return f"collect, round {spec.round + 1}{further}"


def _mark(base_dir: Path | None) -> Callable[[Trajectory], Trajectory]:
    """Return the function that marks a trajectory as a teacher's, with the digest of its tokenizer. base_dir: folder of
    the teacher's model; None for a model on a server."""
    from components.algorithms.foreign import TOKENIZER, UNKNOWN
    from components.models.weights import tokenizer_digest
    from components.trajectories.parts import TEACHER

    tokenizer = UNKNOWN if base_dir is None else tokenizer_digest(base_dir)
    return lambda t: replace(t, policy=TEACHER, sampling={**t.sampling, TOKENIZER: tokenizer})


def most_episodes(request: Request) -> int:
    """Return the maximum number of episodes of a request, including those derived from others."""
    collect = CollectSpec.model_validate(request.spec["collect"])
    actor = request.spec["actor"]
    if actor == "solver":
        return collect.scenarios
    first = collect.scenarios * collect.group_size
    if actor == "teacher":
        return first
    return first + collect.scenarios * collect.player.derived(collect.group_size, request.spec["agent"]["max_turns"])


def first_attempts(request: Request) -> int:
    """Return the number of scenarios times the group size."""
    return int(request.spec["collect"]["scenarios"] * request.spec["collect"]["group_size"])


def count_rows(spec: CollectStage, inputs: Mapping[str, Artifact | None], context: Context) -> int:
    """Return the number of scenarios times the episodes of each, without second attempts and continuations."""
    return spec.collect.scenarios * (1 if spec.actor == "solver" else spec.collect.group_size)


STAGE = Stage(
    "collect",
    8,
    CollectStage,
    "trajectories",
    SCHEMA_VERSION,
    collect,
    files={
        "trajectories.parquet": "episodes",
        "times.json": "seconds of each episode",
        "paused.parquet": "episodes of incomplete groups, which continue in a later round",
        "ahead.parquet": "scores that were given while other episodes were played",
        "ahead.json": "digest of the reward that gave them",
    },
    optional=("paused.parquet", "ahead.parquet", "ahead.json"),
    volatile=("times.json", "ahead.parquet", "ahead.json"),
    inputs={"policy": "checkpoint", "paused": "trajectories", TASKS: TASKS},
    order=10,
    unit="episodes",
    plays=True,
    episodes=most_episodes,
    size=first_attempts,
    sharding=Sharding(
        collect_shard, join_collect, count_rows, lambda spec: played_together(spec.collect, spec.ahead is not None)
    ),
    tracking=StageTracking(dataset="train"),
    part_of_round=True,
    round_metrics={
        "success": "success",
        "turns": "turns",
        "tokens_per_episode": "sampled_tokens",
        "tokens_per_s": "sampling_tokens_per_s",
        "repetition": "repetition",
        "identical_within": "identical_within",
        "identical_between": "identical_between",
        "*/success": "*",
        "*/episodes": "*",
    },
    lineage="input",
)
