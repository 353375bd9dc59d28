"""Which trajectories each filter keeps, and what it says about the others."""

from __future__ import annotations

import pytest

from components.errors import ArtifactError, SpecError
from components.filters.everything import Everything
from components.filters.protocol import Filter
from components.filters.select import apply
from components.filters.signal import Signal
from components.filters.successful import Successful
from components.specs import Spec, Target, validate
from components.trajectories.schema import Selection
from tests.trajectories.builders import FAILURE, episode

GROUPS = (("a", (1.0, 1.0)), ("b", (0.0, 1.0)))
FILTERS = [Signal(), Successful(), Everything()]


def reasons(filter_, *rewards):
    """What the filter says about a group with these rewards."""
    selections = list(apply(filter_, [episode("a", i, reward=reward) for i, reward in enumerate(rewards)]))
    assert all(selection.kept == (selection.reason == "kept") for selection in selections)
    return [selection.reason for selection in selections]


class TestSignal:
    def test_keeps_a_group_whose_rewards_differ(self):
        assert reasons(Signal(), 0.0, 1.0, 1.0) == ["kept"] * 3

    @pytest.mark.parametrize(
        "rewards", [[0.0, 0.0], [1.0, 1.0, 1.0], [0.1 + 0.2, 0.3], [1e300, 1e300], [-5.0, -5.0], [0.7]]
    )
    def test_drops_a_group_whose_rewards_are_equal(self, rewards):
        assert reasons(Signal(), *rewards) == ["no_spread"] * len(rewards)

    @pytest.mark.parametrize("unit", [1e-300, 1e-9, 1e9, 1e300])
    def test_the_unit_of_the_reward_does_not_matter(self, unit):
        assert reasons(Signal(), unit, 1.001 * unit) == ["kept"] * 2
        assert reasons(Signal(), unit, unit * (1 + 1e-15)) == ["no_spread"] * 2

    def test_unscored_ones_are_dropped_and_do_not_count(self):
        assert reasons(Signal(), 0.0, None, 1.0) == ["kept", "unscored", "kept"]
        assert reasons(Signal(), 1.0, None, 1.0) == ["no_spread", "unscored", "no_spread"]
        assert reasons(Signal(), 1.0, None) == ["no_spread", "unscored"]

    def test_the_tolerance(self):
        assert reasons(Signal(relative_tolerance=0.1), 1.0, 0.95) == ["no_spread"] * 2
        assert reasons(Signal(relative_tolerance=0.1), 1.0, 0.85) == ["kept"] * 2
        assert reasons(Signal(relative_tolerance=0.0), 0.1 + 0.2, 0.3) == ["kept"] * 2

    def test_each_group_for_itself(self):
        rows = [episode(name, i, reward=r) for name, rewards in GROUPS for i, r in enumerate(rewards)]
        assert [(s.trajectory_id, s.reason) for s in apply(Signal(), rows)] == [
            ("a/0", "no_spread"),
            ("a/1", "no_spread"),
            ("b/0", "kept"),
            ("b/1", "kept"),
        ]


def test_successful_keeps_from_the_threshold_on():
    assert reasons(Successful(), 1.0, 0.99, None, 2.0) == ["kept", "below_threshold", "unscored", "kept"]
    assert reasons(Successful(threshold=-1.0), -1.0, -1.5) == ["kept", "below_threshold"]


def test_everything_keeps_all_that_is_scored():
    assert reasons(Everything(), 0.0, None, -3.0) == ["kept", "unscored", "kept"]


@pytest.mark.parametrize("filter_", FILTERS, ids=lambda filter_: type(filter_).__name__)
def test_no_filter_keeps_a_failed_episode(filter_):
    assert isinstance(filter_, Filter)
    rows = [episode("a", 0, reward=1.0), episode("a", 1, reward=0.0), episode("a", 2, failure=FAILURE)]
    assert list(apply(filter_, rows))[2] == Selection("a/2", False, "unscored")
    assert list(apply(filter_, [])) == []


def test_decisions_stream_group_by_group():
    pulled = []

    def rows():
        for name, rewards in GROUPS:
            for sample, reward in enumerate(rewards):
                pulled.append(f"{name}/{sample}")
                yield episode(name, sample, reward=reward)

    selections = apply(Signal(), rows())
    assert pulled == []
    assert next(selections).trajectory_id == "a/0"
    assert pulled == ["a/0", "a/1", "b/0"]


def test_a_scenario_that_comes_back_is_refused():
    rows = [episode(name, i, reward=1.0) for i in range(2) for name in ("a", "b")]
    with pytest.raises(ArtifactError, match="scenario a do not lie next to each other"):
        list(apply(Everything(), rows))


class Broken:
    """A filter of a user that decides what a test says."""

    def __init__(self, decide):
        self.select = decide


@pytest.mark.parametrize(
    ("decide", "said"),
    [
        (lambda group: [], "decided about"),
        (lambda group: [Selection("else", True, "kept") for _ in group], "else"),
        (lambda group: [Selection(row.id, True, "kept") for row in group], "has no reward"),
    ],
    ids=["too few", "other ids", "keeps unscored"],
)
def test_a_filter_that_breaks_its_protocol_is_refused_by_name(decide, said):
    with pytest.raises(SpecError, match=f"Broken .*{said}"):
        list(apply(Broken(decide), [episode("a", 0, reward=1.0), episode("a", 1)]))


class Part(Spec):
    filter: Target


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        ("signal.Signal", {"relative_tolerance": 1e-6}),
        ("successful.Successful", {"threshold": 0.5}),
        ("everything.Everything", {}),
    ],
)
def test_filters_are_built_from_configuration(target, arguments):
    part = validate(Part, {"filter": {"_target_": f"components.filters.{target}", **arguments}})
    assert vars(part.filter.build()) == arguments


@pytest.mark.parametrize(
    ("target", "argument", "value"),
    [
        ("signal.Signal", "relative_tolerance", -1e-9),
        ("signal.Signal", "relative_tolerance", 1),
        ("successful.Successful", "threshold", float("nan")),
    ],
)
def test_arguments_out_of_range_are_refused_in_the_configuration(target, argument, value):
    with pytest.raises(SpecError, match=rf"filter\.{argument}"):
        validate(Part, {"filter": {"_target_": f"components.filters.{target}", argument: value}})
