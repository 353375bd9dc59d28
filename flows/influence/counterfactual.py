"""Counterfactual replay of a recorded episode: continuations by its policy from one of its steps on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from components.artifacts import Store
from components.errors import Problem, ResourceError, SpecError
from components.evaluation.proportions import independent_difference, wilson
from components.inference.protocol import Sampling
from components.rollout.agent import AgentLoop
from components.rollout.collector import EpisodeListener, play_episodes
from components.rollout.players.counterfactual import CounterfactualPlayer
from components.rollout.request import EpisodeRequest, derived_seed
from components.trajectories.schema import Message, Trajectory
from components.trajectories.store import read_trajectories
from flows.history.records import RunRecord, StageRecord
from flows.history.trust import admit_request
from flows.influence.rounds import listed
from flows.influence.workplace import Workplace
from flows.stages.base import Request
from flows.stages.collect import CollectStage
from flows.stages.episodes import Actor
from flows.stages.evaluate import EvaluateStage
from flows.stages.execute import resolve
from flows.stages.generate import with_tasks

EXAMPLES = 6
"""Number of ids in the message on an unknown episode."""


@dataclass(frozen=True)
class Branch:
    """Point of a recorded episode from which it is continued."""

    stage: StageRecord
    """Collection or evaluation that played the episode."""
    episode: Trajectory
    step: int
    """Number of the response whose answer is in question, from 1."""
    action: Message
    answer: Message
    """Last message of the environment after the response."""


def branch_of(run: RunRecord, store: Store, name: str, step: int, label: str | None = None) -> Branch:
    """Return the branch after a step of an episode: of the stage with this label, else of the last stage that played an
    episode of this id. Raises ResourceError for an episode that is unknown or a demonstration, and SpecError for a step
    that cannot be a branch."""
    played = [stage for stage in run.stages if stage.request["stage"] in ("collect", "evaluate")]
    if not played:
        raise ResourceError(f"RUN {run.short}: has no finished collection or evaluation; expected another run")
    if label is not None and label not in (labels := [stage.label for stage in played]):
        raise ResourceError(f"--stage {label}: run {run.short} has the stages {listed(labels)}")
    examples: list[str] = []
    for stage in reversed(played):
        artifact = store.find(stage.key) if label in (None, stage.label) else None
        for episode in read_trajectories(artifact.path / "trajectories.parquet") if artifact else ():
            if episode.id == name:
                return _branch(stage, episode, step)
            examples += [episode.id] * (len(examples) < EXAMPLES)
    where = f"stage {label} of run {run.short}" if label else f"run {run.short}"
    raise ResourceError(f"EPISODE {name}: {where} has no such episode; expected an id such as {listed(examples)}")


def _branch(stage: StageRecord, episode: Trajectory, step: int) -> Branch:
    sampled = [(h, at) for h in episode.histories for at, message in enumerate(h.messages) if message.finish_reason]
    if not sampled:
        text = f"demonstrated by the solver in {stage.label}; expected one that a policy played, such as of collect[1]"
        raise ResourceError(f"EPISODE {episode.id}: {text}. --stage LABEL chooses the stage")
    if not 1 <= step < len(sampled):
        expected = f"expected 1 to {len(sampled) - 1}" if len(sampled) > 1 else "it has a single one"
        text = f"{step}: a branch needs a response after it, and {episode.id} has {len(sampled)}; {expected}"
        raise SpecError([Problem("--step", text)])
    (history, place), (following, end) = sampled[step - 1 : step + 1]
    return Branch(stage, episode, step, history.messages[place], following.messages[end - 1])


def continued(
    place: Workplace, branch: Branch, answers: Sequence[str | None], count: int, temperature: float | None, trust: bool
) -> list[list[Trajectory]]:
    """Return `count` continuations for each answer; None is the recorded one. The seeds of the continuations are the
    same for each answer. temperature: None for that of the episode or, if that is 0, of the run's collections.

    Raises SpecError for an agent that is not the agent loop and for an environment that does not repeat the recorded
    episode, and TooManyFailures."""
    request = Request.from_json(branch.stage.request)
    admit_request(request, place.run.short, trust)
    _, spec, inputs, _ = resolve(request, place.context)
    assert isinstance(spec, CollectStage | EvaluateStage)
    if spec.agent.own is not None or spec.agent.roles is not None:
        key = spec.agent.own or "agent.roles"
        raise SpecError([Problem(key, "replay continues the conversation of the agent loop; expected null")])
    if isinstance(spec, CollectStage) and spec.collect.player.both_sides:
        raise SpecError([Problem("collect.opponent", "replay plays one side only; expected environment")])
    spec = with_tasks(spec, inputs)
    limits = spec.collect if isinstance(spec, CollectStage) else spec.evaluate
    recorded = {field.name: branch.episode.sampling.get(field.name) for field in dataclasses.fields(Sampling)}
    sampling = Sampling(**{name: value for name, value in recorded.items() if value is not None})
    temperature = temperature or sampling.temperature or place.spec.collect.temperature
    requests = [
        EpisodeRequest(
            scenario=branch.episode.scenario,
            sample=number,
            seed=derived_seed(branch.episode.sampling["seed"], f"replay/{number}"),
            sampling=replace(sampling, temperature=temperature),
            max_turns=spec.agent.max_turns,
        )
        for number in range(count)
    ]
    engine = Actor(spec.model, spec.inference, inputs.get("policy")).engine(place.context)
    results = []
    for answer in answers:
        player = CounterfactualPlayer(AgentLoop(spec.agent.presentation()), branch.episode, branch.step, answer)
        listener = _Episodes()
        play_episodes(engine, spec.environment.build, requests, limits, player=player, listener=listener)
        results.append(listener.episodes)
    return results


class _Episodes(EpisodeListener):
    """Receiver that keeps the finished episodes."""

    def __init__(self) -> None:
        self.episodes: list[Trajectory] = []

    def end(self, trajectory: Trajectory, seconds: float) -> None:
        self.episodes += [trajectory] * (trajectory.failure is None)


def outcomes(branch: Branch, episodes: Iterable[Trajectory]) -> dict[str, Any]:
    """Return the success rate of continuations, and the rate at which their outcome differs from the recorded one, each
    with its 95 % interval."""
    successes = [episode.success for episode in episodes]
    n, wins = len(successes), sum(successes)
    changed = n - wins if branch.episode.success else wins
    rates = {"success": wins, "changed": changed}
    return {
        "n": n,
        "successes": wins,
        **{name: {"rate": value / n, "interval": list(wilson(value, n))} for name, value in rates.items()},
    }


def effect(original: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the change in the success rate that another answer makes, with its 95 % interval."""
    counts = [(float(arm["successes"]), float(arm["n"])) for arm in (other, original)]
    change = other["success"]["rate"] - original["success"]["rate"]
    return {"change": change, "interval": list(independent_difference(*counts))}
