"""Pauses between retries: exponential, as the server asks, and within a total time from the first failure."""

from __future__ import annotations

import pytest

from components import retry
from components.retry import Backoff


@pytest.fixture
def clock(monkeypatch):
    """The time that the backoff sees, in seconds."""
    now = [100.0]
    monkeypatch.setattr(retry.time, "monotonic", lambda: now[0])
    return now


def test_pauses_double_up_to_a_limit_and_vary(clock):
    backoff = Backoff(1000)
    pauses = [backoff.pause() for _ in range(9)]
    longest = [min(retry.FIRST_PAUSE * 2**number, retry.LONGEST_PAUSE) for number in range(9)]
    for pause, most in zip(pauses, longest, strict=True):
        assert pause is not None
        assert most / 2 <= pause <= most
    assert backoff.failures == 9


def test_a_delay_that_the_server_asks_for_is_at_least_kept(clock):
    for _ in range(20):
        pause = Backoff(1000).pause(retry_after=7.0)
        assert pause is not None
        assert 7.0 <= pause <= 8.75


def test_the_time_counts_from_the_first_failure(clock):
    backoff = Backoff(5.0)
    clock[0] += 3600  # a long upload before anything failed
    assert backoff.pause() is not None
    clock[0] += 4.4
    assert backoff.pause() is not None
    clock[0] += 0.6
    assert backoff.pause() is None


def test_no_pause_ends_after_the_time(clock):
    assert Backoff(5.0).pause(retry_after=5.1) is None
    assert Backoff(0.0).pause() is None
