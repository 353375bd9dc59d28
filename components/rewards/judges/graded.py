"""Grade of an episode: one number by a language model.

The simplest judge, for models that are too small to write JSON: the prompt has examples with their grades, then the
episode. A model of such a size is a poor judge; `python -m flows.calibrate` measures how poor.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from components.errors import JudgeError, ResourceError
from components.rewards.llm.answers import read_scores
from components.rewards.llm.client import JudgeClient
from components.rewards.llm.protocol import JudgeAnswer, Messages
from components.rewards.llm.spec import JudgeModel
from components.rewards.llm.transcript import as_text, message_views
from components.rewards.protocol import RewardResources
from components.specs.registered import registered
from components.trajectories.schema import Failure, Score, Trajectory

QUESTION = """\
How well did the assistant do what the user asked for? Answer with one whole number from 0 (not at all) to 10 \
(perfectly), and nothing else."""
EXAMPLES = (
    ('[{"role":"user","content":"Say hello."},{"role":"assistant","content":"Hello!"}]', "10"),
    ('[{"role":"user","content":"What is 2 + 2?"},{"role":"assistant","content":"blue blue"}]', "0"),
    ('[{"role":"user","content":"Name two colours."},{"role":"assistant","content":"Red."}]', "5"),
)
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:\s*(?:/|out of|of)\s*\d+(?:\.\d+)?|\s*%)?")


@registered("reward.graded")
class Graded:
    """Grade of each episode, from 0 to 1.

    Args:
        model: Judge model (`judge_model`).
        question: Question about each episode, with the scale; null takes `QUESTION`.

    An episode without a number in two answers is unscored.
    """

    def __init__(self, model: JudgeModel, question: Annotated[str, Field(min_length=1)] | None = None):
        self.model = model
        self.question = question or QUESTION
        self._client: JudgeClient | None = None

    @staticmethod
    def key_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments for stage keys: what determines the judge's answers."""
        return {**arguments, "model": arguments["model"].key_part()}

    def use(self, resources: RewardResources) -> None:
        """Create the client. Raises ResourceError if an API key is not in the environment."""
        self._client = JudgeClient(self.model, resources)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    async def score_group(self, group: Sequence[Trajectory]) -> list[Score]:
        """Return one Score for each trajectory. Raises ResourceError before `use`, BudgetExceeded."""
        if self._client is None:
            raise ResourceError("the judge has no client yet: call use(resources) first")
        return list(await asyncio.gather(*(self._score(self._client, trajectory) for trajectory in group)))

    async def _score(self, client: JudgeClient, trajectory: Trajectory) -> Score:
        from components.rewards.llm.protocol import add_costs

        histories = message_views(trajectory)
        messages = self._messages(as_text(histories[0] if len(histories) == 1 else histories, client.spec.longest))
        cost: float | None = 0.0
        answers: list[JudgeAnswer] = []
        try:
            for _ in range(2):
                answers.append(await client.ask(messages, immediate=bool(answers)))  # corrections bypass batching
                cost = add_costs(cost, answers[-1].cost)
                if (score := read(answers[-1].text)) is not None:
                    client.keep(*answers)
                    return Score(
                        trajectory.id, score, {"grade": score}, explanation=answers[-1].text.strip(), cost=cost
                    )
                correction = {"role": "user", "content": "Answer with one number, and nothing else."}
                messages = [*messages, {"role": "assistant", "content": answers[-1].text or "(nothing)"}, correction]
            reason = f"{client.name} gave no number, twice: {answers[-1].text[:200]!r}"
        except JudgeError as error:
            reason = str(error)
        return Score(trajectory.id, None, cost=cost, failure=Failure("judge", "JudgeError", reason))

    def _messages(self, episode: str) -> Messages:
        messages = []
        for text, number in EXAMPLES:
            messages += [
                {"role": "user", "content": self._question_about(text)},
                {"role": "assistant", "content": number},
            ]
        return [*messages, {"role": "user", "content": self._question_about(episode)}]

    def _question_about(self, episode: str) -> str:
        return f"<trajectory>\n{episode}\n</trajectory>\n\n{self.question}"


def read(text: str) -> float | None:
    """Return the first number of an answer, on a scale to 10 unless it states another; None if there is none."""
    match = NUMBER.search(text.rpartition("</think>")[2])
    if match is None:
        return None
    number = match[0]
    without_scale = re.fullmatch(r"[-+]?\d+(?:\.\d+)?", number)
    return read_scores({"": f"{number}/10" if without_scale else number}).get("")
