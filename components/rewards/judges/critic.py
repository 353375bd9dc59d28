"""Absolute judgement of an episode by a language model, along dimensions.

    score = Σ_d weight_d · score_d / Σ_d weight_d                     over dimensions d, scores from 0 to 1

With `turn_weight` w, each of the T turns is scored as well, and

    R     = (1 - w) · score + w · mean_t score_t
    r_t   = w · score_t / T,  at the last turn also (1 - w) · score      the step rewards; they add up to R

The scores of turns are also the components `turn/0`, `turn/1` and so on: step labels that the head `turn` of a process
reward model learns. With w = 0 they are labels only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from components.rewards.llm.answers import UNIT, read_scores
from components.rewards.llm.client import JudgeClient
from components.rewards.llm.judge_reward import SPREAD, EpisodeJudgeReward, Opinion, combine_opinions
from components.rewards.llm.question import ask_for_json
from components.rewards.llm.rows import by_name, check_names, object_schema, raise_if_invalid, rows_example, rows_schema
from components.rewards.llm.spec import JudgeModel
from components.rewards.llm.transcript import ONLY_DATA, about, message_views, turns
from components.specs import Spec
from components.specs.registered import registered
from components.trajectories.schema import Score, Trajectory


class Dimension(Spec):
    """Dimension along which an episode is scored."""

    description: str = Field(min_length=1)
    """Description of the dimension for the judge."""
    weight: float = Field(1.0, ge=0)
    """Weight in the score; with 0 the dimension is only recorded."""


DIMENSIONS = {
    "understanding": Dimension(description="Did it grasp what was asked of it, and what users and tools told it?"),
    "reasoning": Dimension(description="Does each step follow from what it knew, and do its conclusions hold?"),
    "efficiency": Dimension(description="Did it get there without detours, repetitions and steps of no use?"),
    "recovery": Dimension(
        description="Did it see what went wrong, and put it right? Where nothing went wrong, the full score."
    ),
}
TURN = "turn"
"""Prefix of components: TURN/i is the judge's score of turn i."""
RESERVED_NAMES = ("critic", SPREAD, TURN)
"""Component names that dimensions may not use."""

TASK = """\
You judge how well an AI agent did its task. The task is what the messages before its first answer ask for. Give it a \
score from 0 (bad) to 1 (could not be better) for each of these:
{dimensions}
{turns}
{data}

Answer with JSON, in which each dimension{and_turn} has its explanation and its score under its {called}:
{{"scores": {rows}{turn_rows}}}"""
ROW = '{"explanation": one short sentence, "score": from 0 to 1}'
TURNS = """
The agent's turns are numbered from 0 to {last}. Give each of them a score too: 1 where it brought the agent closer to \
the goal, 0 where it led away from it or was wrong, 0.5 where it did neither.
"""


def _checked_dimensions(dimensions: dict[str, Dimension]) -> dict[str, Dimension]:
    check_names(dimensions, RESERVED_NAMES)
    if not any(dimension.weight for dimension in dimensions.values()):
        raise ValueError("a weight above 0 in one dimension at least")
    return dimensions


