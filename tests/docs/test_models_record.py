"""The page of families of models: its tables are current, its record is complete, and what it says holds."""

from __future__ import annotations

import pytest

from docs import models

FAMILIES = models.recorded()["families"]
UNESCAPED = "LFM2.5"
"""Family whose template writes quotes in arguments without escaping them."""


def test_the_page_shows_the_record():
    for page in models.PAGES:
        assert page.current() == page.stored(), "run `python -m docs.models`"


def test_every_family_is_exact_and_certified():
    assert len(FAMILIES) >= 25
    for name, family in FAMILIES.items():
        assert max(family["nats"], family.get("padded_nats", 0.0)) < 5e-5, name
        assert max(family["gradient"], family["grpo"]["difference"]) < 2e-4, name
        assert set(family["masks"]["conversations"].values()) == {"equal"}, name
        checks = family["certificate"]["checks"]
        failed = [check for check, result in checks.items() if result["status"] == "failed"]
        assert failed == (["tool_calls"] if name == UNESCAPED else []), name
    assert all(models.recorded()["refused"].values())


@pytest.mark.parametrize("name", ["Phi-3", "LFM2"])
def test_a_recorded_family_is_reproduced(name, tmp_path):
    """One on the trie and one on padded rows, without rounding."""
    pytest.importorskip("trl")
    from tests.models.measured_families import ROWS, measure

    assert ROWS.keys() == FAMILIES.keys(), "run `python -m docs.models --measure`"
    architecture = FAMILIES[name]["vllm"]["architecture"].casefold()
    measured, recorded = measure(name, tmp_path, tmp_path, frozenset({architecture})), FAMILIES[name]
    same = ("type", "models", "tokenizer", "chat", "attention", "masks", "layout", "implementation", "vllm")
    assert {key: measured[key] for key in same} == {key: recorded[key] for key in same}
    statuses = [
        {check: result["status"] for check, result in family["certificate"]["checks"].items()}
        for family in (measured, recorded)
    ]
    assert statuses[0] == statuses[1]
