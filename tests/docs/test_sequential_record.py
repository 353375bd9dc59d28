"""The simulation of evaluations that stop: its table is current, and its error rates are within alpha."""

from __future__ import annotations

import json

from components.evaluation.proportions import wilson
from docs import sequential


def test_the_table_is_current():
    assert sequential.PAGE.current() == sequential.PAGE.stored(), "run `python -m docs.sequential`"


def test_the_recorded_error_rates_are_within_alpha_and_larger_gains_save_more():
    rows = json.loads(sequential.RECORD.read_text(encoding="utf-8"))
    assert [(row["changed"], row["gain"]) for row in rows] == sequential.CASES
    for row in rows:
        assert wilson(row["wrong"], row["runs"])[0] <= sequential.ALPHA
        assert row["wrong"] <= row["missed"] <= sequential.ALPHA * row["runs"]
    played = [row["played"] for row in rows if row["changed"] == 0.3]
    assert played == sorted(played, reverse=True)


def test_a_recorded_row_is_reproduced():
    first = sequential.simulated(0.5, 0.4, 50)
    assert first == sequential.simulated(0.5, 0.4, 50)
    assert first["decided"] == 50
