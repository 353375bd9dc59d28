"""Tests of streamed responses of the vLLM engine, against the small server."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from dataclasses import replace

import pytest

from components.errors import EngineError, ResourceError, StalePolicy
from components.inference.protocol import ResponseForm
from components.inference.vllm.client import StreamedCompletion
from components.json_reply import FailedAttempt
from components.rollout.players.partial import InterruptibleEngine, ResponseInterrupted
from tests.inference.test_forms import needs_llguidance
from tests.inference.test_vllm import HELLO, ask, die, seen


def heard(engine, request=HELLO):
    """Return the response, and its increments."""
    increments = []
    return ask(engine, replace(request, listener=increments.append)), increments


def test_increments_have_the_tokens_of_the_response_as_they_are_sampled(start, connect):
    server = start(fault="paused")
    engine = connect(server)
    increments = []

    def listen(increment) -> None:
        increments.append(increment)
        if len(increments) == 2:  # the server waits with the third token until now
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/go", data=b"{}").close()

    answer = ask(engine, replace(HELLO, listener=listen))
    assert [token for increment in increments for token in increment.token_ids] == answer.token_ids[:-1]
    assert [value for increment in increments for value in increment.logprobs] == answer.logprobs[:-1]
    assert "".join(increment.text for increment in increments) == answer.message["content"] == "policy/7"
    assert {increment.policy for increment in increments} == {"base"}
    assert all(increment.prompt_token_ids == answer.prompt_token_ids for increment in increments)
    assert answer == ask(engine), "a listener does not affect the response"
    assert [body.get("stream") for body in seen(server, "/v1/completions")[-2:]] == [True, None]


@needs_llguidance
def test_a_stream_with_a_form(start, connect):
    engine = connect(start())
    request = replace(HELLO, form=ResponseForm(json_schema='{"enum": ["yes", "no"]}', calls=()))
    answer, increments = heard(engine, request)
    assert answer.message["content"] in ('"yes"', '"no"')
    assert [token for increment in increments for token in increment.token_ids] == answer.token_ids[:-1]


def test_a_stream_that_breaks_off_is_an_error_and_not_sampled_again(start, connect):
    """Another attempt may sample other tokens than those that the listener has."""
    servers = [start(fault="breaks"), start()]
    engine = connect(*servers)
    with pytest.raises(EngineError, match="the response broke off"):
        heard(engine)
    asked = [body for server in servers for body in seen(server, "/v1/completions") if body.get("stream")]
    assert len(asked) == 1
    answer, _ = heard(engine, replace(HELLO, seed=8))
    assert answer.message["content"] == "policy/8"


def test_before_the_first_token_a_stream_is_retried_and_checked_as_any_response(start, connect, adapter_dir):
    server = start(restarts=1)
    engine = connect(server)
    engine.load_policy("v1", str(adapter_dir))
    die(server)
    answer, increments = heard(engine, replace(HELLO, policy="v1"))
    assert answer.message["content"] == "".join(increment.text for increment in increments) == "policy@v1/7"
    with pytest.raises(StalePolicy, match="and other answered"):
        heard(connect(start(fault="liar")))


def test_a_cancelled_stream_reports_nothing_any_more(start, connect, adapter_dir):
    server = start(fault="paused")
    engine = connect(server, on_swap="abort")
    increments = []

    async def swap():
        asked = asyncio.ensure_future(engine.chat(replace(HELLO, listener=increments.append)))
        while len(increments) < 2:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(engine.load_policy, "v1", str(adapter_dir))
        with pytest.raises(StalePolicy, match="policy base was replaced by v1"):
            await asked
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/go", data=b"{}").close()
        return await engine.chat(replace(HELLO, policy="v1"))

    assert asyncio.run(swap()).policy == "v1"
    assert len(increments) == 2


def test_the_most_likely_tokens_are_returned_with_and_without_a_stream(start, connect):
    """Of the entries of the server: without the sampled token if others are likelier, and without impossible ones."""
    server = start()
    engine = connect(server)
    answer, increments = heard(engine, replace(HELLO, alternatives=4))
    assert answer == ask(engine, replace(HELLO, alternatives=4))
    body = seen(server, "/v1/completions")[-1]
    assert (body["logprobs"], body["return_tokens_as_token_ids"]) == (4, True)
    others = [engine.tokenizer.convert_tokens_to_ids(text) for text in '!"#']
    expected = list(zip(others, [-0.05, -0.15, -0.25], strict=True))
    for token, logprob, likely in zip(answer.token_ids, answer.logprobs, answer.likeliest, strict=True):
        assert [entry[0] for entry in likely] == [*others, token]
        assert likely == [(other, pytest.approx(value)) for other, value in expected] + [(token, logprob)]
    reported = [likely for increment in increments for likely in increment.likeliest]
    assert reported == answer.likeliest[:-1]
    assert ask(engine).likeliest == []
    assert "return_tokens_as_token_ids" not in seen(server, "/v1/completions")[-1]


def test_an_interrupted_response_is_completed_from_its_tokens(start, connect):
    server = start(fault="paused")  # which waits with the third token
    engine, pause = connect(server), asyncio.Event()

    class Listened:
        """Pauses after two tokens."""

        policy = engine.policy

        async def chat(self, request):
            heard = []

            def listen(increment):
                request.listener(increment)
                heard.append(increment)
                if len(heard) == 2:
                    pause.set()

            return await engine.chat(replace(request, listener=listen))

    with pytest.raises(ResponseInterrupted) as interruption:
        asyncio.run(InterruptibleEngine(Listened(), pause).chat(HELLO))
    first = interruption.value.start
    urllib.request.urlopen(f"http://127.0.0.1:{server.port}/go", data=b"{}").close()
    answer = ask(engine, replace(HELLO, start=first))
    asked = seen(server, "/v1/completions")[-1]
    assert len(first.token_ids) == 2
    assert asked["prompt"] == first.prompt_token_ids + first.token_ids
    assert asked["max_tokens"] == HELLO.sampling.max_tokens - 2
    assert asked["seed"] != HELLO.seed % 2**63
    assert answer.prompt_token_ids == first.prompt_token_ids
    assert answer.token_ids[:2] == first.token_ids
    assert answer.logprobs[:2] == first.logprobs
    assert answer.message["content"] == f"popolicy/{asked['seed']}"


def test_a_response_that_broke_off_is_completed_from_its_tokens(start, connect):
    server = start(fault="breaks")
    answer = asyncio.run(InterruptibleEngine(connect(server), asyncio.Event()).chat(HELLO))
    first, again = (body for body in seen(server, "/v1/completions") if body.get("stream"))
    assert len(again["prompt"]) == len(first["prompt"]) + 3
    assert answer.prompt_token_ids == first["prompt"]
    assert answer.token_ids[:3] == again["prompt"][-3:]
    assert answer.message["content"].endswith(f"policy/{again['seed']}")
    assert len(answer.logprobs) == len(answer.token_ids)


class Heard:
    """Increments of a stream without an engine."""

    def __init__(self):
        self.begun = False
        self.tokens = []

    def add(self, sampled):
        self.begun = True
        self.tokens.append(sampled.tokens)


def event(tokens, reason=None, model="policy", **values) -> bytes:
    logprobs = {"token_logprobs": [-0.5] * len(tokens)} if tokens else None
    choice = {"token_ids": tokens, "logprobs": logprobs, "finish_reason": reason, **values}
    return b"data: " + json.dumps({"model": model, "choices": [choice]}).encode() + b"\n\n"


def consume(data: bytes, size: int = 7):
    """Return what a stream in parts of `size` bytes ends with, and what was heard."""
    listener = Heard()

    async def parts():
        for at in range(0, len(data), size):
            yield data[at : at + size]

    status, content = asyncio.run(
        StreamedCompletion(listener, {"model": "policy", "logprobs": 0}, "base").consume(parts())
    )
    return status, json.loads(content), listener


def test_events_may_be_split_anywhere_hold_several_tokens_and_be_long():
    long = list(range(60_000))  # the prompt, in the first event
    usage = b'data: {"choices": [], "usage": {}}\n\n'
    data = event([1], prompt_token_ids=long) + event([2, 3]) + event([]) + event([4, 5], "stop") + usage
    for size in (7, 1 << 14):
        status, answer, listener = consume(data + b"data: [DONE]\n\n", size)
        assert (status, answer["choices"][0]["token_ids"]) == (200, [1, 2, 3, 4, 5])
        assert listener.tokens == [[1], [2, 3]]
    assert consume(event([1]) + event([], "length"))[1]["choices"][0]["token_ids"] == [1]


def test_a_stream_that_is_no_completion_is_an_error():
    error = {"error": {"message": "Grammar error", "code": 400}}
    assert consume(b"data: " + json.dumps(error).encode() + b"\n\n")[:2] == (400, error)
    for data in (event([1]), event([1]) + b"data: [DONE]\n\n", b"data: {\n\n", event([1], token_ids=["x"])):
        with pytest.raises(FailedAttempt):
            consume(data)
    with pytest.raises(ResourceError, match="without token ids"):
        consume(event([1], token_ids=None))
