"""Reward for reasoning before an answer.

    R = r + present · P + closed · C - alpha · min(1, max(0, len - target) / slack)

P: share of the messages with reasoning. C: share of the messages whose reasoning the model ends: content or a call
follows it, and the engine did not end it (`agent.max_thinking_tokens`). len: mean number of tokens of reasoning in a
message. The last term is the soft limit of DAPO (arXiv:2503.14476, eq. 13), applied to the reasoning: no penalty up to
`target`, the whole `alpha` from `target + slack` on.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import Field, FiniteFloat

from components.errors import JudgeError
from components.rewards.composition.composed import ComposedPerEpisode, CompositionResult, Parts, total
from components.rewards.rules.answers import sampled_messages
from components.specs.registered import registered
from components.trajectories.parts import SOLVER
from components.trajectories.schema import History, Score, Trajectory


@registered("reward.thinking")
class Thinking(ComposedPerEpisode):
    """Reward for reasoning that is present, ends, and is not too long.

    Args:
        task: Reward r; null is 0.
        present: Reward of an episode whose messages all have reasoning.
        closed: Reward of an episode whose messages all have reasoning that ends before their answer.
        alpha: Largest penalty for long reasoning; 0 or more.
        target: Number of tokens of reasoning per message without a penalty.
        slack: Number of tokens above `target` over which the penalty rises linearly to `alpha`.

    Components: `task`, `present`, `closed` and `length`, the penalty with its sign. An episode with reasoning whose
    tokens the engine does not count is unscored, unless alpha is 0.
    """

    def __init__(
        self,
        task: Any = None,
        present: FiniteFloat = 0.1,
        closed: FiniteFloat = 0.1,
        alpha: Annotated[float, Field(ge=0)] = 0.1,
        target: Annotated[int, Field(ge=0)] = 1024,
        slack: Annotated[int, Field(ge=1)] = 512,
    ):
        super().__init__({} if task is None else {"task": task})
        self.present, self.closed = present, closed
        self.alpha, self.target, self.slack = alpha, target, slack

    def value(self, trajectory: Trajectory, parts: Parts) -> CompositionResult:
        places = sampled_messages(trajectory)
        reasoning = [(history, at) for history, at in places if (history.messages[at].reasoning or "").strip()]
        ended = [place for place in reasoning if _ended(*place)]
        count = max(len(places), 1)
        own = {"present": self.present * len(reasoning) / count, "closed": self.closed * len(ended) / count}
        own["length"] = -self.alpha * self._excess(trajectory, count) if reasoning and self.alpha else 0.0
        bonus = Score(trajectory.id, sum(own.values()))
        reward, steps = total([*((1.0, score) for score in parts.values()), (1.0, bonus)])
        return CompositionResult(reward, steps, own)

    def _excess(self, trajectory: Trajectory, count: int) -> float:
        """Return the share of the slack that the mean length uses, from 0 to 1; 0 for a demonstration."""
        if trajectory.policy == SOLVER:
            return 0.0
        tokens = trajectory.metrics.get("reasoning_tokens")
        if tokens is None:
            raise JudgeError("the engine does not count the tokens of reasoning; set reward.alpha=0")
        return min(1.0, max(0.0, tokens / count - self.target) / self.slack)


def _ended(history: History, at: int) -> bool:
    """Return True if the model ended its reasoning in this message. Tokens with which the engine ended it have no
    log-probability."""
    message = history.messages[at]
    logprobs = history.logprobs[slice(*message.span)] if message.span else []
    return bool(message.content.strip() or message.tool_calls) and not any(map(math.isnan, logprobs))
