"""Decisions and reasons of each filter, and the filter protocol."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest

from components.errors import ArtifactError, SpecError
from components.filters.among import Among
from components.filters.best import Best
from components.filters.between import Between
from components.filters.chain import Chain
from components.filters.distinct import Distinct
from components.filters.everything import Everything
from components.filters.percentiles import Percentiles
from components.filters.reasons import as_selections
from components.filters.select import apply
from components.filters.signal import Signal
from components.filters.successful import Successful
from components.filters.top import Top
from components.filters.without import Without
from components.specs import Spec, Target, validate
from components.trajectories.columns import EpisodeColumns
from components.trajectories.schema import History, Message, Selection
from components.trajectories.sources import InMemory
from tests.trajectories.builders import FAILURE, episode

GROUPS = (("a", (1.0, 1.0)), ("b", (0.0, 1.0)))
FILTERS = [
    Signal(),
    Successful(),
    Everything(),
    Between("reward", minimum=-9.0),
    Best(3),
    Top(1.0),
    Top(1.0, of="group"),
    Percentiles(0.0),
    Percentiles(0.0, of="group"),
    Distinct(),
    Distinct(of="collection", similarity=0.5),
    Chain({"first": Everything(), "then": Top(1.0)}),
    Without([]),
    Among("type", keep=["refund"]),
    Among("difficulty", drop=[9]),
    lambda trajectory: True,
]


def selections_of(filter_, rows):
    decided = apply(filter_, InMemory(rows))
    return [selection for episodes, reasons_N in decided for selection in as_selections(episodes, reasons_N)]


def reasons(filter_, *rewards):
    """Return the filter's reasons for a group with these rewards."""
    rows = [episode("a", i, reward=reward) for i, reward in enumerate(rewards)]
    return [selection.reason for selection in selections_of(filter_, rows)]


class TestSignal:
    def test_keeps_a_group_whose_rewards_differ(self):
        assert reasons(Signal(), 0.0, 1.0, 1.0) == ["kept"] * 3

    def test_drops_a_group_whose_rewards_are_equal(self, subtests):
        for rewards in [[0.0, 0.0], [1.0, 1.0, 1.0], [0.1 + 0.2, 0.3], [1e300, 1e300], [-5.0, -5.0], [0.7]]:
            with subtests.test(rewards=rewards):
                assert reasons(Signal(), *rewards) == ["no_spread"] * len(rewards)

    def test_the_unit_of_the_reward_does_not_matter(self, subtests):
        for unit in [1e-300, 1e-9, 1e9, 1e300]:
            with subtests.test(unit=unit):
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
        assert [(s.trajectory_id, s.reason) for s in selections_of(Signal(), rows)] == [
            ("a/0", "no_spread"),
            ("a/1", "no_spread"),
            ("b/0", "kept"),
            ("b/1", "kept"),
        ]


def test_successful_keeps_what_the_environment_calls_a_success_whatever_its_reward():
    rows = [
        episode("a", 0, reward=0.2, success=True),
        episode("a", 1, reward=1.0, success=False),
        episode("a", 2, reward=1.0),
        episode("a", 3, success=True),
    ]
    actual = [selection.reason for selection in selections_of(Successful(), rows)]
    assert actual == ["kept", "no_success", "no_success", "unscored"]


def test_everything_keeps_all_that_is_scored():
    assert reasons(Everything(), 0.0, None, -3.0) == ["kept", "unscored", "kept"]


def test_no_filter_keeps_an_episode_that_failed_or_has_no_reward(subtests):
    for filter_ in FILTERS:
        with subtests.test(filter_=filter_):
            rows = [
                episode("a", 0, reward=1.0),
                episode("a", 1, reward=0.0),
                episode("a", 2, failure=FAILURE),
                episode("a", 3),
            ]
            actual = selections_of(filter_, rows)
            assert actual[2:] == [Selection("a/2", False, "failed"), Selection("a/3", False, "unscored")]
            assert selections_of(filter_, rows[2:]) == actual[2:]
            assert selections_of(filter_, []) == []


def test_decisions_come_with_their_episodes_so_they_are_traceable_to_their_group():
    rows = [episode(name, i, reward=float(i)) for name in "ab" for i in range(2)]
    (decided,) = apply(Best(1), InMemory(rows))
    episodes, reasons_N = decided
    assert list(zip(episodes.groups.to_pylist(), episodes.names, np.equal(reasons_N, None), strict=True)) == [
        ("a", "a/0", False),
        ("a", "a/1", True),
        ("b", "b/0", False),
        ("b", "b/1", True),
    ]


