"""Filters by rank (best, share, percentiles), compared with plain sorting and numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.filters.best import Best
from components.filters.percentiles import Percentiles, percentiles
from components.filters.top import Top
from tests.filters.test_filters import reasons, selections_of
from tests.trajectories.builders import episode

REWARDS = st.one_of(st.none(), st.sampled_from([0.0, 1.0]), st.floats(-1e6, 1e6))
GROUPS = st.lists(st.lists(REWARDS, min_size=1, max_size=5), max_size=6)


def collection(groups):
    return [episode(str(n), i, reward=reward) for n, rewards in enumerate(groups) for i, reward in enumerate(rewards)]


def kept_rows(filter_, rows):
    ids = {selection.trajectory_id for selection in selections_of(filter_, rows) if selection.kept}
    return [row for row in rows if row.id in ids]


def test_the_best_of_a_group_and_of_equals_the_first():
    assert reasons(Best(1), 0.0, 1.0, 1.0) == ["not_among_best", "kept", "not_among_best"]
    assert reasons(Best(2), 0.5, None, 0.7, 0.5) == ["kept", "unscored", "kept", "not_among_best"]
    assert reasons(Best(9), 0.0, 1.0) == ["kept", "kept"]


def test_a_tenth_of_thirty_is_three():
    assert len(kept_rows(Top(0.1), collection([range(30)]))) == 3  # 0.1 * 30 is 3.0000000000000004


def test_a_share_of_equal_rewards_is_spread_over_scenarios():
    rows = collection([[1.0] * 4] * 50)
    chosen = kept_rows(Top(0.25), rows)
    assert len(chosen) == 50
    assert len({row.group for row in chosen}) > 25
    assert {row.id for row in kept_rows(Top(0.25), list(reversed(rows)))} == {row.id for row in chosen}
    assert reasons(Top(0.5, of="group"), 1.0, 1.0, 1.0, 1.0) == ["kept", "kept", "below_top_share", "below_top_share"]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values, rank):
    expected = float(np.percentile(np.array(values), rank))
    assert percentiles(np.sort(values), np.array([len(values)]), rank)[0] == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_percentiles_of_the_collection_and_of_a_group():
    rows = collection([[0.0, 1.0, 2.0], [10.0, 11.0, 12.0, None]])
    assert [row.reward for row in kept_rows(Percentiles(50.0), rows)] == [10.0, 11.0, 12.0]
    assert [row.reward for row in kept_rows(Percentiles(50.0, of="group"), rows)] == [1.0, 2.0, 11.0, 12.0]
    assert [row.reward for row in kept_rows(Percentiles(0.0, 50.0, of="group"), rows)] == [0.0, 1.0, 10.0, 11.0]
    actual = [selection.reason for selection in selections_of(Percentiles(20.0, 80.0), rows)]
    assert actual == ["below_percentile", "kept", "kept", "kept", "kept", "above_percentile", "unscored"]


@given(GROUPS)
def test_0_to_100_keeps_all_and_equal_rewards_get_equal_decisions(groups):
    rows = collection(groups)
    assert kept_rows(Percentiles(0.0), rows) == [row for row in rows if row.reward is not None]
    chosen = {row.reward for row in kept_rows(Percentiles(40.0), rows)}
    dropped = {row.reward for row in rows if row.reward is not None} - chosen
    assert not dropped or max(dropped) < min(chosen)
    assert {row.reward for row in kept_rows(Percentiles(40.0), rows)}.isdisjoint(dropped)
