"""Full-text search: BM25 ranking, hostile queries, filters."""

from __future__ import annotations

import math
import random
import sqlite3
from concurrent.futures import ThreadPoolExecutor

import pytest

from components.environments import fulltext
from components.environments.fulltext import STOP, WORDS, Index, terms
from components.errors import ResourceError


def bm25(query: list[str], documents: list[list[str]]) -> list[int]:
    """Return the documents that contain a word, ranked by the BM25 formula (k1 = 1.2, b = 0.75)."""
    mean = sum(map(len, documents)) / len(documents)
    scores = {}
    for number, words in enumerate(documents):
        score = 0.0
        for word in query:
            count, holding = words.count(word), sum(word in other for other in documents)
            weight = max(math.log((len(documents) - holding + 0.5) / (holding + 0.5)), 1e-6)
            score += weight * count * 2.2 / (count + 1.2 * (0.25 + 0.75 * len(words) / mean))
        if score:
            scores[number] = score
    return sorted(scores, key=lambda number: (-scores[number], number))


def test_ranking_matches_the_bm25_formula():
    draw = random.Random(0)
    words = ["lamp", "rug", "tent", "pan", "bolt", "cup", "fork", "drum", "sock", "vest"]
    documents = [draw.choices(words, range(1, 11), k=draw.randint(1, 12)) for _ in range(60)]
    index = Index({"text": 1.0}, ((number, [" ".join(words)]) for number, words in enumerate(documents)))
    for size in (1, 2, 3):
        query = draw.sample(words, size)
        assert [number for number, _ in index.search(" ".join(query), 60)] == bm25(query, documents)


def test_fields_are_weighted():
    documents = [(0, ["lamp", "tent"]), (1, ["tent", "lamp"]), (2, ["rug", "cup"]), (3, ["pan", "cup"])]
    assert [number for number, _ in Index({"title": 9.0, "text": 1.0}, documents).search("tent", 9)] == [1, 0]
    assert [number for number, _ in Index({"title": 1.0, "text": 9.0}, documents).search("tent", 9)] == [0, 1]


def test_words_are_stemmed_and_excerpts_surround_matches():
    index = Index({"title": 1.0, "text": 1.0}, [(7, ["x", "one two three running shoes four five"])])
    assert index.search("shoe run", 5, snippet=3) == [(7, " ... running shoes four ... ")]


def test_searches_are_filtered_by_conditions():
    index = Index(
        {"text": 1.0}, [(number, ["tent"]) for number in range(6)], {"day": {number: number for number in range(6)}}
    )
    assert [number for number, _ in index.search("tent", 9, where=[("day >= ?", 2), ("day < ?", 4)])] == [2, 3]
    assert [number for number, _ in index.search("tent", 2)] == [0, 1]


def test_queries_use_words_only():
    assert terms('Tent OR "x" NEAR(tent) *') == ["tent", "x", "near"]
    assert terms("the of and") == ["the", "of", "and"]
    assert terms("\ud83d \x00 ?!") == []
    assert len(terms(" ".join(f"w{number}" for number in range(500)))) == WORDS
    assert "or" in STOP
    assert Index({"text": 1.0}, [(0, ["tent"])]).search("?!", 5) == []


def test_threads_may_share_an_index():
    index = Index({"text": 1.0}, [(number, [f"tent w{number}"]) for number in range(200)])
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda number: index.search(f"w{number}", 1), range(200)))
    assert results == [[(number, "")] for number in range(200)]


def test_missing_fts5_is_reported(monkeypatch):
    class Poor:
        def execute(self, statement):
            raise sqlite3.OperationalError("no such module: fts5")

    monkeypatch.setattr(fulltext.sqlite3, "connect", lambda *_, **__: Poor())
    with pytest.raises(ResourceError, match="no such module: fts5"):
        Index({"text": 1.0}, [])


@pytest.mark.security
def test_hostile_queries_are_bounded(subtests):
    """SQLite receives at most 32 words, each in quotes."""
    for attack in [
        "tent " * 200_000,
        " ".join(f"w{number}" for number in range(100_000)),
        'NEAR("tent" "lamp", 1000000000) ' * 10_000,
        "tent* OR -tent NOT title:tent ^tent " * 10_000,
        '"' * 1_000_000,
        "\x00tent\ud83d" * 100_000,
        "(" * 100_000 + "tent" + ")" * 100_000,
    ]:
        with subtests.test(attack=attack[:60]):
            index = Index({"text": 1.0}, [(number, [f"tent w{number}"]) for number in range(500)])
            statements = []
            index._store.set_trace_callback(statements.append)
            assert len(index.search(attack, 5, snippet=3)) <= 5
            assert all(len(statement) < 2000 for statement in statements)
            assert len(terms(attack)) <= WORDS
