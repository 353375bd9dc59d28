"""Benchmark of judges: the same work for all, a scripted judge, and metrics as defined."""

from __future__ import annotations

import json
import urllib.request

from tests.benchmarks import judge
from tests.benchmarks.apart import stub


def run(cpu, wall=1.1, peak=5.0):
    return {"wall_over_ideal": wall, "cpu_ms_per_group": cpu, "peak_mb": peak}


def test_the_stub_scores_each_trajectory_by_what_stands_in_it():
    (group,) = judge.talks(range(3, 4), 8)
    blocks = [f'<trajectory id="t{i}">\n{json.dumps(judge.messages(parts))}' for i, (parts, _) in enumerate(group)]
    body = json.dumps({"messages": [{"role": "user", "content": "\n".join(blocks)}]}).encode()
    with stub("--judge", "--latency", 0.0) as url, urllib.request.urlopen(f"{url}/chat/completions", body) as answer:
        result = json.loads(json.load(answer)["choices"][0]["message"]["content"])["scores"]
    assert {score["trajectory_id"]: score["score"] for score in result} == {
        f"t{i}": score for i, (_, score) in enumerate(group)
    }


def test_no_two_trajectories_are_alike():
    texts = [tuple(parts) for group in judge.talks(range(50), 8) for parts, _ in group]
    assert len(set(texts)) == 400
    assert all(len(parts) == 2 * judge.TURNS - 1 for parts in texts)


def test_the_result_is_of_medians_and_names_the_worst():
    runs = {
        32: {"ours": [run(0.5), run(0.4, 1.05), run(9.0)], "art": [run(4.0, 2.0)] * 3},
        200: {"ours": [run(0.5, 1.2, 9.0)], "art": [run(3.0, 8.0)]},
    }
    result = judge.summary(runs)
    assert (result["wall_over_ideal"], result["cpu_ratio_vs_art"], result["peak_mb"]) == (1.2, 6.0, 9.0)
    assert result["at"]["32"]["cpu_ratio_vs_art"] == 8.0
    assert result["at"]["32"]["art_wall_over_ideal"] == 2.0
    assert "cpu_ratio_vs_art" not in judge.summary({32: {"ours": [run(0.5)]}})
