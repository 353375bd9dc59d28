"""Evaluate stage: held-out episodes of a policy or a baseline, their scores and a summary."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from pydantic import Field

from components.artifacts import MANIFEST, Artifact, Draft, stage_key
from components.errors import Problem, SpecError
from components.evaluation.spec import EvaluateSpec
from components.inference.protocol import Sampling
from components.inference.spec import EmbeddedSpec, InferenceSpec
from components.json_text import read_json
from components.models.spec import ModelSpec
from components.redaction import mask
from components.rewards.llm.spec import asks_policy
from components.rewards.spec import JudgeSpec
from components.rollout.request import episode_requests
from components.rollout.spec import AgentSpec
from components.specs import Target
from components.specs.wording import shortened
from components.tracking.stages import StageTracking
from components.trajectories.schema import SCHEMA_VERSION, Scenario, Trajectory
from flows.stages import judge
from flows.stages.base import WHOLE, Context, Inputs, Request, Sharding, Stage, StagePart, StageSpec, base_model
from flows.stages.episodes import Actor, figures, play, scenarios_of, write_times
from flows.stages.finished import FinishedEpisodes
from flows.stages.generate import TASKS, with_tasks
from flows.stages.joining import (
    joined_figures,
    joined_speed,
    of_shard,
    read_episodes,
    read_scored_shards,
    read_times,
    refuse_failures,
)
from flows.stages.until_decided import Played, play_until_decided

log = logging.getLogger(__name__)

CHANCE = 0.1
"""Success at which an answer that is the same for all scenarios is right by chance."""
REFERENCE = "reference"
"""Name of the input that an evaluation with `evaluate.stop=decided` is compared with."""


class EvaluateStage(StageSpec):
    model: ModelSpec
    environment: Target
    reward: Target
    agent: AgentSpec
    evaluate: EvaluateSpec
    inference: InferenceSpec = EmbeddedSpec()
    judge: JudgeSpec = JudgeSpec()
    """Concurrency and budget; not part of the key."""
    actor: Literal["policy", "solver", "random"] = "policy"
    """`solver`: the environment solves each scenario. `random`: actions are drawn at random. Both act without a
    model."""
    samples: int = Field(1, ge=1)
    """Episodes per scenario; the solver plays one."""

    def key_part(self) -> dict[str, Any]:
        part: dict[str, Any] = {
            "environment": self.environment.resolved(),
            "reward": self.reward.resolved(),
            "evaluate": self.evaluate.key_part(),
        }
        if self.actor == "policy":
            part["agent"] = self.agent.key_part()
        else:
            del part["evaluate"]["temperature"]
            part |= {"actor": self.actor, "agent": self.agent.shown_part() | {"max_turns": self.agent.max_turns}}
        if self.samples > 1 and self.actor != "solver":
            part["samples"] = self.samples
        if self.actor == "policy" or asks_policy(self.reward):
            model = {"model": base_model(self.model)} if self.inference.loads_policies else {}
            part |= model | self.inference.key_part()
        return part

    def applied_reward(self) -> Target:
        return self.reward


def evaluate(spec: EvaluateStage, inputs: Inputs, draft: Draft, context: Context) -> dict[str, float]:
    """Write `trajectories.parquet`, `scores.parquet`, `summary.json` and `times.json`. Inputs: `policy`, a checkpoint;
    without it the base model is evaluated, or the baseline that `actor` names. `reference`: the evaluation from which
    the difference is decided, with `evaluate.stop=decided`."""
    tally = judge.Tally()
    metrics, sequence = _play_and_judge(spec, inputs, draft, context, WHOLE, tally)
    return metrics | _summarise(draft, sequence)


def evaluate_shard(
    spec: EvaluateStage, inputs: Inputs, draft: Draft, context: Context, part: StagePart
) -> dict[str, float]:
    """Write the episodes of a part of the scenarios, with their scores, as `evaluate` does."""
    return _play_and_judge(spec, inputs, draft, context, part, judge.Tally())[0]


def join_evaluate(
    spec: EvaluateStage, inputs: Inputs, shards: Sequence[Artifact], draft: Draft, context: Context
) -> dict[str, float]:
    """Write the files of `evaluate` from those of its shards. Raises TooManyFailures, and JudgeError without scores."""
    from components.rollout.collector import failures_allowed
    from components.trajectories.store import write_scores, write_trajectories

    trajectories, tally = read_episodes(shards), judge.Tally()
    limit = spec.evaluate.max_failures
    description = f"evaluate, split {spec.evaluate.split}"
    refuse_failures(trajectories, failures_allowed(limit, len(trajectories)), limit, "evaluate", description)
    write_trajectories(draft.path / "trajectories.parquet", trajectories)
    write_scores(draft.path / "scores.parquet", tally.over(read_scored_shards(shards)))
    tally.demand_some(spec.reward.target)
    write_times(draft.path / "times.json", read_times(shards))
    judged = joined_figures(spec.reward.build(), shards, draft.path / "scores.parquet")
    return figures(trajectories) | tally.figures() | judged | joined_speed(shards) | _summarise(draft, None)


def _play_and_judge(
    spec: EvaluateStage, inputs: Inputs, draft: Draft, context: Context, part: StagePart, tally: judge.Tally
) -> tuple[dict[str, float], dict[str, Any] | None]:
    """Write the episodes of a part of the scenarios with their scores; return the metrics, and the data of the
    confidence sequence if the evaluation may stop."""
    from components.trajectories.store import write_scores, write_trajectories

    played = played_before(STAGE, spec, inputs, context)
    spec = with_tasks(spec, inputs)
    (trajectories, times, speed), sequence = _episodes(spec, inputs, context, part, played)
    finished = [episode for episode in trajectories if episode.failure is None]
    _warn_without_success(spec, finished)
    _warn_of_equal_answers(spec, finished)
    policy = inputs.get("policy")
    settings = spec.judge.for_part(part.count)
    with judge.judging(spec.reward.build(), context, settings, spec.model, policy, spec.inference) as judged:
        scores = list(tally.over(judged(trajectories)))
        tally.demand_some(spec.reward.target)  # the finished episodes are in scratch, so a retry reuses them
    write_trajectories(draft.path / "trajectories.parquet", trajectories)
    write_scores(draft.path / "scores.parquet", scores)
    write_times(draft.path / "times.json", times)
    agreement = judged.agreement(draft.path / "scores.parquet")
    return figures(trajectories) | tally.figures() | judged.figures() | agreement | speed, sequence


def _summarise(draft: Draft, sequence: dict[str, Any] | None) -> dict[str, float]:
    """Write `summary.json` from the episodes and their scores, and return the limits of its intervals. sequence: data
    of the confidence sequence of an evaluation that may stop."""
    from components.evaluation.metrics import states_success, summarise, without_success
    from components.trajectories.sources import ScoredFiles

    scored = ScoredFiles.of(draft.path).load()
    summary = summarise(scored, sequence["alpha"] if sequence else None) | ({"sequence": sequence} if sequence else {})
    (draft.path / "summary.json").write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    measured = summary if states_success(scored) else without_success(summary)
    limits = {f"{name}_{end}": measured[name][end] for name in ("success", "reward") for end in ("low", "high")}
    intervals = {name: value for name, value in limits.items() if value is not None}
    return intervals | (_decision(sequence) if sequence else {})


def _refusal(spec: EvaluateStage) -> str | None:
    """Return the reason why an evaluation cannot be split; None if it can."""
    return judge.running_statistics(spec.reward) or stops_early(spec.evaluate)


def stops_early(evaluate: EvaluateSpec) -> str | None:
    """Return the reason why an evaluation that may stop cannot be split; None if it plays all scenarios."""
    return None if evaluate.stop == "never" else f"may stop before all scenarios (evaluate.stop={evaluate.stop})"


def _decision(sequence: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of an evaluation that may stop."""
    ends = {f"gain{end}": sequence[name] for name, end in (("difference", ""), ("low", "_low"), ("high", "_high"))}
    values = {"decided": float(sequence["decided"]), "not_played": sequence["planned"] - sequence["scenarios"]}
    return values | {name: value for name, value in ends.items() if value is not None}


