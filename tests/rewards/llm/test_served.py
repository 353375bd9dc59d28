"""Permanent rejections of a server, and requested waits."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from components.errors import ResourceError
from components.rewards.llm.budget import Meter
from components.rewards.llm.models.served import ServedJudge
from components.rewards.protocol import RewardResources
from tests.rewards import judge_replies as replies
from tests.rewards.judge_server import judge_server

QUESTION = [{"role": "user", "content": '<trajectory id="a">quality 1</trajectory>'}]


def ask(server, **options):
    spec = ServedJudge(**{"url": server.url, "model": "judge", "retry_for": 5} | options)
    client = spec.build(RewardResources(Path(), None, Meter()))
    try:
        return asyncio.run(client.call(QUESTION, None, "q", False))
    finally:
        client.close()


@pytest.mark.parametrize("code", ["unsupported_parameter", "unsupported_value"])
def test_a_parameter_that_the_model_does_not_take_ends_it_at_once(code):
    said = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
    with (
        judge_server(lambda asked: replies.refused(400, said, code)) as server,
        pytest.raises(
            ResourceError, match=r"max_completion_tokens.*leave it out: \+reward\.model\.extra\.max_tokens=null"
        ),
    ):
        ask(server)
    assert len(server.requests) == 1


def test_what_extra_sets_to_null_is_left_out():
    with judge_server() as server:
        ask(server, extra={"max_tokens": None, "max_completion_tokens": 9})
    assert "max_tokens" not in server.requests[0].body
    assert server.requests[0].body["max_completion_tokens"] == 9


def test_it_waits_for_as_many_milliseconds_as_the_server_says():
    with judge_server([replies.wait_as_openai(0.8)]) as server:
        ask(server)
    first, second = server.requests
    assert 0.8 <= second.came - first.came < 2


def test_how_it_is_asked_is_in_no_key():
    judge = ServedJudge(url="http://a/v1", model="judge", batch=True, key_variable="A", timeout=5)
    assert judge.key_part() == ServedJudge(url="http://b/v1", model="judge", requests_per_minute=7).key_part()
