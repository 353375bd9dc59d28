"""The table of predicted and observed signal is current, and sums up its record."""

from __future__ import annotations

import json
from statistics import fmean

import numpy as np
import pytest

from components.evaluation.power import Outcomes
from docs import power

ROW = {
    "experiments": ["one", "two"],
    "seed": 1,
    "group_size": 8,
    "groups": 64,
    "from_seed": 0,
    "predicted": 0.5,
    "interval": [0.4, 0.6],
    "from_evaluation": None,
    "observed": 0.55,
    "with_spread": 0.25,
}


def test_the_table_is_current():
    assert power.PAGE.current() == power.PAGE.stored(), "run `python -m docs.power`"


def test_the_recorded_shares_are_of_whole_groups():
    rows = json.loads(power.RECORD.read_text(encoding="utf-8"))
    assert len(rows) > 5
    for row in rows:
        solved = row["observed"] * row["groups"]
        assert solved == pytest.approx(round(solved), abs=0.01)
        assert row["interval"][0] <= row["predicted"] <= row["interval"][1]
        assert row["from_seed"] != row["seed"]


def test_the_table_shows_each_row_and_how_many_intervals_cover(tmp_path, monkeypatch):
    record = tmp_path / "power.json"
    record.write_text(json.dumps([ROW, {**ROW, "observed": 0.7, "from_evaluation": 0.6}]))
    monkeypatch.setattr(power, "RECORD", record)
    text = power.power_table()
    assert "| `one`, `two` | 1 | 8 | 64 | 0.50 [0.40, 0.60] |  | 0.55 | 0.25 |" in text
    assert "1 of 2 intervals cover the observed share (9 % to 91 %)" in text
    assert "The mean absolute error is 0.125; that by the greedy evaluation is 0.100." in text
    record.write_text("[]")
    assert power.power_table() == "No result is recorded yet.\n"


def test_the_prediction_interval_covers_95_percent_of_new_rounds():
    generator = np.random.default_rng(1)
    covered = []
    for _ in range(60):
        p_S = generator.beta(0.6, 1.2, 48)
        low, high = power.signal_interval([Outcomes(int(c), 8) for c in generator.binomial(8, p_S)], 8, 32)
        counts = generator.binomial(8, generator.beta(0.6, 1.2, 32))
        covered.append(low <= float(np.mean((counts > 0) & (counts < 8))) <= high)
    assert 0.87 <= fmean(covered) <= 1.0
