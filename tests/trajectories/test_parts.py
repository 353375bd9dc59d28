"""Tests of the parts of a collection, whose metrics are separate."""

from __future__ import annotations

from components.trajectories.groups import aside
from components.trajectories.parts import main_of, part_of
from components.trajectories.schema import Scenario, Trajectory

SCENARIO = Scenario("s", {}, "train")


def test_a_part_is_named_by_the_group_or_by_who_showed_it():
    for scenario, policy, part in (
        (SCENARIO, "base", ""),
        (aside(SCENARIO, "second"), "base", "second"),
        (SCENARIO, "teacher", "teacher"),
        (SCENARIO, "demonstration", "demonstration"),
    ):
        assert part_of(Trajectory(f"{scenario.id}/0", scenario, 0, [], policy=policy)) == part


def test_who_plays_alone_is_the_main_part():
    assert main_of(["teacher", "teacher"]) == "teacher"
    assert main_of(["teacher", ""]) == main_of([""]) == main_of([]) == ""
