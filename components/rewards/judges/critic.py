"""Absolute judgement of an episode by a language model, along dimensions.

    score = Σ_d weight_d · score_d / Σ_d weight_d                     over dimensions d, scores from 0 to 1

With `turn_weight` w, each of the T turns is scored as well, and

    R     = (1 - w) · score + w · mean_t score_t
    r_t   = w · score_t / T,  at the last turn also (1 - w) · score      the step rewards; they add up to R

The scores of turns are also the components `turn/0`, `turn/1` and so on: labels of steps, which the head `turn` of a
process reward model learns. With w = 0 they are labels alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Field

from components.rewards.llm.answers import read_scores
from components.rewards.llm.judge_reward import SPREAD, EpisodeJudgeReward, Opinion, combine_opinions
from components.rewards.llm.question import ask_for_json
from components.rewards.llm.rows import by_name, raise_if_invalid
from components.rewards.llm.spec import JudgeModel
from components.rewards.llm.transcript import ONLY_DATA, about, shown, turns
from components.specs import Spec
from components.specs.registered import registered
from components.trajectories.schema import Score, Trajectory

if TYPE_CHECKING:
    from components.rewards.llm.client import JudgeClient


class Dimension(Spec):
    """One side of how well an episode went."""

    description: str = Field(min_length=1)
    """What the judge looks at."""
    weight: float = Field(1.0, ge=0)
    """In the score; 0 only shows it."""


DIMENSIONS = {
    "understanding": Dimension(description="Did it grasp what was asked of it, and what users and tools told it?"),
    "reasoning": Dimension(description="Does each step follow from what it knew, and do its conclusions hold?"),
    "efficiency": Dimension(description="Did it get there without detours, repetitions and steps of no use?"),
    "recovery": Dimension(
        description="Did it see what went wrong, and put it right? Where nothing went wrong, the full score."
    ),
}
TURN = "turn"
"""Component TURN/i: what the judge says of turn i."""
RESERVED_NAMES = ("critic", SPREAD, TURN)
"""Names of other components."""

TASK = """\
You judge how well an AI agent did its task. The task is what the messages before its first answer ask for. Give it a \
score from 0 (bad) to 1 (could not be better) for each of these:
{dimensions}
{turns}
{data}

