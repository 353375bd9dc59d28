"""What is spent, and when no more may be."""

from __future__ import annotations

import asyncio
import threading

import pytest

from components.errors import BudgetSpent, ResourceError
from components.rewards.asking.kept import KeptAnswers, digest
from components.rewards.asking.limits import Bucket, Limits
from components.rewards.asking.meter import Meter


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
    with pytest.raises(BudgetSpent, match=r"0\.9 of 1 is spent, .* higher judge\.budget"):
        meter.begin("judge", 0.0)
    assert meter.spent == pytest.approx(0.9)


def test_calls_under_way_are_reckoned_with():
    meter = Meter(budget=1.0)
    call(meter, 0.3)
    meter.begin("judge", 0.0)
    meter.begin("judge", 0.0)
    with pytest.raises(BudgetSpent):
        meter.begin("judge", 0.0)
    meter.gave_up()
    meter.begin("judge", 0.0)


def test_a_budget_needs_prices():
    with pytest.raises(ResourceError, match=r"the price of some is not known.*reward\.model\.price\.input"):
        Meter(budget=1.0).begin("some", None)
    meter = Meter(budget=1.0)
    call(meter, None)  # it did not say how many tokens
    with pytest.raises(ResourceError, match="not known"):
        meter.begin("some", 0.0)


def test_a_bucket_lets_through_what_a_minute_allows(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("components.rewards.asking.limits.time.monotonic", lambda: now[0])
    bucket = Bucket(60)  # one a second, six at once
    assert [bucket.take(1) for _ in range(8)] == pytest.approx([0, 0, 0, 0, 0, 0, 1, 2])
    now[0] += 3
    assert bucket.take(1) == pytest.approx(0)
    assert bucket.take(100) == pytest.approx(100)
    bucket.give_back(90)
    assert bucket.take(1) == pytest.approx(11)


def test_no_minute_sees_more_requests_than_its_limit_and_a_tenth(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("components.rewards.asking.limits.time.monotonic", lambda: now[0])
    bucket = Bucket(120)
    sent = [now[0] + bucket.take(1) for _ in range(1000)]
    assert max(sum(start <= one < start + 60 for one in sent) for start in sent) <= 120 * 1.1 + 1


def test_tokens_are_corrected_by_what_was_needed():
    async def play():
        limits = Limits(None, 6000)  # a hundred a second
        await limits.wait(500)
        limits.used(500, 100)
        return limits._tokens.take(500)

    assert asyncio.run(play()) == pytest.approx(0, abs=0.1)


def test_answers_are_found_again_by_content_in_another_process_or_thread(tmp_path):
    first, second = KeptAnswers(tmp_path), KeptAnswers(tmp_path)
    asked = digest({"b": 1, "a": ["ü"]})
    assert asked == digest({"a": ["ü"], "b": 1}) != digest({"a": ["u"], "b": 1})
    assert second.find(asked) is None
    first.keep({asked: {"text": "yes \ud83d".encode("utf-8", "replace").decode()}})
    found = []
    thread = threading.Thread(target=lambda: found.append(second.find(asked)))
    thread.start()
    thread.join()
    assert found == [{"text": "yes ?"}]
    first.close()
    second.close()
