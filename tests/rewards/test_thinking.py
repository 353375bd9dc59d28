"""The reward for reasoning, against its formula."""

from __future__ import annotations

import pytest

from components.rewards import judge as judging
from components.rewards.rules.outcome import Outcome
from components.rewards.rules.thinking import Thinking
from components.trajectories.schema import Message, ToolCall
from tests.trajectories.builders import episode, talk

CALL = ToolCall("c", "look", "{}")
CASES = {
    "reasoning and answer": ([Message("assistant", "5", reasoning="2 + 3")], 10.0, (1.0, 1.0, 0.0)),
    "reasoning and call": ([Message("assistant", "", [CALL], reasoning="look")], 10.0, (1.0, 1.0, 0.0)),
    "no reasoning": ([Message("assistant", "5")], None, (0.0, 0.0, 0.0)),
    "empty reasoning": ([Message("assistant", "5", reasoning="\n")], 4.0, (0.0, 0.0, 0.0)),
    "without an end": ([Message("assistant", "", reasoning="2 + 3 +")], 10.0, (1.0, 0.0, 0.0)),
    "one of two messages": (
        [Message("assistant", "5", reasoning="2 + 3"), Message("assistant", "6")],
        20.0,
        (0.5, 0.5, 0.0),
    ),
    "at the target": ([Message("assistant", "5", reasoning="long")], 100.0, (1.0, 1.0, 0.0)),
    "within the slack": ([Message("assistant", "5", reasoning="long")], 110.0, (1.0, 1.0, 0.25)),
    "above the slack": ([Message("assistant", "5", reasoning="long")], 400.0, (1.0, 1.0, 1.0)),
    "the mean of two messages": (
        [Message("assistant", "5", reasoning="long"), Message("assistant", "6", reasoning="short")],
        240.0,
        (1.0, 1.0, 0.5),
    ),
}
"""Messages, tokens of reasoning in them, and shares of present, closed and penalty."""


def sample(messages: list[Message], tokens: float | None):
    made = episode(success=True, histories=[talk("q")])
    for message in messages:
        made.histories[0].messages += [message, Message("user", "next")]
    if tokens is not None:
        made.metrics["reasoning_tokens"] = tokens
    return made


def test_it_is_the_formula(subtests):
    rule = Thinking(Outcome(), present=0.2, closed=0.3, alpha=0.4, target=100, slack=40)
    for name, (messages, tokens, (present, closed, excess)) in CASES.items():
        with subtests.test(name):
            (score,) = judging.judge(rule, [sample(messages, tokens)])
            parts = {"present": 0.2 * present, "closed": 0.3 * closed, "length": -0.4 * excess}
            assert score.reward == pytest.approx(1.0 + sum(parts.values()))
            assert score.components == pytest.approx({"task": 1.0, "task/success": 1.0} | parts)


def test_reasoning_that_the_engine_ended_is_not_closed_by_the_model():
    episode = sample([Message("assistant", "5", reasoning="2 +", span=(0, 3))], 10.0)
    for logprobs, closed in (([-1.0, -1.0, -1.0], 0.1), ([-1.0, float("nan"), -1.0], 0.0)):
        episode.histories[0].logprobs = logprobs
        (score,) = judging.judge(Thinking(), [episode])
        assert score.components["closed"] == closed


def test_tokens_that_nobody_counted_leave_the_episode_unscored():
    messages = [Message("assistant", "5", reasoning="2 + 3")]
    (score,) = judging.judge(Thinking(), [sample(messages, None)])
    assert score.failure.message == "the engine does not count the tokens of reasoning; set reward.alpha=0"
    assert next(iter(judging.judge(Thinking(alpha=0.0), [sample(messages, None)]))).reward == pytest.approx(0.2)
    demonstration = sample(messages, None)
    demonstration.policy = "solver"
    assert next(iter(judging.judge(Thinking(), [demonstration]))).reward == pytest.approx(0.2)
