"""Cost, budget and rate limits of judge calls."""

from __future__ import annotations

import asyncio
import threading
from bisect import bisect_left

import pytest

from components.errors import BudgetExceeded, ResourceError
from components.rewards.llm.budget import Meter
from components.rewards.llm.cache import AnswerCache, digest
from components.rewards.llm.rate_limits import RateLimits, TokenBucket, TokenEstimate


def call(meter: Meter, cost: float | None) -> None:
    meter.begin("judge", 0.0)
    meter.end(cost, 10, 5)


def test_calls_are_added_up_and_those_without_a_price_counted_apart():
    meter = Meter()
    for cost in (0.25, None, 0.5):
        call(meter, cost)
    assert (meter.spent, meter.calls, meter.unpriced) == (0.75, 3, 1)
    assert (meter.prompt_tokens, meter.completion_tokens) == (30, 15)


def test_a_call_that_would_lead_beyond_the_budget_is_not_begun():
    meter = Meter(budget=1.0)
    for _ in range(3):
        call(meter, 0.3)
    with pytest.raises(BudgetExceeded, match=r"0\.9 of 1 is spent, .* higher judge\.budget"):
        meter.begin("judge", 0.0)
    assert meter.spent == pytest.approx(0.9)


def test_calls_under_way_are_reckoned_with():
    meter = Meter(budget=1.0)
    call(meter, 0.3)
    meter.begin("judge", 0.0)
    meter.begin("judge", 0.0)
    with pytest.raises(BudgetExceeded):
        meter.begin("judge", 0.0)
    meter.gave_up()
    meter.begin("judge", 0.0)


def test_a_budget_needs_prices():
    with pytest.raises(ResourceError, match=r"the price of some is not known.*reward\.model\.price=\{input"):
        Meter(budget=1.0).begin("some", None)
    meter = Meter(budget=1.0)
    call(meter, None)  # it did not say how many tokens
    with pytest.raises(ResourceError, match="not known"):
        meter.begin("some", 0.0)


class Clock:
    """Clock that advances only in sleep."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr("components.rewards.llm.rate_limits.time.monotonic", lambda: self.now)

    def take(self, bucket: TokenBucket, amount: float) -> float:
        """Wait until the amount is available, take it, and return the time."""
        self.now += bucket.lacking(amount)
        bucket.take(amount)
        return self.now


def test_a_bucket_lets_through_what_a_minute_allows(monkeypatch):
    clock = Clock(monkeypatch)
    bucket = TokenBucket(60)  # six at once, and 54 in each minute
    assert [clock.take(bucket, 1) - 100 for _ in range(8)] == pytest.approx([0, 0, 0, 0, 0, 0, 1 / 0.9, 2 / 0.9])
    before = clock.now
    assert clock.take(bucket, 96) == pytest.approx(
        before + 6 / 0.9
    )  # what is more than a bucket holds: when it is full
    assert bucket.lacking(1) == pytest.approx(91 / 0.9)
    bucket.give_back(81)
    assert bucket.lacking(1) == pytest.approx(10 / 0.9)


def test_no_minute_sees_more_requests_than_its_limit_nor_far_fewer(monkeypatch, subtests):
    for limit in [1, 3, 10, 120, 600]:
        with subtests.test(limit=limit):
            clock = Clock(monkeypatch)
            bucket = TokenBucket(limit)
            clock.now += 1000
            begin = clock.now
            sent = [clock.take(bucket, 1) for _ in range(12 * limit)]
            assert max(bisect_left(sent, start + 60 - 1e-6) - i for i, start in enumerate(sent)) <= limit
            assert len(sent) / ((sent[-1] - begin) / 60) >= (0.8 if limit >= 5 else 0.49) * limit


def test_tokens_are_corrected_by_what_was_needed():
    async def play():
        limits = RateLimits(None, 6000)  # ninety a second
        taken = await limits.wait(lambda: 500)
        limits.used(taken, 100)
        return limits._tokens.lacking(500)

    assert asyncio.run(play()) == pytest.approx(0, abs=0.1)


def test_what_a_question_needs_is_learned_from_those_before_it():
    estimate = TokenEstimate(most=2000)
    assert (estimate.read(400), estimate.written()) == (100, 2000)
    estimate.learn(4000, 2000, 50)
    estimate.learn(4000, 2000, 150)
    assert (estimate.read(400), estimate.written()) == (pytest.approx(200, rel=1e-3), 100)


def test_answers_are_found_again_by_content_in_another_process_or_thread(tmp_path):
    first, second = AnswerCache(tmp_path), AnswerCache(tmp_path)
    asked = digest({"b": 1, "a": ["ü"]})
    assert asked == digest({"a": ["ü"], "b": 1}) != digest({"a": ["u"], "b": 1})
    assert second.find(asked) is None
    first.keep({asked: {"text": "yes \ud83d".encode("utf-8", "replace").decode()}})
    collected = []
    thread = threading.Thread(target=lambda: collected.append(second.find(asked)))
    thread.start()
    thread.join()
    assert collected == [{"text": "yes ?"}]
    first.close()
    second.close()