Answer with JSON: {{"scores": [{{"dimension": its name, "explanation": one short sentence, "score": from 0 to 1}}, \
…]{wanted}}}, with each of the dimensions once: {names}."""
TURNS = """
The agent's turns are numbered from 0 to {last}. Give each of them a score too: 1 where it brought the agent closer to \
the goal, 0 where it led away from it or was wrong, 0.5 where it did neither.
"""
WANTED = ', "turns": [{"turn": its number, "explanation": a few words, "score": from 0 to 1}, …]'


def _usable(dimensions: dict[str, Dimension]) -> dict[str, Dimension]:
    wrong = [name for name in dimensions if name in RESERVED_NAMES or not name.replace("-", "_").isidentifier()]
    if wrong:
        raise ValueError(
            f"names of letters, digits, - and _, other than {', '.join(RESERVED_NAMES)}; got {', '.join(wrong)}"
        )
    if not any(one.weight for one in dimensions.values()):
        raise ValueError("a weight above 0 in one dimension at least")
    return dimensions


@registered("reward.critic")
class Critic(EpisodeJudgeReward):
    """Scores each episode by itself, along dimensions.

    Args:
        model: Who judges (`judge_model`). Of a list each judges alone, and the score is their mean; one that did not
            score all dimensions, though it was asked twice, is left out of it.
        dimensions: By name: what the judge looks at, and the weight in the score; null takes `DIMENSIONS`.
        turn_weight: Weight of the turns in the score, 0 to 1; null does not have turns scored.

    Components of a Score: `critic` (the score of the dimensions), the dimensions by name, with `turn_weight` the turns
    as `turn/0`, `turn/1` and so on, and with several judges each one's score under `judge/MODEL` and `spread`, their
    standard deviation (of the population).
    """

    def __init__(
        self,
        model: JudgeModel | Annotated[list[JudgeModel], Field(min_length=1)],
        dimensions: Annotated[dict[str, Dimension], Field(min_length=1), AfterValidator(_usable)] | None = None,
        turn_weight: Annotated[float, Field(ge=0, le=1)] | None = None,
    ):
        super().__init__(model)
        self.dimensions = dimensions or DIMENSIONS
        self.turn_weight = turn_weight

    async def opinion(self, client: JudgeClient, trajectory: Trajectory) -> Opinion:
        """What one judge says of an episode."""
        count = turns(trajectory) if self.turn_weight is not None else 0
        said = shown(trajectory, numbered=count > 0)
        messages = about(trajectory, said, self._task(count), client.spec.longest)
        names = list(self.dimensions)
        found = await ask_for_json(client, messages, _schema(names, count), lambda given: _read(given, names, count))
        read = found.value
        if read is None:
            return Opinion(None, cost=found.cost, why=found.why)
        parts = {name: read.scores[name] for name in names if name in read.scores}
        if len(parts) < len(names) or len(read.turns) < count:
            return Opinion(None, parts | _labels(read.turns), cost=found.cost, why=found.why)
        score = self.weighed(parts)
        said_of = "\n".join(f"{name} {parts[name]:.2g}: {read.said.get(name, '')}" for name in names)
        labels = [read.turns[turn] for turn in range(count)]
        return Opinion(score, {"critic": score} | parts | _labels(read.turns), said_of, found.cost, turns=labels)

    def weighed(self, scores: Mapping[str, float]) -> float:
        """The weighted mean of the dimensions."""
        weights = {name: one.weight for name, one in self.dimensions.items()}
        return sum(weight * scores[name] for name, weight in weights.items()) / sum(weights.values())

    def score(self, trajectory: Trajectory, opinions: Mapping[str, Opinion]) -> Score:
        found = combine_opinions(trajectory, opinions)
        judged = [one.turns for one in opinions.values() if one.score is not None]
        if self.turn_weight is None or not judged or not judged[0]:
            return found
        assert found.reward is not None
        labels = [fmean(said) for said in zip(*judged, strict=True)]
        steps = [self.turn_weight * label / len(labels) for label in labels]
        steps[-1] += (1 - self.turn_weight) * found.reward
        return replace(found, reward=sum(steps), step_rewards=steps)

    def _task(self, count: int) -> str:
        listed = "\n".join(f"- {name}: {one.description}" for name, one in self.dimensions.items())
        asked = TURNS.format(last=count - 1) if count else ""
        names = ", ".join(self.dimensions)
        return TASK.format(dimensions=listed, turns=asked, data=ONLY_DATA, wanted=WANTED if count else "", names=names)


class _Said:
    def __init__(self, scores: dict[str, float], said: dict[str, str], turns: dict[int, float]):
        self.scores = scores
        self.said = said
        self.turns = turns


def _read(given: Mapping[str, Any], names: Sequence[str], count: int) -> _Said:
    """Raises InvalidAnswer, which names what is missing, twice there or not known."""
    known, wrong = by_name(given["scores"], names, "dimension", "score", "dimensions")
    numbers = [str(turn) for turn in range(count)]
    by_turn, wrong_turns = by_name(given.get("turns"), numbers, "turn", "score", "turns") if count else ({}, {})
    given_scores = {name: row.get("score") for name, row in known.items()}
    given_turns = {f"turn {turn}": row.get("score") for turn, row in by_turn.items()}
    scores = read_scores(given_scores | given_turns)  # together: they are on one scale
    unread = [name for name in [*given_scores, *given_turns] if name not in scores]
    read = _Said(
        {name: scores[name] for name in names if name in scores},
        {name: str(row.get("explanation") or "") for name, row in known.items()},
        {turn: scores[f"turn {turn}"] for turn in range(count) if f"turn {turn}" in scores},
    )
    rest = read if scores else None
    raise_if_invalid({"has no score that is a number for": unread} | wrong, names, "dimensions", rest)
    raise_if_invalid(wrong_turns, numbers, "turns", rest)
    return read


def _labels(of_turns: Mapping[int, float]) -> dict[str, float]:
    return {f"{TURN}/{turn}": score for turn, score in of_turns.items()}


def _schema(names: Sequence[str], count: int) -> dict[str, Any]:
    def rows(key: str, kind: dict[str, Any]) -> dict[str, Any]:
        properties = {key: kind, "explanation": {"type": "string"}, "score": {"type": "number"}}
        row = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
        return {"type": "array", "items": row}

    wanted = {"scores": rows("dimension", {"type": "string", "enum": list(names)})}
    if count:
        wanted["turns"] = rows("turn", {"type": "integer"})
    return {"type": "object", "properties": wanted, "required": list(wanted), "additionalProperties": False}
