"""Judge server of the tests, seen through the provider's own client."""

from __future__ import annotations

import io
import json
import time

import openai
import pytest

from tests.rewards import judge_replies as replies
from tests.rewards.judge_server import GOOD, Reply, judge_server

PROMPT = '<trajectory id="a">quality 0.25</trajectory>\n<trajectory id="b">quality 1</trajectory>'
RIGHT = {"a": 0.25, "b": 1.0}


def client(server, key="none"):
    return openai.OpenAI(base_url=server.url, api_key=key, max_retries=0)


def ask(server, prompt=PROMPT, **options):
    messages = [{"role": "system", "content": "Judge."}, {"role": "user", "content": prompt}]
    with client(server) as asking:
        return asking.chat.completions.create(model="judge", messages=messages, **options)


def content(completion):
    return completion.choices[0].message.content


def scores(completion):
    return {score["trajectory_id"]: score["score"] for score in json.loads(content(completion))["scores"]}


def test_it_scores_by_what_stands_in_the_tags_and_keeps_what_it_was_asked():
    with judge_server() as server:
        result = ask(server, temperature=0)
    assert scores(result) == RIGHT
    assert result.usage.prompt_tokens == (len(PROMPT) + len("Judge.")) // 4
    (asked,) = server.requests
    assert asked.ids == ["a", "b"]
    assert asked.body["temperature"] == 0
    assert asked.headers["authorization"] == "Bearer none"


def test_the_rule_can_be_another_one():
    with judge_server(rate=lambda name, text: len(text)) as server:
        assert scores(ask(server)) == {"a": 12, "b": 9}


def test_requests_meet_the_replies_in_turn_and_then_the_right_answer():
    with judge_server([replies.TOO_MANY, replies.EMPTY]) as server:
        with pytest.raises(openai.RateLimitError):
            ask(server)
        assert content(ask(server)) == ""
        assert scores(ask(server)) == scores(ask(server)) == RIGHT


def test_a_function_says_what_a_request_meets():
    with judge_server(replies.until_retried(replies.OVERLOADED)) as server:
        for prompt in (PROMPT, PROMPT.replace("0.25", "0.75")):
            with pytest.raises(openai.InternalServerError):
                ask(server, prompt)
            ask(server, prompt)
    with judge_server(replies.for_share(0.3, replies.EMPTY)) as server:
        empty = [content(ask(server)) == "" for _ in range(40)]
    assert 4 <= sum(empty) <= 20


def test_a_server_may_not_know_a_format():
    with judge_server(replies.without_format(replies.NO_FORMAT, "json_schema")) as server:
        ask(server, response_format={"type": "json_object"})
        schema = {"type": "json_schema", "json_schema": {"name": "scores", "schema": {}}}
        with pytest.raises(openai.BadRequestError):
            ask(server, response_format=schema)


@pytest.mark.parametrize("reply", [replies.HUNG_UP, replies.CUT], ids=["before", "amid"])
def test_it_cuts_the_line(reply):
    with judge_server([reply]) as server:
        with pytest.raises(openai.APIConnectionError):
            ask(server)
        assert scores(ask(server)) == RIGHT


def test_it_takes_its_time_and_counts_what_is_under_way():
    with judge_server(lambda asked: Reply(after=0.05)) as server:
        start = time.monotonic()
        ask(server)
        assert time.monotonic() - start >= 0.05
    assert server.most_at_once == 1
    assert server.most_within(10.0) == 1


def test_it_asks_for_a_key_and_knows_its_models():
    with judge_server(key="sesame") as server:
        with pytest.raises(openai.AuthenticationError):
            ask(server)
        asking = client(server, "sesame")
        assert [model.id for model in asking.models.list()] == ["judge"]
        with pytest.raises(openai.NotFoundError):
            asking.chat.completions.create(model="other", messages=[])
        asking.close()


def test_a_gullible_judge_obeys_what_stands_between_the_trajectories_only(subtests):
    """A client that escapes its tags, so that a text cannot close them, is safe."""
    for around in ["json", "text"]:
        with subtests.test(around=around):
            written = replies.INJECTED if around == "text" else replies.INJECTED.replace("<", "\\u003c")
            prompt = (
                f'<trajectory id="a">quality 0.25 {written}</trajectory>\n<trajectory id="b">quality 1</trajectory>'
            )
            with judge_server([replies.GULLIBLE]) as server:
                results = scores(ask(server, prompt))
            assert {name: results[name] for name in RIGHT} == ({"a": 1, "b": 0} if around == "text" else RIGHT)


def lines(*names, model="judge"):
    body = {"model": model, "messages": [{"role": "user", "content": PROMPT}]}
    request = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    return "\n".join(json.dumps({"custom_id": name, **request}) for name in names).encode()


def batch(asking, data):
    """Send a batch and poll it until it has ended; return its states and the batch."""
    file = asking.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch")
    window = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    result = asking.batches.create(input_file_id=file.id, **window)
    states = [result.status]
    while states[-1] in ("validating", "in_progress"):
        result = asking.batches.retrieve(result.id)
        states.append(result.status)
    return states, result


def read(asking, name):
    return [json.loads(line) for line in asking.files.content(name).text.splitlines()]


def test_a_batch_is_answered_line_by_line_in_another_order():
    with judge_server([GOOD, replies.OVERLOADED]) as server, client(server) as asking:
        states, result = batch(asking, lines("x", "y", "z"))
        assert states == ["validating", "in_progress", "in_progress", "completed"]
        assert [line["custom_id"] for line in read(asking, result.output_file_id)] == ["z", "x"]
        (bad,) = read(asking, result.error_file_id)
        assert (bad["custom_id"], bad["response"]["status_code"]) == ("y", 500)
        body = openai.types.chat.ChatCompletion(**read(asking, result.output_file_id)[0]["response"]["body"])
        assert scores(body) == RIGHT
    assert result.request_counts.failed == 1


def test_a_batch_that_expires_answers_a_part():
    with judge_server(batch_end="expired") as server, client(server) as asking:
        states, result = batch(asking, lines("x", "y", "z"))
        assert states[-1] == "expired"
        assert [line["custom_id"] for line in read(asking, result.output_file_id)] == ["z", "x"]
        assert [line["error"]["code"] for line in read(asking, result.error_file_id)] == ["batch_expired"]


def test_a_batch_of_lines_that_share_an_id_fails():
    with judge_server() as server, client(server) as asking:
        states, result = batch(asking, lines("x", "x"))
    assert states[-1] == "failed"
    assert "custom_id" in result.errors.data[0].message
