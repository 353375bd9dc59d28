"""Rate limits, measured on the server that they protect."""

from __future__ import annotations

import asyncio
import time

import pytest

from components.rewards.llm.budget import Meter
from components.rewards.llm.client import JudgeClient
from components.rewards.llm.models.served import ServedJudge
from components.rewards.protocol import RewardResources
from tests.rewards.judge_server import Reply, judge_server


def asked(folder, count, characters=400, **limits):
    """Return the arrival time of each question after the start, the tokens of each, and the total duration."""

    def question(number):
        return [{"role": "user", "content": f"{number:<{characters}}"}]

    with judge_server(lambda request: Reply("x" * 120)) as server:
        spec = ServedJudge(url=server.url, model="judge", max_tokens=200, **limits)
        client = JudgeClient(spec, RewardResources(folder, None, Meter()))

        async def work():
            await asyncio.gather(*(client.ask(question(number)) for number in range(count)))

        start = time.monotonic()
        asyncio.run(work())
        duration = time.monotonic() - start
        client.close()
    return sorted(request.came - start for request in server.requests), characters // 4 + 30, duration


def most_beyond(came, of_each, limit):
    """Return the maximum excess of arrivals over a tenth of a minute's limit plus nine tenths of it per minute since
    the start. A busy machine delays requests, and never advances them."""
    return max((count * of_each - limit * (0.1 + 0.9 * after / 60)) for count, after in enumerate(came, 1))


def test_never_more_requests_than_declared_and_not_much_fewer(tmp_path):
    came, _, took = asked(tmp_path, 210, requests_per_minute=1200)
    assert most_beyond(came, 1, 1200) <= 1
    assert len(came) / took * 60 >= 0.9 * 1200


def test_never_more_tokens_than_declared_and_not_much_fewer(tmp_path):
    came, tokens, took = asked(tmp_path, 160, tokens_per_minute=120_000)
    assert most_beyond(came, tokens, 120_000) <= tokens
    assert len(came) * tokens / took * 60 >= 0.9 * 120_000


def test_the_narrower_of_both_limits_counts(tmp_path):
    came, _, took = asked(tmp_path, 45, requests_per_minute=300, tokens_per_minute=1_000_000)
    assert most_beyond(came, 1, 300) <= 1
    assert took == pytest.approx(15 / 4.5, abs=2.0)  # thirty at once, and 4.5 a second