@registered("reward.critic")
class Critic(EpisodeJudgeReward):
    """Absolute score of each episode, along dimensions.

    Args:
        model: Judge model (`judge_model`). The models of a list judge independently, and the score is their mean; a
            judge that did not score all dimensions in two attempts is left out.
        dimensions: By name: description and weight in the score; null takes `DIMENSIONS`.
        turn_weight: Weight of the turns in the score, 0 to 1; with null, turns are not scored.

    Components of a Score: `critic` (the score of the dimensions), the dimensions by name, with `turn_weight` the turns
    as `turn/0`, `turn/1` and so on, and with several judges each one's score under `judge/MODEL` and `spread`, their
    standard deviation (of the population).
    """

    def __init__(
        self,
        model: JudgeModel | Annotated[list[JudgeModel], Field(min_length=1)],
        dimensions: Annotated[dict[str, Dimension], Field(min_length=1), AfterValidator(_checked_dimensions)]
        | None = None,
        turn_weight: Annotated[float, Field(ge=0, le=1)] | None = None,
    ):
        super().__init__(model)
        self.dimensions = dimensions or DIMENSIONS
        self.turn_weight = turn_weight

    async def opinion(self, client: JudgeClient, trajectory: Trajectory) -> Opinion:
        """Return the opinion of one judge on an episode."""
        count = turns(trajectory) if self.turn_weight is not None else 0
        histories = message_views(trajectory, numbered=count > 0)
        messages = about(trajectory, histories, self._task(count), client.spec.longest)
        names = list(self.dimensions)
        judgement = await ask_for_json(client, messages, _schema(names, count), lambda data: _parse(data, names, count))
        parsed = judgement.value
        if parsed is None:
            return Opinion(None, cost=judgement.cost, reason=judgement.reason)
        parts = {name: parsed.scores[name] for name in names if name in parsed.scores}
        if len(parts) < len(names) or len(parsed.turns) < count:
            return Opinion(None, parts | _turn_components(parsed.turns), cost=judgement.cost, reason=judgement.reason)
        score = self.weighted_score(parts)
        explanation = "\n".join(f"{name} {parts[name]:.2g}: {parsed.explanations.get(name, '')}" for name in names)
        labels = [parsed.turns[turn] for turn in range(count)]
        return Opinion(
            score, {"critic": score} | parts | _turn_components(parsed.turns), explanation, judgement.cost, turns=labels
        )

    def weighted_score(self, scores: Mapping[str, float]) -> float:
        """Return the weighted mean of the dimensions."""
        weights = {name: dimension.weight for name, dimension in self.dimensions.items()}
        return sum(weight * scores[name] for name, weight in weights.items()) / sum(weights.values())

    def score(self, trajectory: Trajectory, opinions: Mapping[str, Opinion]) -> Score:
        score = combine_opinions(trajectory, opinions)
        turns_by_judge = [opinion.turns for opinion in opinions.values() if opinion.score is not None]
        if self.turn_weight is None or not turns_by_judge or not turns_by_judge[0]:
            return score
        assert score.reward is not None
        labels = [fmean(turn_scores) for turn_scores in zip(*turns_by_judge, strict=True)]
        steps = [self.turn_weight * label / len(labels) for label in labels]
        steps[-1] += (1 - self.turn_weight) * score.reward
        return replace(score, reward=sum(steps), step_rewards=steps)

    def _task(self, count: int) -> str:
        dimensions = "\n".join(f"- {name}: {dimension.description}" for name, dimension in self.dimensions.items())
        turns = TURNS.format(last=count - 1) if count else ""
        turn_rows = f', "turns": {rows_example(_turn_names(count), ROW)}' if count else ""
        return TASK.format(
            dimensions=dimensions,
            turns=turns,
            data=ONLY_DATA,
            and_turn=" and each turn" if count else "",
            called="name or number" if count else "name",
            rows=rows_example(list(self.dimensions), ROW),
            turn_rows=turn_rows,
        )


class _Parsed:
    def __init__(self, scores: dict[str, float], explanations: dict[str, str], turns: dict[int, float]):
        self.scores = scores
        self.explanations = explanations
        self.turns = turns


def _parse(data: Mapping[str, Any], names: Sequence[str], count: int) -> _Parsed:
    """Return the parsed answer. Raises InvalidAnswer, which names the missing, ambiguous and unknown names."""
    rows, problems = by_name(data["scores"], names, "dimension", "score", "dimensions")
    numbers = _turn_names(count)
    turn_rows, turn_problems = by_name(data.get("turns"), numbers, "turn", "score", "turns") if count else ({}, {})
    given_scores = {name: row.get("score") for name, row in rows.items()}
    given_turns = {f"turn {turn}": row.get("score") for turn, row in turn_rows.items()}
    scores, score_problems = read_scores(given_scores | given_turns)  # together: they are on one scale
    parsed = _Parsed(
        {name: scores[name] for name in names if name in scores},
        {name: str(row.get("explanation") or "") for name, row in rows.items()},
        {turn: scores[f"turn {turn}"] for turn in range(count) if f"turn {turn}" in scores},
    )
    usable = parsed if scores else None
    raise_if_invalid(score_problems | problems, names, "dimensions", usable)
    raise_if_invalid(turn_problems, numbers, "turns", usable)
    return parsed


def _turn_components(of_turns: Mapping[int, float]) -> dict[str, float]:
    return {f"{TURN}/{turn}": score for turn, score in of_turns.items()}


def _turn_names(count: int) -> list[str]:
    return [str(turn) for turn in range(count)]


def _schema(names: Sequence[str], count: int) -> dict[str, Any]:
    row = {"explanation": {"type": "string"}, "score": UNIT.schema}
    parts = {"scores": rows_schema(names, row)}
    if count:
        parts["turns"] = rows_schema(_turn_names(count), row)
    return object_schema(parts)
