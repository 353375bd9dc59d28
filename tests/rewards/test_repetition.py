"""Repetition term of the outcome reward."""

from __future__ import annotations

import pytest

from components.rewards.rules.outcome import Outcome
from components.rewards.rules.repetition import repetition
from components.trajectories.schema import History, Message, Scenario, Trajectory


def episode(*messages: list[int]) -> Trajectory:
    """Return an episode of sampled messages, each after one unsampled token."""
    history = History([])
    for tokens in messages:
        start = len(history.token_ids) + 1
        history.token_ids += [0, *tokens]
        history.messages.append(Message("assistant", "", span=(start, start + len(tokens))))
    return Trajectory("one/0", Scenario("one", {}, "train"), 0, [history], outcome={"success": True})


def test_share_of_repeated_ngrams(subtests):
    for messages, size, share in [
        ([[5, 5, 5, 5]], 1, 3 / 4),
        ([[5, 6, 5, 6, 5]], 2, 2 / 4),  # 56 65 56 65
        ([[5, 6], [5, 6]], 1, 0.0),  # a message does not repeat another one
        ([[5, 6]], 3, 0.0),
        ([], 1, 0.0),
    ]:
        with subtests.test(messages=messages):
            assert repetition(episode(*messages), size) == pytest.approx(share)


def test_the_cost_is_a_visible_part():
    [score] = Outcome(repetition_cost=0.5, repetition_ngram=1).score_group([episode([7, 7, 8, 9])])
    assert score.components == {"success": 1.0, "repetition": pytest.approx(-0.125)}
    assert score.reward == pytest.approx(0.875)
