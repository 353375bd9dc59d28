"""Human feedback as a reward, against the explicit formulas."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from components.errors import SpecError
from components.rewards.rules.human import Human, bradley_terry, share_of_wins, wins
from components.specs import Target
from components.trajectories.feedback import append
from tests.trajectories.builders import episode, talk
from tests.trajectories.said import chose, rated

A, B, C = (episode("s", number) for number in range(3))
NAMES = [("s/0", "x"), ("s/1", "y"), ("s/2", "z")]


def human(tmp_path, *answers, **options):
    append(tmp_path / "said.jsonl", answers)
    return Human(str(tmp_path / "said.jsonl"), **options)


def test_scores_are_mapped_to_0_and_1_and_averaged_over_people(tmp_path):
    reward = human(tmp_path, rated(A, 5), rated(A, 2, author="Bo", note="rude"), rated(B, 1))
    first, second, none = reward.score_group([A, B, C])
    assert (first.reward, second.reward) == ((1.0 + 0.25) / 2, 0.0)
    assert (first.components, first.explanation) == ({"score": 0.625, "authors": 2.0}, "Bo: rude")
    assert (none.reward, none.failure.boundary) == (None, "people")


def test_another_episode_by_the_same_id_is_not_taken_for_it(tmp_path):
    reward = human(tmp_path, rated(A, 5))
    (score,) = reward.score_group([episode("s", 0, histories=[talk("Hello.", "Other words.")])])
    assert score.reward is None


def test_choices_count_where_nobody_gave_a_score(tmp_path):
    answers = [chose(A, B, "a"), rated(B, 5)]
    first, second, _ = human(tmp_path, *answers, choices="share").score_group([A, B, C])
    assert (first.reward, second.reward) == (1.0, 1.0)
    assert second.components == {"choice": 0.0, "score": 1.0, "authors": 1.0}


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.sampled_from([(0, 1), (1, 2), (0, 2)]), st.floats(0, 4), st.floats(0, 4)), min_size=1))
def test_bradley_terry_is_the_likeliest(rows):
    """Maximize the likelihood, with one draw of each against strength 1, by an independent optimizer."""
    win_counts = {}
    for (i, j), more, less in rows:
        win_counts[NAMES[i], NAMES[j]] = win_counts.get((NAMES[i], NAMES[j]), 0.0) + more
        win_counts[NAMES[j], NAMES[i]] = win_counts.get((NAMES[j], NAMES[i]), 0.0) + less
    there = sorted({name for pair in win_counts for name in pair})

    def minus_likelihood(log_strength):
        strength = dict(zip(there, log_strength, strict=True))
        total = 0.0
        for (first, second), count in win_counts.items():
            total += count * math.log(1 + math.exp(strength[second] - strength[first]))
        return total + sum(
            0.5 * math.log(1 + math.exp(-x)) + 0.5 * math.log(1 + math.exp(x)) for x in strength.values()
        )

    expected = minimize(minus_likelihood, [0.0] * len(there), tol=1e-12).x
    result = bradley_terry(win_counts)
    assert [result[name] for name in there] == pytest.approx([1 / (1 + math.exp(-x)) for x in expected], abs=2e-4)


def test_shares_of_wins_with_ties_as_halves():
    win_counts = wins([chose(A, B, "a"), chose(A, B, "tie", author="Bo"), chose(B, C, "b")])
    by_name = {name: value for (name, _), value in share_of_wins(win_counts).items()}
    assert by_name == {"s/0": 0.75, "s/1": pytest.approx(0.5 / 3), "s/2": 1.0}


def test_the_key_is_of_what_was_said_and_not_of_the_place(tmp_path):
    human(tmp_path, rated(A, 5))
    target = {"_target_": "components.rewards.rules.human.Human", "path": str(tmp_path / "said.jsonl")}
    before = Target(**target).resolved()
    (tmp_path / "moved").mkdir()
    append(tmp_path / "moved" / "x.jsonl", [rated(A, 5)])
    assert Target(**{**target, "path": str(tmp_path / "moved")}).resolved() == before
    append(tmp_path / "said.jsonl", [rated(A, 4, second=9)])
    assert Target(**target).resolved() != before


def test_what_is_no_feedback_is_named(tmp_path):
    with pytest.raises(SpecError, match=r"reward\.path: there is no file"):
        Human(str(tmp_path / "nothing.jsonl"))
    (tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(SpecError, match=r"bad\.jsonl, line 1: kind is None"):
        Human(str(tmp_path / "bad.jsonl"))