def _episodes(
    spec: EvaluateStage, inputs: Inputs, context: Context, part: StagePart, played: Artifact | None
) -> tuple[Played, dict[str, Any] | None]:
    """Play the episodes of a part of the scenarios; return them, and the data of the confidence sequence if the
    evaluation may stop. played: evaluation that has the episodes, if there is one."""
    from components.rollout.collector import demonstrate, failures_allowed

    policy = inputs.get("policy")
    scenarios = scenarios_of(spec.environment, spec.evaluate.split, context)[: spec.evaluate.scenarios]
    limits, total = spec.evaluate, len(scenarios) * spec.samples
    if part != WHOLE:  # a share of the whole stage
        allowed = float(failures_allowed(limits.max_failures, total))
        limits = limits.model_copy(update={"max_failures": max(limits.max_failures, allowed)})
    scenarios = part.of(scenarios)
    if not scenarios:  # more shards than scenarios
        return ([], {}, {}), None
    if spec.actor == "solver":
        trajectories = demonstrate(spec.environment.build, scenarios, spec.agent.presentation(), spec.agent.roles)
        context.progress(len(trajectories), len(trajectories))
        return (trajectories, {}, {}), None
    if spec.evaluate.stop == "decided":
        if REFERENCE not in inputs:
            text = "decided: this evaluation has no input `reference`, whose difference it decides; expected never"
            raise SpecError([Problem("evaluate.stop", text)])
        batch = partial(_play, spec, policy, played)
        return play_until_decided(scenarios, spec.evaluate, inputs[REFERENCE], batch, context, spec.samples)
    return _play(spec, policy, played, scenarios, limits, context, part), None


