"""Checklist that a language model evaluates for each episode.

    score = Σ_i weight_i · met_i / Σ_i weight_i        over the items i that apply; 0 if a required one is not met

met_i is 1 or 0. Items come from the configuration, or from each scenario's input, or both. An item that does not apply
to an episode does not count; if none applies, the episode is unscored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from components.errors import Problem, SpecError
from components.rewards.llm.client import JudgeClient
from components.rewards.llm.judge_reward import SPREAD, EpisodeJudgeReward, Opinion
from components.rewards.llm.question import ask_for_json
from components.rewards.llm.rows import by_name, check_names, object_schema, raise_if_invalid, rows_example, rows_schema
from components.rewards.llm.spec import JudgeModel
from components.rewards.llm.transcript import ONLY_DATA, about, as_text, message_views
from components.specs import Spec, validate
from components.specs.registered import registered
from components.trajectories.schema import Trajectory


class RubricItem(Spec):
    """Checklist item: a property that an episode should have."""

    text: str = Field(min_length=1)
    """Statement that is true of an episode that meets the item."""
    weight: float = Field(1.0, gt=0)
    """Weight in the score."""
    required: bool = False
    """If true, the score is 0 when the item is not met."""


Answers = dict[str, bool | None]
"""Answers by item: True if it is met; None if it does not apply."""
YES, NO, NOT_APPLICABLE = "yes", "no", "not applicable"
WORDS: dict[str, bool | None] = {
    **dict.fromkeys((YES, "y", "true", "met", "1", "pass"), True),
    **dict.fromkeys((NO, "n", "false", "not met", "unmet", "0", "fail"), False),
    **dict.fromkeys((NOT_APPLICABLE, "n/a", "na", "none", "null", "does not apply"), None),
}
RESERVED_NAMES = ("rubric", "required_met", SPREAD)
"""Component names that items may not use."""
OWN = "scenario-"
"""Prefix of the names of unnamed items of a scenario."""

TASK = """\
You go through a checklist about what an AI agent did. Each item is a statement. Answer for each: `yes` where the \
episode shows that it is true, `no` where it is not or cannot be seen, `not applicable` where it is about something \
that did not come up.

The items, each with its name:
{items}

{data}

