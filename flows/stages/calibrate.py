"""Calibrate stage: scores episodes several times and records their ground truth.

Each repetition builds the reward from another seed, if the reward or a nested reward has a parameter `seed`, and shows
each group in another order: shuffled, then rotated by a part of its length, so that an episode appears at different
positions. `components.evaluation.calibration` computes the measures.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from components.artifacts import Draft
from components.errors import BudgetExceeded, JudgeError
from components.inference.spec import EmbeddedSpec, InferenceSpec
from components.models.spec import ModelSpec
from components.rewards.llm.spec import asks_policy
from components.rewards.protocol import GroupReward
from components.rewards.spec import JudgeSpec
from components.specs import Target
from components.specs.parameters import settable
from components.trajectories.schema import SCHEMA_VERSION, Score, Trajectory
from flows.stages import judge
from flows.stages.base import Context, Inputs, Stage, StageSpec, base_model, with_progress

TABLE = "judged.json"


class CalibrateStage(StageSpec):
    reward: Target
    truth: Target | None = None
    """Reward that defines the ground truth; None: success, or human scores."""
    people: dict[str, float] | None = None
    """Human scores by episode id; episodes without a score are skipped."""
    repeats: int = Field(2, ge=1)
    model: ModelSpec | None = None
    """Model of the scored episodes; required by rewards that compute with a model, and part of the key only for
    them."""
    judge: JudgeSpec = JudgeSpec()
    """Concurrency and budget; not part of the key."""
    inference: InferenceSpec = EmbeddedSpec()
    """Engine of the base model; used only by a reward that queries the policy."""

    def key_part(self) -> dict[str, Any]:
        rewards = [target for target in (self.reward, self.truth) if target is not None]
        computes = self.model is not None and any(target.has("use") for target in rewards)
        return {
            "reward": self.reward.resolved(),
            "truth": self.truth and self.truth.resolved(),
            "people": self.people,
            "repeats": self.repeats,
            **({"model": base_model(self.model)} if computes and self.model else {}),
            **(self.inference.key_part() if any(map(asks_policy, rewards)) else {}),
        }


def calibrate(spec: CalibrateStage, inputs: Inputs, draft: Draft, context: Context) -> dict[str, float]:
    """Write `judged.json`, with a row for each episode, and the scores of each repetition, `scores-1.parquet` and so
    on. Inputs: collections or evaluations, under any name; if there are several, the name prefixes the ids of their
    episodes. Failed episodes are skipped."""
    from components.evaluation.calibration import written
    from components.trajectories.store import write_scores

    everything = list(_episodes(inputs))
    groups = _groups([episode for episode in everything if episode.failure is None], spec.people)
    episodes = [episode for group in groups.values() for episode in group]
    truth = _truth(spec, episodes, context)
    scores: list[dict[str, Score]] = []
    places: list[dict[str, float]] = []
    start, spent = time.monotonic(), 0.0
    for turn in range(spec.repeats):
        reward = reseeded(spec.reward, turn).build()
        shown = {name: rotated(name, group, turn, spec.repeats, context.seed) for name, group in groups.items()}
        ordered = [episode for group in shown.values() for episode in group]
        stream = _scores(spec, reward, ordered, context, f"scores-{turn}", spent, keep_answers=turn == 0)
        scores.append({score.trajectory_id: score for score in with_progress(stream, len(ordered), context.progress)})
        spent += sum(score.cost or 0.0 for score in scores[-1].values())
        places.append(_places(reward, shown))
        write_scores(draft.path / f"scores-{turn + 1}.parquet", [scores[-1][episode.id] for episode in episodes])
    seconds = time.monotonic() - start
    _require_scores(spec.reward.target, scores)
    rows = [
        {
            "id": episode.id,
            "group": episode.group,
            "truth": truth[episode.id],
            "length": written(episode),
            "scores": [repetition[episode.id].reward for repetition in scores],
            "positions": [positions.get(episode.id) for positions in places],
        }
        for episode in episodes
        if truth[episode.id] is not None
    ]
    (draft.path / TABLE).write_text(json.dumps(rows, ensure_ascii=False) + "\n")
    all_scores = [score for repetition in scores for score in repetition.values()]
    costs = [score.cost for score in all_scores]
    priced = [cost for cost in costs if cost is not None]
    cost = {"cost": sum(priced)} if len(priced) == len(costs) else {}
    return {
        "episodes": float(len(episodes)),
        "failed": float(sum(episode.failure is not None for episode in everything)),
        "without_truth": float(len(episodes) - len(rows)),
        "judgements": float(len(all_scores)),
        "unscored": float(sum(score.reward is None for score in all_scores)),
        "judging_seconds": seconds,
        **cost,
    }


def reseeded(reward: Target, turn: int) -> Target:
    """Return the reward for repetition `turn`, from 0: each parameter `seed`, its own and those of nested rewards, is
    increased by `turn`."""

    def shifted(value: Any) -> Any:
        if isinstance(value, Target):
            return reseeded(value, turn)
        if isinstance(value, Mapping):
            return {name: shifted(item) for name, item in value.items()}
        return [shifted(item) for item in value] if isinstance(value, list) else value

    arguments = {name: shifted(value) for name, value in reward.arguments.items()}
    declared = settable(reward.factory(), reward.called_with).get("seed")
    if declared is not None:
        seed = arguments.get("seed", declared.default)
        if isinstance(seed, int):
            arguments["seed"] = seed + turn
    return reward.model_copy(update={"arguments": arguments}) if turn else reward


def rotated(name: str, group: Sequence[Trajectory], turn: int, turns: int, seed: int) -> list[Trajectory]:
    """Return the group in the order of repetition `turn` of `turns`."""
    order = list(group)
    random.Random(f"{seed}-{name}").shuffle(order)
    offset = turn * len(order) // turns if turns <= len(order) else turn % len(order)
    return order[offset:] + order[:offset]


def _scores(
    spec: CalibrateStage,
    reward: Any,
    trajectories: Sequence[Trajectory],
    context: Context,
    name: str,
    spent: float = 0.0,
    keep_answers: bool = True,
) -> Iterator[Score]:
    """Yield the scores of a reward within the remaining budget. Raises BudgetExceeded."""
    settings = spec.judge
    if settings.budget is not None:
        if spent >= settings.budget:
            raise BudgetExceeded(
                f"judge.budget={settings.budget:g} is spent ({spent:.4g}): finished scores are kept, and the same "
                "command with a higher budget resumes"
            )
        settings = settings.model_copy(update={"budget": settings.budget - spent})
    with judge.judging(reward, context, settings, spec.model, None, spec.inference, name, keep_answers) as judged:
        yield from judged(trajectories)


def _places(reward: Any, shown: Mapping[str, Sequence[Trajectory]]) -> dict[str, float]:
    """Return the position of each episode in its group, from 0 (first) to 1 (last), by episode id; none for a group of
    one episode. A reward that shuffles groups itself reports the positions by a method `places(group)`."""
    if not isinstance(reward, GroupReward):
        return {}
    positions: dict[str, float] = {}
    for group in shown.values():
        places = reward.places(group) if hasattr(reward, "places") else range(len(group))
        last = max(places, default=0)
        if last > 0:
            positions |= {episode.id: place / last for episode, place in zip(group, places, strict=True)}
    return positions


def _episodes(inputs: Inputs) -> Iterator[Trajectory]:
    from components.trajectories.store import read_trajectories

    for name, artifact in sorted(inputs.items()):
        for episode in read_trajectories(artifact.path / "trajectories.parquet"):
            if len(inputs) > 1:
                episode.id = f"{name}:{episode.id}"
            yield episode


def _groups(episodes: Sequence[Trajectory], people: Mapping[str, float] | None) -> dict[str, list[Trajectory]]:
    """Return the episodes by scenario; with human scores as ground truth, only the scored ones."""
    from components.trajectories.groups import by_scenario

    return by_scenario(episode for episode in episodes if people is None or episode.id in people)


def _truth(spec: CalibrateStage, episodes: Sequence[Trajectory], context: Context) -> dict[str, float | None]:
    if spec.people is not None:
        return {episode.id: spec.people[episode.id] for episode in episodes}
    if spec.truth is None:
        return {episode.id: float(episode.success) for episode in episodes}
    stream = _scores(spec, spec.truth.build(), episodes, context, "truth")
    scores = {score.trajectory_id: score for score in stream}
    _require_scores(f"calibrate.truth: {spec.truth.target}", [scores])
    return {name: score.reward for name, score in scores.items()}


def _require_scores(reward: str, scores: Sequence[Mapping[str, Score]]) -> None:
    """Raise JudgeError if no episode was scored."""
    all_scores = [score for turn in scores for score in turn.values()]
    failures = [score.failure for score in all_scores if score.failure is not None]
    if failures and not any(score.reward is not None for score in all_scores):
        cause = f"{failures[0].kind}: {failures[0].message}"
        raise JudgeError(f"{reward} scored none of {len(all_scores)} episodes; first failure: {cause}")


STAGE = Stage(
    "calibrate",
    3,
    CalibrateStage,
    "calibration",
    SCHEMA_VERSION,
    calibrate,
    files={TABLE: "ground truth and scores of each episode", "scores-*.parquet": "scores of each repetition"},
    inputs={"*": "trajectories or evaluation"},
    order=90,
    unit="scores",
    placed=False,
)