def _play(
    spec: EvaluateStage,
    policy: Artifact | None,
    played: Artifact | None,
    scenarios: Sequence[Scenario],
    limits: EvaluateSpec,
    context: Context,
    part: StagePart = WHOLE,
) -> Played:
    """Play the episodes of these scenarios that `played` does not have."""
    requests = episode_requests(
        scenarios,
        spec.samples,
        sampling=Sampling(
            temperature=spec.evaluate.temperature,
            max_tokens=spec.agent.max_tokens,
            max_thinking_tokens=spec.agent.max_thinking_tokens,
        ),
        max_turns=spec.agent.max_turns,
        seed=context.seed,
    )
    if played is not None:
        adopt(played, [request.id for request in requests], context)
    return play(
        Actor(spec.model, spec.inference, policy, random=spec.actor == "random"),
        spec.environment,
        spec.agent,
        requests,
        limits,
        context,
        description={"stage": "evaluate", "what": f"evaluate, split {spec.evaluate.split}{of_shard(part)}"},
    )


def _warn_without_success(spec: EvaluateStage, finished: Sequence[Trajectory]) -> None:
    """Log a warning if no episode states its success. finished: episodes without failure."""
    from components.evaluation.metrics import states_success

    if states_success(finished):
        return
    if spec.agent.function is None or spec.actor != "policy":
        text = "%s sets `success` in the info of no episode, so its success is unknown"
        log.warning(text, spec.environment.target)
    else:
        text = (
            '%s returns `success` for no episode, so its success is unknown; expected {"success": ..., "reward": ...}'
        )
        log.warning(text, spec.agent.function.label)