class Reading:
    """Source of one group per batch that records what was read."""

    def __init__(self):
        self.pulled = []

    def read(self, reads):
        for name, rewards in GROUPS:
            self.pulled.append(name)
            yield EpisodeColumns.of([episode(name, sample, reward=reward) for sample, reward in enumerate(rewards)])


def test_decisions_stream_batch_by_batch(subtests):
    for filter_ in [Signal(), Best(), Distinct(), Top(0.5, of="group"), Chain({"one": Signal()})]:
        with subtests.test(filter_=filter_):
            source = Reading()
            decided = apply(filter_, source)
            assert source.pulled == []
            assert next(decided)[0].names == ["a/0", "a/1"]
            assert source.pulled == ["a"]


def test_a_survey_reads_the_collection_once_before_decisions(subtests):
    for filter_ in [Top(0.5), Percentiles(), Distinct(of="collection")]:
        with subtests.test(filter_=filter_):
            source = Reading()
            assert next(apply(filter_, source))[0].names == ["a/0", "a/1"]
            assert source.pulled == ["a", "b", "a"]


def test_a_survey_holds_one_batch_at_a_time():
    """At most a few of 200 groups are in memory at once."""
    alive = peak = 0

    class Counted(str):
        def __new__(cls, text):
            nonlocal alive, peak
            alive += 1
            peak = max(peak, alive)
            return super().__new__(cls, text)

        def __del__(self):
            nonlocal alive
            alive -= 1

    class Groups:
        def read(self, reads):
            for number in range(200):
                histories = [[History([Message("assistant", Counted(f"{number} {i}"))])] for i in range(2)]
                yield EpisodeColumns.of(
                    [episode(str(number), i, reward=float(i), histories=histories[i]) for i in range(2)]
                )

    for filter_ in (Top(0.5), Percentiles(), Distinct(of="collection", similarity=0.9)):
        peak = 0
        assert sum(np.equal(reasons_N, None).sum() for _, reasons_N in apply(filter_, Groups())) >= 200
        assert peak <= 8


def test_a_scenario_whose_trajectories_are_not_adjacent_is_refused():
    rows = [episode(name, i, reward=1.0) for i in range(2) for name in ("a", "b")]
    for filter_ in (Everything(), Top(0.5)):
        with pytest.raises(ArtifactError, match="scenario a do not lie next to each other"):
            selections_of(filter_, rows)


class Broken:
    """Filter whose decisions a test supplies."""

    def __init__(self, decide):
        self.select = decide


def test_a_filter_that_breaks_its_protocol_is_refused_by_name(subtests):
    for decide, expected in [
        (lambda group: [], "decided about"),
        (lambda group: [Selection("else", True, "kept") for _ in group], "else"),
        (lambda group: [Selection(row.id, True, "kept") for row in group], "has no reward"),
        (
            lambda group: [Selection(row.id, False, "kept") for row in group],
            "drops a/0 for the reason 'kept'; expected ",
        ),
        (
            lambda group: [Selection(row.id, False, "") for row in group],
            "drops a/0 for the reason ''; expected the name",
        ),
        (lambda group: [Selection("a/0", True, "good"), *[Selection("a/1", False, "bad")]], "keeps a/0 .* 'good'"),
    ]:
        with subtests.test(expected=expected):
            rows = [episode("a", 0, reward=1.0), episode("a", 1)]
            for filter_, who in ((Broken(decide), "Broken"), (Chain({"mine": Broken(lambda group: [])}), "Broken")):
                with pytest.raises(
                    SpecError, match=f"{who} .*{expected if filter_.__class__ is Broken else 'decided about'}"
                ):
                    selections_of(filter_, rows)


def test_an_object_that_is_not_a_filter_is_refused():
    with pytest.raises(SpecError, match=r"int is not a filter: expected a function \(trajectory\) -> bool"):
        selections_of(3, [])


class TestUserFunction:
    def test_its_name_is_the_reason_and_it_is_asked_about_scored_episodes_only(self):
        asked = []

        def short(trajectory, most):
            asked.append(trajectory.id)
            return trajectory.metrics["turns"] <= most

        rows = [episode("a", i, reward=1.0, turns=float(i)) for i in range(3)] + [episode("a", 3)]
        actual = [selection.reason for selection in selections_of(functools.partial(short, most=1), rows)]
        assert actual == ["kept", "kept", "short", "unscored"]
        assert asked == ["a/0", "a/1", "a/2"]

    def test_an_answer_of_numpy_counts(self):
        row = episode("a", 0, reward=1.0)
        assert selections_of(lambda row: np.bool_(True), [row])[0].kept

    def test_errors_name_the_trajectory(self, subtests):
        for answer, expected in [
            (lambda row: None, r"returned None \(NoneType\), expected True or False, for trajectory a/0"),
            (lambda row: 0.7, r"returned 0.7 \(float\)"),
            (
                lambda row: row.metrics["missing"],
                r"raised KeyError: 'missing' \(tests/filters/test_filters\.py:\d+, in <lambda>\), for trajectory a/0",
            ),
            (lambda: True, "raised TypeError"),
        ]:
            with subtests.test(expected=expected), pytest.raises(SpecError, match=f"filter: <lambda> {expected}"):
                selections_of(answer, [episode("a", 0, reward=1.0)])


