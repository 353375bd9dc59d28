"""Limits, by the clock of the server that they protect."""

from __future__ import annotations

import asyncio
import time

import pytest

from components.rewards.llm.budget import Meter
from components.rewards.llm.client import JudgeClient
from components.rewards.llm.spec import ServedJudge
from components.rewards.protocol import Means
from tests.rewards.judge_server import Reply, judge_server


def asked(folder, count, characters=400, **limits):
    """How many seconds after the beginning a server was asked each of so many questions, the tokens of each, and how
    long all of it took."""

    def question(number):
        return [{"role": "user", "content": f"{number:<{characters}}"}]

    with judge_server(lambda one: Reply("x" * 120)) as server:
        spec = ServedJudge(url=server.url, model="judge", max_tokens=200, **limits)
        asker = JudgeClient(spec, Means(folder, None, Meter()))

        async def work():
            await asyncio.gather(*(asker.ask(question(number)) for number in range(count)))

        start = time.monotonic()
        asyncio.run(work())
        took = time.monotonic() - start
        asker.close()
    return sorted(one.came - start for one in server.requests), characters // 4 + 30, took


def most_beyond(came, of_each, limit):
    """The most by which what had come at any time was more than a tenth of a minute's limit, and nine tenths of it for
    each minute since the beginning. A busy machine makes a request late, and never early."""
    return max((count * of_each - limit * (0.1 + 0.9 * after / 60)) for count, after in enumerate(came, 1))


def test_never_more_requests_than_declared_and_not_much_fewer(tmp_path):
    came, _, took = asked(tmp_path, 150, requests_per_minute=600)
    assert most_beyond(came, 1, 600) <= 1
    assert len(came) / took * 60 >= 0.8 * 600


def test_never_more_tokens_than_declared_and_not_much_fewer(tmp_path):
    came, tokens, took = asked(tmp_path, 120, tokens_per_minute=60_000)
    assert most_beyond(came, tokens, 60_000) <= tokens
    assert len(came) * tokens / took * 60 >= 0.8 * 60_000


def test_the_narrower_of_both_limits_counts(tmp_path):
    came, _, took = asked(tmp_path, 60, requests_per_minute=300, tokens_per_minute=1_000_000)
    assert most_beyond(came, 1, 300) <= 1
    assert took == pytest.approx(30 / 4.5, rel=0.3)  # thirty at once, and 4.5 a second
