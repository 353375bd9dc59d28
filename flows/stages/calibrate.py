"""Calibrate: episodes judged several times over, and the truth about each, from file to file.

Each time the reward is built from another seed, where it has a parameter `seed` (of its own, or of a reward inside it),
and each group is shown in another order: a shuffled one, turned by a part of its length from time to time, so that
every episode comes to stand at other places. What is measured from that, `components.evaluation.calibration` says.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from components.artifacts import Draft
from components.errors import BudgetSpent, JudgeError
from components.inference.spec import EmbeddedSpec, InferenceSpec
from components.models.spec import ModelSpec
from components.rewards.llm.spec import asks_policy
from components.rewards.protocol import GroupReward
from components.rewards.spec import JudgeSpec
from components.specs import Target
from components.specs.target import settable
from components.trajectories.schema import SCHEMA_VERSION, Score, Trajectory
from flows.stages import judge
from flows.stages.base import Context, Inputs, Stage, StageSpec, base_model, followed

TABLE = "judged.json"


class CalibrateStage(StageSpec):
    reward: Target
    truth: Target | None = None
    """None: success, or what people say."""
    people: dict[str, float] | None = None
    """What people say of episodes, by id; those that they say nothing of are left out."""
    repeats: int = Field(2, ge=1)
    model: ModelSpec | None = None
    """Whose episodes are judged; needed by rewards that compute with a model, and of their keys only."""
    judge: JudgeSpec = JudgeSpec()
    """How fast, and for how much; in no key."""
    inference: InferenceSpec = EmbeddedSpec()
    """Engine of the policy; read only by a reward that asks the policy itself: the model as it is."""

    def key_part(self) -> dict[str, Any]:
        rewards = [one for one in (self.reward, self.truth) if one is not None]
        computes = self.model is not None and any(one.has("use") for one in rewards)
        return {
            "reward": self.reward.resolved(),
            "truth": self.truth and self.truth.resolved(),
            "people": self.people,
            "repeats": self.repeats,
            **({"model": base_model(self.model)} if computes and self.model else {}),
            **(self.inference.key_part() if any(map(asks_policy, rewards)) else {}),
        }


def calibrate(spec: CalibrateStage, inputs: Inputs, draft: Draft, context: Context) -> dict[str, float]:
    """Writes `judged.json`, a row for each episode (`rows`), and what the reward said each time, `scores-1.parquet` and
    so on. Inputs: collections or evaluations, under any name; of several, the name stands before the ids of their
    episodes. Failed episodes are left out."""
    from components.evaluation.calibration import written
    from components.trajectories.store import write_scores

    everything = list(_episodes(inputs))
    groups = _known([one for one in everything if one.failure is None], spec.people)
    episodes = [one for group in groups.values() for one in group]
    truth = _truth(spec, episodes, context)
    scores: list[dict[str, Score]] = []
    places: list[dict[str, float]] = []
    start, spent = time.monotonic(), 0.0
    for turn in range(spec.repeats):
        reward = reseeded(spec.reward, turn).build()
        shown = {name: turned(name, group, turn, spec.repeats, context.seed) for name, group in groups.items()}
        ordered = [one for group in shown.values() for one in group]
        found = _judged(spec, reward, ordered, context, f"scores-{turn}", spent, keep_answers=turn == 0)
        scores.append({score.trajectory_id: score for score in followed(found, len(ordered), context.progress)})
        spent += sum(score.cost or 0.0 for score in scores[-1].values())
        places.append(_places(reward, shown))
        write_scores(draft.path / f"scores-{turn + 1}.parquet", [scores[-1][one.id] for one in episodes])
    seconds = time.monotonic() - start
    _demand_some(spec.reward.target, scores)
    rows = [
        {
            "id": one.id,
            "group": one.group,
            "truth": truth[one.id],
            "length": written(one),
            "scores": [said[one.id].reward for said in scores],
            "positions": [at.get(one.id) for at in places],
        }
        for one in episodes
        if truth[one.id] is not None
    ]
    (draft.path / TABLE).write_text(json.dumps(rows, ensure_ascii=False) + "\n")
    asked = [score for said in scores for score in said.values()]
    costs = [score.cost for score in asked]
    priced = [cost for cost in costs if cost is not None]
    known = {"cost": sum(priced)} if len(priced) == len(costs) else {}
    return {
        "episodes": float(len(episodes)),
        "failed": float(sum(one.failure is not None for one in everything)),
        "without_truth": float(len(episodes) - len(rows)),
        "judgements": float(len(asked)),
        "unscored": float(sum(score.reward is None for score in asked)),
        "judging_seconds": seconds,
        **known,
    }


def reseeded(reward: Target, turn: int) -> Target:
    """The reward as it is to judge the turn'th time: every parameter `seed`, of it and of the rewards inside it, is
    higher by `turn`. The same where there is none, and the first time."""

    def moved(value: Any) -> Any:
        if isinstance(value, Target):
            return reseeded(value, turn)
        if isinstance(value, Mapping):
            return {name: moved(one) for name, one in value.items()}
        return [moved(one) for one in value] if isinstance(value, list) else value

    arguments = {name: moved(value) for name, value in reward.arguments.items()}
    declared = settable(reward.factory(), reward.called_with).get("seed")
    if declared is not None:
        seed = arguments.get("seed", declared.default)
        if isinstance(seed, int):
            arguments["seed"] = seed + turn
    return reward.model_copy(update={"arguments": arguments}) if turn else reward


def turned(name: str, group: Sequence[Trajectory], turn: int, turns: int, seed: int) -> list[Trajectory]:
    """The group in the order in which it is shown the turn'th time of `turns`."""
    order = list(group)
    random.Random(f"{seed}-{name}").shuffle(order)
    by = turn * len(order) // turns if turns <= len(order) else turn % len(order)
    return order[by:] + order[:by]


