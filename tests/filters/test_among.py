"""Filter by type and difficulty: decisions, refused settings, and values that do not exist."""

from __future__ import annotations

import logging

import pytest

from components.errors import SpecError
from components.filters.among import Among
from components.filters.chain import Chain
from components.filters.everything import Everything
from components.trajectories.columns import EpisodeColumns
from components.trajectories.sources import InMemory, Scenarios
from tests.filters.test_filters import selections_of
from tests.trajectories.builders import FAILURE, episode

ODD = "rück\ud83d"
"""Text that is stored escaped."""


def rows(*kinds: tuple[str, int]):
    return [
        episode(f"s{number}", 0, reward=1.0, type=type_, difficulty=level)
        for number, (type_, level) in enumerate(kinds)
    ]


def reasons(filter_, *kinds: tuple[str, int]) -> list[str]:
    return [selection.reason for selection in selections_of(filter_, rows(*kinds))]


def test_types_and_difficulties_are_kept_or_dropped():
    kinds = (("refund", 1), ("exchange", 2), (ODD, 3), ("refund", 4))
    assert reasons(Among("type", keep=["refund", ODD]), *kinds) == ["kept", "other_type", "kept", "kept"]
    assert reasons(Among("type", drop=["refund", ODD]), *kinds) == ["other_type", "kept", "other_type", "other_type"]
    assert reasons(Among("difficulty", keep=[1, 3]), *kinds) == ["kept", "other_difficulty", "kept", "other_difficulty"]
    assert reasons(Among("difficulty", drop=[4]), *kinds) == ["kept", "kept", "kept", "other_difficulty"]


def test_failed_and_unscored_episodes_are_dropped_for_that_reason():
    episodes = [episode("a", 0, failure=FAILURE), episode("b", 0), episode("c", 0, reward=0.0)]
    actual = [selection.reason for selection in selections_of(Among("type", keep=["refund"]), episodes)]
    assert actual == ["failed", "unscored", "kept"]


def test_settings_that_select_nothing_or_nothing_that_exists_are_refused(subtests):
    for arguments, message in [
        ({"by": "type"}, r"keep and drop are both null.* filter\.keep=\[refund\]"),
        ({"by": "difficulty", "keep": [1], "drop": [2]}, r"keep and drop are both set.* filter\.keep=\[1,2\]"),
        ({"by": "difficulty", "drop": ["hard"]}, r"filter\.drop: 'hard' is no difficulty .* whole number"),
        ({"by": "type", "keep": [3]}, r"filter\.keep: 3 is no type .*in quotes"),
    ]:
        with subtests.test(message=message), pytest.raises(SpecError, match=message):
            Among(**arguments)


def test_an_unknown_type_is_reported_with_those_that_exist(caplog):
    assert reasons(Among("type", keep=["refnd", "exchange"]), ("refund", 1), ("exchange", 1)) == ["other_type", "kept"]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "filter.keep: 'refnd': no episode of the collection has this type; types that exist: exchange, refund. "
        "Did you mean 'refund'?"
    )


def test_an_unknown_difficulty_is_reported_too(caplog):
    assert reasons(Among("difficulty", drop=[7]), ("refund", 1), ("refund", 3)) == ["kept", "kept"]
    assert not caplog.records  # a small collection may lack what is dropped
    assert reasons(Among("difficulty", keep=[1, 7]), ("refund", 1), ("refund", 3)) == ["kept", "other_difficulty"]
    assert "7: no episode of the collection has this difficulty; difficulties that exist: 1, 3" in caplog.text


def test_a_part_of_a_collection_reports_what_the_whole_lacks_only(caplog):
    whole = InMemory(rows(("refund", 1), ("exchange", 1), ("address", 1)))
    part = Scenarios(whole, 0, 1)
    address = Among("type", keep=["address"])
    address.prepare(part)
    Chain({"all": Everything(), "address": address}).prepare(part)
    assert not caplog.records
    Among("type", keep=["other"]).prepare(part)
    assert "types that exist: address, exchange, refund" in caplog.text


def test_reading_stops_at_the_batch_that_has_all_values():
    pulled = []

    class Batches:
        @property
        def whole(self):
            return self

        def read(self, reads):
            for number in range(4):
                pulled.append(number)
                yield EpisodeColumns.of([episode(str(number), 0, reward=1.0, difficulty=number)])

    Among("difficulty", keep=[0, 1]).prepare(Batches())
    assert pulled == [0, 1]
