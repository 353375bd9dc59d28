"""Duplicates: the same tokens, the same text, nearly the same words; in a group and over a collection."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.filters.distinct import Distinct, SimilarityIndex, jaccard, shingles
from components.trajectories.schema import History, Message, ToolCall
from tests.filters.test_filters import selections_of
from tests.trajectories.builders import episode, talk

LONG = "the order was sent back on monday because the shoe did not fit and the customer asked for a refund"
NEAR = LONG.replace("monday", "sunday")


def rows(*texts, name="a", rewards=None):
    """Return episodes in which the policy says these texts."""
    rewards = rewards or [1.0] * len(texts)
    return [
        episode(name, i, reward=reward, histories=[talk(f"Hello {name}{i}.", text)])
        for i, (text, reward) in enumerate(zip(texts, rewards, strict=True))
    ]


def sampled(sample, tokens, text, prompt=(1, 2), reward=1.0, name="a"):
    """Return an episode whose answer was sampled as these tokens."""
    ids = [*prompt, *tokens]
    message = Message("assistant", text, span=(len(prompt), len(ids)))
    return episode(
        name, sample, reward=reward, histories=[History([Message("user", "?"), message], ids, [-1.0] * len(ids))]
    )


def reasons(filter_, trajectories):
    return [selection.reason for selection in selections_of(filter_, trajectories)]


def test_the_duplicate_with_the_best_reward_is_kept_and_ties_go_to_the_first():
    assert reasons(Distinct(), rows("yes", "no", "yes", "no")) == ["kept", "kept", "duplicate", "duplicate"]
    assert reasons(Distinct(), rows("yes", "yes", "yes", rewards=[0.0, 1.0, 1.0])) == ["duplicate", "kept", "duplicate"]


def test_sampled_answers_are_the_same_by_their_tokens():
    trajectories = [sampled(0, [7, 8], "ab"), sampled(1, [9], "ab"), sampled(2, [7, 8], "ab", prompt=(5,))]
    assert reasons(Distinct(), trajectories) == ["kept", "kept", "duplicate"]
    assert reasons(Distinct(read="conversation"), trajectories) == ["kept", "kept", "kept"]


def test_tool_calls_are_compared():
    def call(sample, arguments):
        message = Message("assistant", "", [ToolCall(f"id{sample}", "look_up", arguments)])
        return episode("a", sample, reward=1.0, histories=[History([message])])

    assert reasons(Distinct(), [call(0, '{"id": 1}'), call(1, '{"id": 2}'), call(2, '{"id": 1}')]) == [
        "kept",
        "kept",
        "duplicate",
    ]


def test_unscored_and_failed_episodes_take_no_part():
    trajectories = rows("yes", "yes")
    trajectories[0].reward = None
    assert reasons(Distinct(), trajectories) == ["unscored", "kept"]


def test_near_duplicates_by_the_share_of_runs_of_words():
    """Each text has 18 shingles of three words, and the changed word is in three of them: 15 of 21 are shared."""
    assert len(LONG.split()) == 20
    assert jaccard(shingles(LONG, 3), shingles(NEAR, 3)) == pytest.approx(15 / 21)
    trajectories = rows(LONG, NEAR, LONG.upper() + "!", LONG)
    assert reasons(Distinct(similarity=0.71), trajectories) == ["kept", "near_duplicate", "near_duplicate", "duplicate"]
    assert reasons(Distinct(similarity=0.72), trajectories) == ["kept", "kept", "near_duplicate", "duplicate"]
    assert reasons(Distinct(), trajectories) == ["kept", "kept", "kept", "duplicate"]
    assert reasons(Distinct(similarity=0.7, words=20), trajectories)[1] == "kept"


def test_texts_without_a_word_are_only_exact_duplicates():
    assert shingles("?! ...", 3) == frozenset()
    assert reasons(Distinct(similarity=0.1), rows("?", "!", "?")) == ["kept", "kept", "duplicate"]


def test_a_text_of_fewer_words_than_a_run_is_one_run():
    assert len(shingles("two words", 3)) == len(shingles("three words here", 3)) == 1
    assert reasons(Distinct(similarity=0.5), rows("Two words", "two words!", "two more")) == [
        "kept",
        "near_duplicate",
        "kept",
    ]


def test_groups_are_compared_only_with_of_collection_and_earlier_groups_take_precedence():
    trajectories = rows("yes", LONG, name="a") + rows("yes", NEAR, name="b", rewards=[5.0, 5.0])
    assert reasons(Distinct(similarity=0.7), trajectories) == ["kept"] * 4
    assert reasons(Distinct(similarity=0.7, of="collection"), trajectories) == [
        "kept",
        "kept",
        "duplicate",
        "near_duplicate",
    ]


def test_near_duplicates_are_searched_among_the_latest_episodes_only():
    trajectories = [
        row for n, text in enumerate((LONG, "something else entirely here", NEAR)) for row in rows(text, name=str(n))
    ]
    assert reasons(Distinct(similarity=0.7, of="collection", compared=2), trajectories)[2] == "near_duplicate"
    assert reasons(Distinct(similarity=0.7, of="collection", compared=1), trajectories)[2] == "kept"


def words_of(text):
    return re.findall(r"\w+", text.lower())


def plain_jaccard(first, second, size):
    sets = [
        {tuple(words[i : i + size]) for i in range(max(1, len(words) - size + 1))} if words else set()
        for words in (words_of(first), words_of(second))
    ]
    union = sets[0] | sets[1]
    return len(sets[0] & sets[1]) / len(union) if union else 0.0


TEXTS = st.lists(st.lists(st.sampled_from("abcd"), max_size=12).map(" ".join), max_size=12)


@given(TEXTS, st.sampled_from([0.2, 0.5, 0.6, 0.8, 1.0]), st.integers(1, 3))
def test_the_search_agrees_with_comparing_all_texts(texts, similarity, size):
    index, distinct_texts = SimilarityIndex(similarity, 1000), []
    for text in texts:
        expected = any(plain_jaccard(text, other_text, size) >= similarity for other_text in distinct_texts)
        assert index.has_similar(shingles(text, size)) == expected
        if not expected:
            index.add(shingles(text, size))
            distinct_texts.append(text)


@given(TEXTS, st.integers(1, 4))
def test_the_search_forgets_all_but_the_latest(texts, most):
    index = SimilarityIndex(0.5, most)
    for number, text in enumerate(texts):
        latest = texts[max(0, number - most) : number]
        assert index.has_similar(shingles(text, 2)) == any(
            plain_jaccard(text, latest_text, 2) >= 0.5 for latest_text in latest
        )
        index.add(shingles(text, 2))
    assert len(index._texts) <= most
    assert {number for numbers in index._numbers_by_shingle.values() for number in numbers} <= set(index._texts)
