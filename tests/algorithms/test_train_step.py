"""The benchmarks of gradient steps: checks of their workloads and of the bound, which is a plain count."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from tests.benchmarks import train_step


def prefixes(episodes) -> set[tuple[int, ...]]:
    return {episode.token_ids[:end] for episode in episodes for end in range(1, len(episode.token_ids))}


def distinct(episodes) -> int:
    return len(prefixes(episodes))


def test_workloads_share_what_they_say():
    for name, tokens, nodes in (
        ("a", 8 * 500, 400 + 8 * 99),
        ("b", 8 * 1740, 1200 + 8 * 539),
        ("d", 8 * 1740, 1200 + 90 * (2 + 4 + 8 + 8 + 8) + 8 * 89),
    ):
        episodes = train_step.workload(name, 49152, 1.0)
        assert sum(len(episode.token_ids) for episode in episodes) == tokens, name
        counted = train_step.trie(episodes)
        assert counted.nodes == distinct(episodes) == nodes, name  # the last token is predicted and is no input
        assert counted.seen == sum(map(len, prefixes(episodes))), name


def test_groups_of_the_largest_workload_share_a_prompt_each():
    episodes = train_step.workload("e", 49152, 0.125)
    assert [len(episode.token_ids) for episode in episodes] == [256] * 64
    assert train_step.trie(episodes).nodes == 8 * (128 + 8 * 127)
    assert train_step.trie(episodes).predicting == 8 * (1 + 8 * 127)


def test_nothing_is_shared_in_the_third():
    episodes = train_step.workload("c", 49152, 1.0)
    assert [len(episode.token_ids) for episode in episodes] == [100, 300, 500, 700, 900, 1100, 1300, 1500]
    assert distinct(episodes) >= 5800 - 8 - 8  # except for first tokens that are equal by chance


def test_the_bound_of_equal_rows_without_sharing_is_that_of_the_last_token():
    config = SimpleNamespace(hidden_size=8, vocab_size=100, num_hidden_layers=2, num_attention_heads=2, head_dim=4)
    episodes = [train_step.Episode((first, 2, 3, 4), (False, False, False, True), 0.0) for first in range(10, 18)]
    padded = 8 * (2 * 1000 * 4 + 3.5 * 2 * 2 * 2 * 4 * 10 + 2 * 800 * 1)
    ours = 8 * (2 * 1000 * 3 + 3.5 * 2 * 2 * 2 * 4 * 6 + 2 * 800 * 1)
    assert train_step.bound(episodes, 4, config, linear=1000) == pytest.approx(padded / ours)


def test_the_record_holds_what_the_page_shows():
    from pathlib import Path

    record = json.loads((Path(__file__).parents[2] / "docs" / "results" / "train_step.json").read_text())
    for name in set(record) & set("abcd"):
        workload = record[name]
        assert workload["ratio_vs_trl"] == pytest.approx(
            workload["trl_seconds"]["median"] / workload["ours_seconds"]["median"], rel=2e-3
        )
        assert workload["grad_rel_error"] < 1e-3  # float32, advantages that sum to zero