Answer with JSON, in which each item has its explanation and its answer under its name:
{{"items": {rows}}}"""
ROW = '{"explanation": one short sentence, "met": "yes", "no" or "not applicable"}'


def _checked_names(items: dict[str, RubricItem]) -> dict[str, RubricItem]:
    check_names(items, RESERVED_NAMES)
    return items


@registered("reward.rubric")
class Rubric(EpisodeJudgeReward):
    """Checklist score of each episode.

    Args:
        model: Judge model (`judge_model`). The models of a list judge independently, and the score is their mean; a
            judge that did not answer for all items in two attempts is left out.
        items: By name: a statement that should be true of an episode, with `weight` and `required`.
        items_field: Key of the scenario's input with its own items: a list of texts or of items as above, or a mapping
            by name; null if scenarios have none.

    Components of a Score: `rubric` (the score), 1 or 0 for each configured item that applies, `required_met` (1 if all
    required items are met, if there are any; scenarios' own items appear only there), and with several judges each
    one's score under `judge/MODEL` and `spread`, their standard deviation (of the population). An episode whose
    scenario has no items under `items_field`, or to which no item applies, is unscored.
    """

    def __init__(
        self,
        model: JudgeModel | Annotated[list[JudgeModel], Field(min_length=1)],
        items: Annotated[dict[str, RubricItem], AfterValidator(_checked_names)] | None = None,
        items_field: Annotated[str, Field(min_length=1)] | None = None,
    ):
        super().__init__(model)
        if not items and items_field is None:
            message = (
                "none; expected items, such as reward.items={polite: {text: The agent was polite.}}, or items_field"
            )
            raise SpecError([Problem("reward.items", message)])
        self.items = items or {}
        self.items_field = items_field

    async def opinion(self, client: JudgeClient, trajectory: Trajectory) -> Opinion:
        """Return the opinion of one judge on an episode."""
        try:
            items = self.items_of(trajectory)
        except ValueError as error:
            return Opinion(None, reason=str(error))
        names = list(items)
        item_texts = as_text({name: item.text for name, item in items.items()}, client.spec.longest // 2)
        task = TASK.format(items=item_texts, data=ONLY_DATA, rows=rows_example(names, ROW))
        messages = about(trajectory, message_views(trajectory), task, client.spec.longest)
        judgement = await ask_for_json(client, messages, _schema(names), lambda answer: _parse(answer["items"], names))
        answers, explanations = judgement.value or ({}, {})
        parts = {name: float(met) for name, met in answers.items() if met is not None and name in self.items}
        if len(answers) < len(names):
            return Opinion(None, parts, cost=judgement.cost, reason=judgement.reason)
        score = weighted_score(items, answers)
        if score is None:
            return Opinion(None, cost=judgement.cost, reason="no item of the rubric applies to the episode")
        required = [answers[name] for name in names if items[name].required and answers[name] is not None]
        if required:
            parts["required_met"] = float(all(required))
        text = "\n".join(
            f"{name}: {_answer_text(answers[name])}. {explanations.get(name, '')}".rstrip() for name in names
        )
        return Opinion(score, {"rubric": score} | parts, text, judgement.cost)

    def items_of(self, trajectory: Trajectory) -> dict[str, RubricItem]:
        """Return the items by which an episode is judged. Raises ValueError if its scenario lacks valid items."""
        if self.items_field is None:
            return self.items
        data: Any = trajectory.scenario.input.get(self.items_field)
        place = f"scenario {trajectory.scenario.id}: input[{self.items_field!r}]"
        if not isinstance(data, dict | list) or not data:
            description = "nothing" if data is None else f"{data!r:.80}"
            raise ValueError(
                f"{place} is {description}; expected a list of texts or items, or a mapping of them by name"
            )
        if isinstance(data, list):
            data = {f"{OWN}{number}": item for number, item in enumerate(data, 1)}
        scenario_items = {}
        for name, item in data.items():
            try:
                scenario_items[name] = validate(
                    RubricItem, {"text": item} if isinstance(item, str) else item, configuration=False
                )
            except SpecError as error:
                raise ValueError(f"{place}, item {name}: {'; '.join(map(str, error.problems))}") from None
            if name in self.items:
                raise ValueError(f"{place}: the item {name} is in reward.items too; expected names that differ")
        return self.items | scenario_items


def weighted_score(items: Mapping[str, RubricItem], answers: Answers) -> float | None:
    """Return the score of the episode; None if no item applies."""
    applying = {name: met for name, met in answers.items() if met is not None}
    if not applying:
        return None
    if any(items[name].required and not met for name, met in applying.items()):
        return 0.0
    met_weight = sum(items[name].weight for name, met in applying.items() if met)
    return met_weight / sum(items[name].weight for name in applying)


def _parse(data: Any, names: Sequence[str]) -> tuple[Answers, dict[str, str]]:
    """Return the parsed answer. Raises InvalidAnswer, which names the missing, ambiguous and unknown names."""
    rows, problems = by_name(data, names, "item", "met", "items")
    words = {name: str(row["met"]).strip().strip(".`").lower() for name, row in rows.items() if "met" in row}
    answers = {name: WORDS[word] for name, word in words.items() if word in WORDS}
    explanations = {name: str(row.get("explanation") or "") for name, row in rows.items()}
    unread = {"has no yes, no or not applicable for": [name for name in rows if name not in answers]}
    raise_if_invalid(unread | problems, names, "items", (answers, explanations) if answers else None)
    return answers, explanations


def _answer_text(met: bool | None) -> str:
    return NOT_APPLICABLE if met is None else YES if met else NO


def _schema(names: Sequence[str]) -> dict[str, Any]:
    met = {"type": "string", "enum": [YES, NO, NOT_APPLICABLE]}
    return object_schema({"items": rows_schema(names, {"explanation": {"type": "string"}, "met": met})})
