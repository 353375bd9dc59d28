"""Bounds on a number of an episode: lookup of the number, and errors when it is missing."""

from __future__ import annotations

import math
from unittest.mock import ANY

import pytest

from components.errors import SpecError
from components.filters.between import Between
from components.trajectories.columns import EpisodeColumns
from tests.filters.test_filters import reasons, selections_of
from tests.trajectories.builders import FAILURE, episode


def rows(*values, name="turns"):
    trajectories = [episode("a", i, reward=1.0, turns=None) for i in range(len(values))]
    for trajectory, value in zip(trajectories, values, strict=True):
        if value is not None:
            trajectory.metrics[name] = value
    return trajectories


def test_both_bounds_are_included():
    actual = [
        selection.reason for selection in selections_of(Between("turns", 2.0, 4.0), rows(1.0, 2.0, 3.0, 4.0, 5.0))
    ]
    assert actual == ["turns_below_minimum", "kept", "kept", "kept", "turns_above_maximum"]


def test_a_threshold_of_the_reward():
    assert reasons(Between("reward", 0.5), 0.5, 0.4, None, 7.0) == ["kept", "reward_below_minimum", "unscored", "kept"]
    assert reasons(Between("reward", maximum=0.5), 0.5, 0.6) == ["kept", "reward_above_maximum"]
    assert reasons(Between("reward", -1.0), -1.0, -1.5) == ["kept", "reward_below_minimum"]


def test_a_number_is_a_metric_or_a_field_of_the_outcome():
    trajectory = episode("a", 0, reward=0.5, outcome={"turns": 9, "moves": 4, "won": True, "said": "much"})
    episodes = EpisodeColumns.of([trajectory])
    numbers = {name: float(episodes.number_N(name)[0]) for name in ("turns", "moves", "won", "said", "none")}
    assert numbers == {"turns": 2.0, "moves": 4.0, "won": 1.0, "said": ANY, "none": ANY}
    assert math.isnan(numbers["said"])
    assert math.isnan(numbers["none"])


def test_an_episode_without_the_number_is_dropped_as_unknown():
    actual = [
        selection.reason
        for selection in selections_of(Between("spread", maximum=0.5), rows(0.1, None, math.nan, 0.6, name="spread"))
    ]
    assert actual == ["kept", "spread_unknown", "spread_unknown", "spread_above_maximum"]


def test_unknown_number_is_an_error_that_suggests_the_nearest_name():
    trajectories = [episode("a", 0, failure=FAILURE), episode("a", 1, reward=1.0, outcome={"moves": 3, "said": "x"})]
    expected = r"filter\.number: no scored episode has a number 'turn'; available: moves, reward, turns. .*'turns'"
    with pytest.raises(SpecError, match=expected):
        selections_of(Between("turn", 1.0), trajectories)
    # Without a scored episode there are no names to check against.
    assert selections_of(Between("turn", 1.0), trajectories[:1])[0].reason == "failed"


def test_survey_stops_at_the_first_batch_with_the_number():
    pulled = []

    class Groups:
        def read(self, reads):
            for number in range(3):
                pulled.append(number)
                yield EpisodeColumns.of([episode(str(number), 0, reward=1.0)])

    Between("turns", 1.0).prepare(Groups())
    assert pulled == [0]
