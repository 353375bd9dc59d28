from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.errors import ArtifactError
from components.trajectories.groups import adjacent_groups, by_scenario, have_spread
from tests.trajectories.builders import episode


def test_groups_keep_the_order_of_arrival():
    rows = [episode("b", 0), episode("a", 0), episode("b", 1)]
    groups = by_scenario(rows)
    assert {name: [row.id for row in group] for name, group in groups.items()} == {"b": ["b/0", "b/1"], "a": ["a/0"]}
    assert list(groups) == ["b", "a"]


def test_adjacent_groups_come_one_after_the_other():
    pulled = []

    def rows():
        for name, count in (("b", 2), ("a", 1), ("c", 3)):
            for sample in range(count):
                pulled.append(name)
                yield episode(name, sample)

    groups = adjacent_groups(rows())
    assert [row.id for row in next(groups)] == ["b/0", "b/1"]
    assert pulled == ["b", "b", "a"]  # no further than needed to see where the group ends
    assert [[row.id for row in group] for group in groups] == [["a/0"], ["c/0", "c/1", "c/2"]]
    assert list(adjacent_groups([])) == []


def test_a_scenario_that_comes_back_is_refused():
    groups = adjacent_groups([episode("b", 0), episode("a", 0), episode("b", 1)])
    assert [next(groups)[0].id, next(groups)[0].id] == ["b/0", "a/0"]
    with pytest.raises(ArtifactError, match=r"scenario b do not lie next to each other: b/1 .*Sort them by scenario"):
        next(groups)


def test_spread_does_not_depend_on_the_unit():
    for unit in (1e-300, 1e-12, 1.0, 1e12, 1e300):
        assert have_spread([1 * unit, 2 * unit]), unit
        assert have_spread([0.0, unit]), unit
        assert have_spread([-unit, unit]), unit
        assert not have_spread([0.1 * 3 * unit, 0.3 * unit]), unit  # differ in the last bit only
        assert not have_spread([unit, unit, unit]), unit


def test_fewer_than_two_have_no_spread():
    assert not have_spread([])
    assert not have_spread([1.0])


@given(st.lists(st.floats(-1e6, 1e6), min_size=2), st.randoms())
def test_spread_does_not_depend_on_the_order(rewards, random):
    shuffled = random.sample(rewards, len(rewards))
    assert have_spread(shuffled) == have_spread(rewards) == have_spread([-r for r in rewards])