class Part(Spec):
    filter: Target


WRONG = [
    ("signal.Signal", {"relative_tolerance": -1e-9}, "relative_tolerance"),
    ("signal.Signal", {"relative_tolerance": 1}, "relative_tolerance"),
    ("between.Between", {"number": "reward", "minimum": float("nan")}, "minimum"),
    ("between.Between", {"number": "reward", "maximum": "much"}, "maximum"),
    ("between.Between", {"minimum": 0.5}, "number"),
    ("best.Best", {"count": 0}, "count"),
    ("best.Best", {"count": 1.5}, "count"),
    ("top.Top", {"share": 0}, "share"),
    ("top.Top", {"share": 1.1}, "share"),
    ("top.Top", {"of": "batch"}, "of"),
    ("percentiles.Percentiles", {"lowest": -1}, "lowest"),
    ("percentiles.Percentiles", {"highest": 101}, "highest"),
    ("distinct.Distinct", {"similarity": 0}, "similarity"),
    ("distinct.Distinct", {"similarity": 1.01}, "similarity"),
    ("distinct.Distinct", {"words": 0}, "words"),
    ("distinct.Distinct", {"compared": 0}, "compared"),
    ("distinct.Distinct", {"read": "thoughts"}, "read"),
    ("chain.Chain", {"filters": {}}, "filters"),
    ("chain.Chain", {"filters": {"a": {"_target_": "components.filters.top.Top", "share": 0}}}, r"filters\.a\.share"),
    ("chain.Chain", {"filters": {"a": {"_target_": "components.filters.top.Tip"}}}, r"filters\.a\._target_.*'Tip'"),
]


def test_arguments_out_of_range_are_refused_in_the_configuration(subtests):
    for target, arguments, path in WRONG:
        with subtests.test(arguments=arguments), pytest.raises(SpecError, match=rf"filter\.{path}"):
            validate(Part, {"filter": {"_target_": f"components.filters.{target}", **arguments}})


def test_arguments_that_make_no_sense_together_are_refused(subtests):
    for make, expected in [
        (
            lambda: Between("reward"),
            r"filter\.minimum: minimum and maximum are both null, so the filter drops no reward",
        ),
        (lambda: Between("turns", 3.0, 2.0), r"filter\.minimum: 3 is more than maximum=2"),
        (lambda: Percentiles(60.0, 40.0), r"filter\.lowest: 60 is more than highest=40"),
        (lambda: Chain({}), r"filter\.filters: {}: expected a non-empty mapping"),
        (lambda: Chain([Top()]), r"filter\.filters: \[.*: expected a non-empty mapping"),
        (lambda: Chain({"a/b": Top()}), r"filter\.filters: 'a/b' is not a valid filter name"),
    ]:
        with subtests.test(expected=expected), pytest.raises(SpecError, match=expected):
            make()


def test_a_chain_is_built_from_configuration_and_its_key_has_the_order():
    def part(*names):
        links = {name: {"_target_": f"components.filters.{name}"} for name in names}
        return validate(Part, {"filter": {"_target_": "components.filters.chain.Chain", "filters": links}}).filter

    first, second = part("top.Top", "best.Best"), part("best.Best", "top.Top")
    with pytest.raises(SpecError, match=r"'top\.Top' is not a valid filter name"):
        first.build()
    keys = [json.dumps(target.resolved(), sort_keys=True) for target in (first, second)]
    assert keys[0] != keys[1]
    assert json.loads(keys[1])["filters"][1] == [
        "top.Top",
        {"_target_": "filter.top", "share": 0.5, "of": "collection"},
    ]


def test_groups_are_left_out_by_the_ids_of_their_scenarios():
    rows = [episode(name, sample, reward=float(sample)) for name in ("a", "b") for sample in range(2)]
    decided = selections_of(Without(["b", "unknown"]), rows)
    assert [selection.reason for selection in decided] == ["kept", "kept", "left_out", "left_out"]
