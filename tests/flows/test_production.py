"""Success in production by version."""

from __future__ import annotations

import json
import re

import pytest

from components.data.served.log import ServedLog
from components.evaluation.proportions import independent_difference
from flows.compare import main
from tests.docs.pages import ROOT, blocks


def test_the_interval_is_that_of_the_published_example():
    """Newcombe 1998, table II (a), method 10: 56 of 70 against 48 of 80."""
    assert independent_difference((56, 70), (48, 80)) == pytest.approx((0.0524, 0.3339), abs=5e-5)


def shape(lines: list[str]) -> set[str]:
    """Lines without their numbers and spaces."""
    return {re.sub(r"[\d.]+|\s+", "#", line) for line in lines}


def test_versions_are_compared_by_the_scores_of_their_conversations(tmp_path, capsys):
    """The score of a conversation replaces those of its answers, whose mean counts otherwise."""
    log = ServedLog(tmp_path)
    scores = {"1": [0.0] * 8 + [1.0] * 2, "2": [1.0] * 9 + [0.0], "3": []}
    for version, values in scores.items():
        for number in range(12):
            name = f"{version}-{number}"
            line = {"id": name, "conversation": f"talk-{name}", "prompt": "", "version": version, "seconds": 0.5}
            log.append(lambda file, line=line: [line])
            if number < len(values):
                answer = log.find(answer=name)
                feedback = {
                    "feedback": "f",
                    "answer": None,
                    "conversation": line["conversation"],
                    "score": values[number],
                }
                log.append_feedback(feedback, answer)
                log.append_feedback({**feedback, "answer": name, "score": 1.0 - values[number]}, answer)
    assert main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[1:4]] == [["1", "12", "10"], ["2", "12", "10"], ["3", "12", "0"]]
    assert "0.200 [0.057, 0.510]" in lines[1]
    assert lines[4].startswith("verdict: 2 against 1: better, success +0.700 [+0.2")
    assert lines[5] == "verdict: 3 against 1: undecided, because one of them has no scores"
    pages = [block.text.splitlines() for block in blocks(ROOT / "docs" / "guides" / "production.md", "text")]
    (output,) = (page[1:] for page in pages if page[0].startswith("$ python -m flows.compare"))
    assert shape(output) <= shape(lines)
    assert main([str(tmp_path), "--json"]) == 0
    assert [version["success"] for version in json.loads(capsys.readouterr().out)["versions"]] == [0.2, 0.9, None]
