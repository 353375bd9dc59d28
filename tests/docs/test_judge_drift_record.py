"""The simulation of false alarms: its table is current, and it finds what it is meant to find."""

from __future__ import annotations

import json
import random
from itertools import pairwise

from components.evaluation.proportions import wilson
from docs import judge_drift


def test_the_table_is_current():
    assert judge_drift.PAGE.current() == judge_drift.PAGE.stored(), "run `python -m docs.judge_drift`"


def test_the_recorded_false_alarms_are_within_alpha_and_larger_swaps_are_found_more_often():
    rows = json.loads(judge_drift.RECORD.read_text(encoding="utf-8"))
    assert [row["accuracy"] for row in rows] == list(judge_drift.SWAPS)
    runs, early = (sum(row[name] for row in rows) for name in ("runs", "alarms_before"))
    assert wilson(early, runs)[0] <= judge_drift.ALPHA
    assert early / runs <= judge_drift.ALPHA
    found = [row["alarms_at_swap"] for row in rows]
    assert all(smaller <= larger for smaller, larger in pairwise(found))


def test_a_judge_that_reverses_its_scores_is_found_at_once():
    draw = random.Random(0)
    assert [judge_drift.alarms(draw, 0.1) for _ in range(3)] == [(False, True)] * 3
