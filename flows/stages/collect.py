"""Collect: episodes by the policy, or demonstrations by the environment's own solver or by a teacher."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from components.artifacts import Draft
from components.inference.protocol import Sampling
from components.inference.spec import EmbeddedSpec, InferenceSpec
from components.models.spec import ModelSpec, TeacherSpec
from components.rollout.spec import AgentSpec, CollectSpec
from components.specs import Target
from components.trajectories.schema import SCHEMA_VERSION, Trajectory
from flows.stages.base import Context, Inputs, Stage, StageSpec, base_model
from flows.stages.episodes import figures, play, scenarios_of, write_times

SPLIT = "train"


class CollectStage(StageSpec):
    model: ModelSpec
    environment: Target
    agent: AgentSpec
    collect: CollectSpec
    inference: InferenceSpec = EmbeddedSpec()
    actor: Literal["policy", "solver", "teacher"] = "policy"
    """`solver`: the environment shows the solution of each scenario; no model speaks. `teacher`: another model plays:
    the one below, or the one that a remote `inference` has."""
    teacher: TeacherSpec | None = None
    round: int = Field(0, ge=0)
    """Each round goes on in the scenarios where the round before it ended."""
    further: tuple[int, int] | None = None
    """(n, k) of a further collection of a round, of other scenarios: the round itself has n, and k more were played
    since."""
    split: str = SPLIT
    """Of the environment; rounds play the one to train on."""

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
            who = {"teacher": self.teacher.key_part() | length if self.teacher else None}
        else:
            who = {"model": base_model(self.model)}
        return part | {
            **who,
            "agent": self.agent.key_part(),
            "collect": self.collect.key_part(),
            **self.inference.key_part(),
        }


def collect(spec: CollectStage, inputs: Inputs, draft: Draft, context: Context) -> dict[str, float]:
    """Writes `trajectories.parquet` and `times.json`. Input: `policy`, a checkpoint; without it the base model acts."""
    from components.models.weights import prepare
    from components.rollout.collector import choose_further, choose_scenarios, demonstrate, failures_allowed
    from components.rollout.players.reflection import demonstrations
    from components.trajectories.groups import by_scenario
    from components.trajectories.parts import TEACHER
    from components.trajectories.store import write_trajectories

    available = scenarios_of(spec.environment, spec.split, context)
    if spec.further is None:
        scenarios = choose_scenarios(available, spec.collect.scenarios, spec.round, context.seed)
    else:
        count, begin = spec.further
        scenarios = choose_further(available, count, spec.round, context.seed, begin=begin, more=spec.collect.scenarios)
    speed: dict[str, float] = {}
    times: dict[str, float] = {}
    if spec.actor == "solver":
        shown = spec.agent.format, spec.agent.max_observation, spec.agent.limits()
        trajectories = demonstrate(spec.environment.build, scenarios, *shown)
        context.progress(len(trajectories), len(trajectories))
    else:
        sampling = Sampling(
            temperature=spec.collect.temperature,
            top_p=spec.collect.top_p,
            top_k=spec.collect.top_k,
            min_p=spec.collect.min_p,
            max_tokens=spec.agent.max_tokens,
        )
        model = spec.teacher.model(spec.model.max_length) if spec.teacher else spec.model
        most = spec.collect.max_failures
        if spec.further is not None and most < 1:  # the share of a round, not of the few that replace others
            most = max(most, float(failures_allowed(most, spec.further[0] * spec.collect.group_size)))
        trajectories, times, speed = play(
            model=model,
            adapter=spec.teacher.adapter_dir() if spec.teacher else None,
            inference=spec.inference,
            environment=spec.environment,
            agent=spec.agent,
            policy=inputs.get("policy"),
            scenarios=scenarios,
            group_size=spec.collect.group_size,
            sampling=sampling,
            concurrency=spec.collect.concurrency,
            timeout=spec.collect.timeout,
            environments=spec.collect.environments,
            step_timeout=spec.collect.step_timeout,
            retries=spec.collect.retries,
            max_failures=most,
            seed=context.seed * 1_000_003 + spec.round,
            context=context,
            what={"stage": "collect", "what": _what(spec)},
            ways=spec.collect,
        )
        if spec.actor == "teacher":
            _sign(trajectories, prepare(model, context.cache) if spec.teacher else None)
        elif (teaching := spec.collect.teacher) is not None:
            known = teaching.model.model(spec.model.max_length) if teaching.model else None
            taught = [one for one in trajectories if one.policy == TEACHER]
            _sign(taught, prepare(known, context.cache) if known else None)
    found = figures(trajectories) | speed
    if spec.collect.reflection is not None and spec.collect.reflection.demonstrate and spec.actor == "policy":
        without = list(demonstrations(trajectories, spec.collect.group_size))
        found["demonstrations"] = float(len(without))
        trajectories = [one for group in by_scenario([*trajectories, *without]).values() for one in group]
    write_trajectories(draft.path / "trajectories.parquet", trajectories)
    write_times(draft.path / "times.json", times)
    return found


def _what(spec: CollectStage) -> str:
    """For whoever watches."""
    if spec.actor == "teacher":
        return "collect, a teacher's episodes"
    if spec.split != SPLIT:
        return f"collect, split {spec.split}"
    further = " (further scenarios)" if spec.further is not None else ""
    return f"collect, round {spec.round + 1}{further}"


def _sign(trajectories: Sequence[Trajectory], base_dir: Path | None) -> None:
    """Says that a teacher played them, and in which tokenizer's ids. base_dir: of the teacher; None for a server's."""
    from components.algorithms.foreign import TOKENIZER, UNKNOWN
    from components.models.weights import tokenizer_digest
    from components.trajectories.parts import TEACHER

    tokenizer = UNKNOWN if base_dir is None else tokenizer_digest(base_dir)
    for one in trajectories:
        one.policy = TEACHER
        one.sampling = {**one.sampling, TOKENIZER: tokenizer}


STAGE = Stage("collect", 7, CollectStage, "trajectories", SCHEMA_VERSION, collect, volatile=("times.json",))