def _warn_of_equal_answers(spec: EvaluateStage, finished: Sequence[Trajectory]) -> None:
    """Log a warning if a policy that hardly ever succeeds ends the episodes of all scenarios with the same answer."""
    from components.trajectories.policy_text import text

    answers = {text(episode).rpartition("\n")[2] for episode in finished}
    scenarios = len({episode.group for episode in finished})
    if spec.actor != "policy" or len(answers) != 1 or scenarios < 2 or "" in answers:
        return
    success = sum(episode.success for episode in finished) / len(finished)
    if success <= CHANCE:
        log.warning(
            "all %d evaluated episodes, of %d scenarios, end with the same answer, %s, and %.0f %% succeed: the policy "
            "ignores the scenario. Train it on more demonstrations (warmup.demonstrations) or for more epochs "
            "(warmup.algorithm.epochs); if it did better before, lower algorithm.learning_rate",
            len(finished),
            scenarios,
            shortened(answers.pop()),
            100 * success,
        )


def episodes(request: Request) -> int | None:
    """Return the number of episodes of a request; None for all scenarios of the split."""
    count: int | None = request.spec["evaluate"]["scenarios"]
    return None if count is None else count * request.spec.get("samples", 1)


def count_rows(spec: EvaluateStage, inputs: Mapping[str, Artifact | None], context: Context) -> int | None:
    """Return the number of scenarios times the episodes of each. With `scenarios: null`, the environment is asked for
    its scenarios; None if its tasks are pending."""
    scenarios = spec.evaluate.scenarios
    if scenarios is None:
        present = {name: artifact for name, artifact in inputs.items() if artifact is not None}
        if TASKS in inputs and TASKS not in present:
            return None
        environment = with_tasks(spec, present).environment
        scenarios = len(scenarios_of(environment, spec.evaluate.split, context))
    return scenarios * (1 if spec.actor == "solver" else spec.samples)


def played_before(stage: Stage, spec: StageSpec, inputs: Inputs, context: Context) -> Artifact | None:
    """Return a stored evaluation with the same version, spec, inputs and seed, except for its reward; None if the
    folder has none. A reward does not change what a policy does, so its episodes are judged again in place of being
    played again."""
    digests = {name: artifact.digest for name, artifact in inputs.items()}
    wanted = _without_reward(mask(spec.key_part()))
    for artifact in context.store.manifests():
        if artifact.stage != stage.name or artifact.inputs.keys() != inputs.keys():
            continue
        part = read_json(artifact.path / MANIFEST)["spec"]
        if part is None:
            continue  # an artifact that no spec describes
        key = stage_key(stage.name, stage.version, part, digests, context.seed)
        if _without_reward(part) == wanted and key == artifact.key:
            return context.store.find(artifact.key)  # verifies the files
    return None


def _without_reward(part: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name != "reward"}


def adopt(played: Artifact, ids: Collection[str], context: Context) -> None:
    """Add the episodes with these ids, except failed ones, to the finished episodes of the stage."""
    from components.trajectories.store import read_trajectories

    assert context.scratch is not None
    episodes = FinishedEpisodes(context.scratch)
    missing = set(ids) - set(episodes.finished)
    seconds = read_json(played.path / "times.json")
    count = 0
    for trajectory in read_trajectories(played.path / "trajectories.parquet"):
        if trajectory.id in missing and trajectory.failure is None:
            episodes.add(trajectory, seconds.get(trajectory.id, 0.0))
            count += 1
    episodes.flush()
    if count:
        log.info("judging %d stored episodes of evaluation %s: only the reward differs", count, played.key[:12])


STAGE = Stage(
    "evaluate",
    9,
    EvaluateStage,
    "evaluation",
    SCHEMA_VERSION,
    evaluate,
    files={
        "trajectories.parquet": "episodes",
        "scores.parquet": "their scores",
        "summary.json": "success, reward and turns with intervals; `sequence` if the evaluation may stop early",
        "times.json": "seconds of each episode",
    },
    volatile=("times.json",),
    inputs={"policy": "checkpoint", REFERENCE: "evaluation", TASKS: TASKS},
    order=70,
    unit="episodes",
    plays=True,
    episodes=episodes,
    size=episodes,
    sharding=Sharding(evaluate_shard, join_evaluate, count_rows, _refusal),
    tracking=StageTracking("eval", dataset="evaluation", traces=True),
)
