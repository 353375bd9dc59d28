"""Tests of failure summaries: short and without secrets."""

from __future__ import annotations

from components.trajectories.failures import KINDS, LENGTH, REASONS, failure_kinds
from components.trajectories.schema import Failure, History, Scenario, Trajectory
from components.trajectories.store import read_failures, write_trajectories

TOKEN = "ghp_" + "a1B2" * 9


def raised(*messages: str) -> list[tuple[str, Failure]]:
    return [(f"s{index}/0", Failure("agent", "AgentError", message)) for index, message in enumerate(messages)]


def test_the_first_different_reasons_of_each_kind():
    failures = raised(*["KeyError: 'a'"] * 3, *(f"KeyError: {index}" for index in range(9)), "ValueError: x")
    failures.append(("t/0", Failure("engine", "EngineError", "gone")))
    first, second, third = failure_kinds(failures)
    assert (first.kind, first.count) == ("AgentError, KeyError", 12)
    assert first.reasons == (("s0/0", "KeyError: 'a'"), ("s3/0", "KeyError: 0"), ("s4/0", "KeyError: 1"))
    assert len(first.reasons) == REASONS
    assert str(second) == "1 AgentError, ValueError (agent): s12/0: ValueError: x"
    assert str(third) == "1 EngineError (engine): t/0: gone"


def test_secrets_are_masked_before_a_reason_is_cut():
    (kind,) = failure_kinds(raised(f"KeyError: {'x' * (LENGTH - 30)} {TOKEN}", f"KeyError: api_key={TOKEN}"))
    assert TOKEN[:8] not in str(kind)
    assert max(len(reason) for _, reason in kind.reasons) <= LENGTH


def test_a_reason_is_one_line_that_steers_no_terminal():
    (kind,) = failure_kinds(raised("KeyError: \x1b[2J\n\tgone\u202e"))
    assert kind.reasons == (("s0/0", "KeyError: \ufffd[2J gone\ufffd"),)


def test_kinds_are_bounded():
    failures = raised(*(f"E{index}: x" for index in range(KINDS + 5)))
    kinds = failure_kinds(failures)
    assert len(kinds) == KINDS + 1
    assert (kinds[-1].count, str(kinds[-1])) == (5, "5 of further kinds")


def test_only_failures_are_read(tmp_path):
    episodes = [
        Trajectory(f"s{index}/0", Scenario(f"s{index}", {}, "train"), 0, [History([])], failure=failure)
        for index, failure in enumerate([None, Failure("agent", "AgentError", "KeyError: 1"), None])
    ]
    write_trajectories(tmp_path / "episodes.parquet", episodes)
    assert list(read_failures(tmp_path / "episodes.parquet")) == [
        ("s1/0", Failure("agent", "AgentError", "KeyError: 1"))
    ]
