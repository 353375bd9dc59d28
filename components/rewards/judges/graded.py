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
SCALE = (0.0, 10.0)
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
        scale: Annotated[tuple[float, float], AfterValidator(_checked_scale)] = SCALE,
    ):
        super().__init__(model)
        self.question = question or QUESTION
        self.scale = Scale(*scale)

    async def opinion(self, client: JudgeClient, trajectory: Trajectory) -> Opinion:
        """Return the opinion of one judge on an episode."""
        messages = _conversation(self.question, self.scale, _episode_text(trajectory, client.spec.longest))
        schema = object_schema({"grade": self.scale.schema})
        judgement = await ask_for_json(client, messages, schema, self._read)
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


def judgement(trajectory: Trajectory, *, longest: int) -> list[dict[str, Any]]:
    """Return the question about a scored episode, with the default wording and scale, and the grade that is its reward,
    as the messages of one conversation to train a judge on; the grades of the examples have weight 0. longest: maximum
    characters of the episode. Raises ValueError for a reward outside of 0 to 1."""
    share = trajectory.reward or 0.0
    if not 0 <= share <= 1:
        raise ValueError(f"episode {trajectory.id} has the reward {share}; expected rewards from 0 to 1")
    scale = Scale(*SCALE)
    question = _conversation(QUESTION, scale, _episode_text(trajectory, longest))
    examples = [message | ({"weight": 0} if message["role"] == "assistant" else {}) for message in question]
    return [*examples, _answer(scale, round(share, 2))]


def _episode_text(trajectory: Trajectory, longest: int) -> str:
    histories = message_views(trajectory)
    return as_text(histories[0] if len(histories) == 1 else histories, longest)


def _conversation(question: str, scale: Scale, episode: str) -> Messages:
    """Return the examples with their grades, then the question about the episode."""
    messages = []
    for text, share in EXAMPLES:
        messages += [_question_about(question, scale, text), _answer(scale, share)]
    return [*messages, _question_about(question, scale, episode)]


def _question_about(question: str, scale: Scale, episode: str) -> dict[str, Any]:
    form = FORM.format(low=scale.low, high=scale.high)
    return {"role": "user", "content": f"<trajectory>\n{episode}\n</trajectory>\n\n{question} {form}"}


def _answer(scale: Scale, share: float) -> dict[str, Any]:
    return {"role": "assistant", "content": json.dumps({"grade": scale.at(share)})}