def _judged(
    spec: CalibrateStage,
    reward: Any,
    trajectories: Sequence[Trajectory],
    context: Context,
    name: str,
    spent: float = 0.0,
    keep_answers: bool = True,
) -> Iterator[Score]:
    """The scores by a reward, which has of the budget what is left of it."""
    how = spec.judge
    if how.budget is not None:
        if spent >= how.budget:
            raise BudgetSpent(
                f"judge.budget={how.budget:g} is spent ({spent:.4g}): what was judged is kept, and the same command "
                "with a higher budget goes on"
            )
        how = how.model_copy(update={"budget": how.budget - spent})
    with judge.judging(reward, context, how, spec.model, None, spec.inference, name, keep_answers) as judged:
        yield from judged(trajectories)


def _places(reward: Any, shown: Mapping[str, Sequence[Trajectory]]) -> dict[str, float]:
    """From 0, the first, to 1, the last of its group; none of an episode that is shown alone. A reward that shuffles
    them itself says with a method `places(group)` at which place each stood."""
    if not isinstance(reward, GroupReward):
        return {}
    found: dict[str, float] = {}
    for group in shown.values():
        stood = reward.places(group) if hasattr(reward, "places") else range(len(group))
        last = max(stood, default=0)
        if last > 0:
            found |= {one.id: place / last for one, place in zip(group, stood, strict=True)}
    return found


def _episodes(inputs: Inputs) -> Iterator[Trajectory]:
    from components.trajectories.store import read_trajectories

    for name, artifact in sorted(inputs.items()):
        for one in read_trajectories(artifact.path / "trajectories.parquet"):
            if len(inputs) > 1:
                one.id = f"{name}:{one.id}"
            yield one


def _known(episodes: Sequence[Trajectory], people: Mapping[str, float] | None) -> dict[str, list[Trajectory]]:
    """The episodes by scenario; where people say the truth, those of which they say something."""
    from components.trajectories.groups import by_scenario

    return by_scenario(one for one in episodes if people is None or one.id in people)


def _truth(spec: CalibrateStage, episodes: Sequence[Trajectory], context: Context) -> dict[str, float | None]:
    if spec.people is not None:
        return {one.id: spec.people[one.id] for one in episodes}
    if spec.truth is None:
        return {one.id: float(one.success) for one in episodes}
    found = {one.trajectory_id: one for one in _judged(spec, spec.truth.build(), episodes, context, "truth")}
    _demand_some(f"calibrate.truth: {spec.truth.target}", [found])
    return {name: score.reward for name, score in found.items()}


def _demand_some(what: str, scores: Sequence[Mapping[str, Score]]) -> None:
    """Raises JudgeError where there is not one score."""
    said = [score for turn in scores for score in turn.values()]
    failures = [score.failure for score in said if score.failure is not None]
    if failures and not any(score.reward is not None for score in said):
        why = f"{failures[0].kind}: {failures[0].message}"
        raise JudgeError(f"{what} could score none of {len(said)} episodes; the first one: {why}")


STAGE = Stage("calibrate", 2, CalibrateStage, "calibration", SCHEMA_VERSION, calibrate)
