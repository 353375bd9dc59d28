"""Tests of the collector benchmark: equal work for all frameworks, and correct statistics."""

from __future__ import annotations

import json
import sys

import pytest

from tests.benchmarks import rollouts, stub


def test_a_prompt_extends_the_tokens_of_the_turn_before():
    tokens: list[int] = []
    for turn in range(4):
        answer = json.loads(stub.body(turn, 4, 30, 5, 7).partition(b"\r\n\r\n")[2])
        prompt = answer["prompt_token_ids"]
        assert prompt[: len(tokens)] == tokens
        assert len(prompt) == 30 + turn * 12
        (choice,) = answer["choices"]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == 5
        tokens = prompt + choice["token_ids"]


@pytest.mark.timeout(1800)
def test_it_plays_and_counts():
    """Over the real socket, with a latency that tests can bear."""
    with rollouts.endpoint(0.02) as url:
        found = rollouts.one_run(sys.executable, "ours", url, 8)
    assert set(found) == {"wall_over_ideal", "cpu_ms_per_call", "kb_per_episode"}
    assert found["wall_over_ideal"] >= 0.02 / rollouts.LATENCY
    assert 0 < found["cpu_ms_per_call"] < 1000


def test_the_result_is_of_medians_and_has_the_names_that_are_asked_for():
    def run(cpu):
        return {"wall_over_ideal": 1.1, "cpu_ms_per_call": cpu, "kb_per_episode": 40.0}

    found = rollouts.summary(
        {"ours": [run(0.4), run(0.5), run(9.0)], "art": [run(10.0)] * 3, "verifiers": [run(1.0), run(8.0), run(8.0)]}
    )
    assert found == {
        "wall_over_ideal": 1.1,
        "cpu_ms_per_call": 0.5,
        "cpu_ratio_vs_art": 20.0,
        "cpu_ratio_vs_verifiers": 16.0,
        "kb_per_episode": 40.0,
    }
    assert set(rollouts.summary({"ours": [run(1.0)]})) == {"wall_over_ideal", "cpu_ms_per_call", "kb_per_episode"}
