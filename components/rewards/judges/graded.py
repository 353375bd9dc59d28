"""Grade of an episode: one number by a language model, on a declared scale.

The simplest judge, for small models: the prompt has examples with their grades, then the episode. A model of such a
size is a poor judge; `python -m flows.explain calibrate` measures how poor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from components.rewards.llm.answers import Scale, read_scores
from components.rewards.llm.client import JudgeClient
from components.rewards.llm.judge_reward import EpisodeJudgeReward, Opinion
from components.rewards.llm.protocol import Messages
from components.rewards.llm.question import InvalidAnswer, ask_for_json
from components.rewards.llm.rows import object_schema
from components.rewards.llm.spec import JudgeModel
from components.rewards.llm.transcript import as_text, message_views
from components.specs.registered import registered
from components.trajectories.schema import Trajectory

QUESTION = "How well did the assistant do what the user asked for?"
FORM = 'Answer with JSON and nothing else: {{"grade": a number from {low:g} (worst) to {high:g} (best)}}.'
EXAMPLES = (
    ('[{"role":"user","content":"Say hello."},{"role":"assistant","content":"Hello!"}]', 1.0),
    ('[{"role":"user","content":"What is 2 + 2?"},{"role":"assistant","content":"blue blue"}]', 0.0),
    ('[{"role":"user","content":"Name two colours."},{"role":"assistant","content":"Red."}]', 0.5),
)
"""Episodes with their grades, as shares of the scale."""


def _checked_scale(scale: tuple[float, float]) -> Scale:
    if not scale[0] < scale[1]:
        raise ValueError("the worst grade, then a higher one, such as [0, 10]")
    return Scale(*scale)


@registered("reward.graded")
class Graded(EpisodeJudgeReward):
    """Grade of each episode, from 0 to 1.

    Args:
        model: Judge model (`judge_model`). The models of a list judge independently, and the score is their mean.
        question: Question about each episode, without its scale; null takes `QUESTION`.
        scale: Worst and best grade, which the question states. A grade outside of them is invalid.

    Components of a Score: `grade`, and with several judges each one's score under `judge/MODEL` and `spread`, their
    standard deviation (of the population). An episode without a valid grade in two answers is unscored.
    """

    def __init__(
        self,
        model: JudgeModel | Annotated[list[JudgeModel], Field(min_length=1)],
        question: Annotated[str, Field(min_length=1)] | None = None,
        scale: Annotated[tuple[float, float], AfterValidator(_checked_scale)] = (0.0, 10.0),
    ):
        super().__init__(model)
        self.question = question or QUESTION
        self.scale = Scale(*scale)

    async def opinion(self, client: JudgeClient, trajectory: Trajectory) -> Opinion:
        """Return the opinion of one judge on an episode."""
        histories = message_views(trajectory)
        episode = as_text(histories[0] if len(histories) == 1 else histories, client.spec.longest)
        schema = object_schema({"grade": self.scale.schema})
        judgement = await ask_for_json(client, self._messages(episode), schema, self._read)
        if judgement.value is None:
            return Opinion(None, cost=judgement.cost, reason=judgement.reason)
        grade = judgement.value
        text = f"{self.scale.at(grade):g} from {self.scale}"
        return Opinion(grade, {"grade": grade}, text, judgement.cost)

    def _read(self, answer: Mapping[str, Any]) -> float:
        """Return the grade as a share of the scale. Raises InvalidAnswer."""
        scores, _ = read_scores({"grade": answer["grade"]}, self.scale)
        if not scores:
            raise InvalidAnswer(f"Your grade is {str(answer['grade'])[:40]!r}; expected a number from {self.scale}.")
        return scores["grade"]

    def _messages(self, episode: str) -> Messages:
        messages = []
        for text, share in EXAMPLES:
            messages += [
                {"role": "user", "content": self._question_about(text)},
                {"role": "assistant", "content": json.dumps({"grade": self.scale.at(share)})},
            ]
        return [*messages, {"role": "user", "content": self._question_about(episode)}]

    def _question_about(self, episode: str) -> str:
        form = FORM.format(low=self.scale.low, high=self.scale.high)
        return f"<trajectory>\n{episode}\n</trajectory>\n\n{self.question} {form}"
