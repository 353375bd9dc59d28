"""Tests of streamed answers over a real socket with OpenAI's client: as they are sampled, exact, and cancelled."""

from __future__ import annotations

import contextlib
import json
import time

import httpx
import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from components.errors import ContextOverflow, EngineError
from tests.inference.scripted import CALL, ScriptedEngine, served

QUESTION = [{"role": "user", "content": "Say it."}]
LONG = 400


def chat(client: openai.OpenAI, **options):
    return client.chat.completions.create(model="m", messages=QUESTION, **options)


def stream_of(client: openai.OpenAI, route: str):
    """A stream of one of the three APIs."""
    if route == "completions":
        return client.completions.create(model="m", prompt="Say it.", stream=True)
    if route == "responses":
        return client.responses.create(model="m", input="Say it.", stream=True)
    return chat(client, stream=True)


def contents(chunks, index: int = 0) -> list[str]:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return [choice.delta.content for choice in choices if choice.delta.content is not None]


@pytest.fixture(scope="module")
def tiny(base_dir):
    """A served model that never ends its turn, with its engine."""
    from components.inference.transformers.engine import TransformersEngine

    engine = TransformersEngine(base_dir, max_length=512, device="cpu")
    engine.batch.stop_ids = frozenset()
    with served(engine, decode=engine.tokenizer.decode) as client:
        yield client, engine


# As they are sampled


def test_the_first_chunk_leaves_before_the_answer_is_complete():
    engine = ScriptedEngine(["Hel", "lo"], " there.", hold=True)
    with served(engine) as client:
        stream = iter(chat(client, stream=True))
        role, first, second = next(stream), next(stream), next(stream)
        assert role.choices[0].delta.role == "assistant"
        assert contents([first, second]) == ["Hel", "lo"]
        engine.go_on.set()
        assert contents(stream) == [" there."]


def test_the_first_text_leaves_before_the_completion_is_complete():
    engine = ScriptedEngine(["Hel", "lo"], " there.", hold=True)
    with served(engine) as client:
        stream = iter(client.completions.create(model="m", prompt="Say it.", stream=True))
        assert [next(stream).choices[0].text, next(stream).choices[0].text] == ["Hel", "lo"]
        engine.go_on.set()
        last, end = stream
        assert (last.choices[0].text, last.choices[0].finish_reason) == (" there.", None)
        assert (end.choices[0].text, end.choices[0].finish_reason) == ("", "stop")


def test_the_first_event_leaves_before_the_response_is_complete():
    engine = ScriptedEngine(["Hel", "lo"], " there.", hold=True)
    with served(engine) as client:
        stream = iter(client.responses.create(model="m", input="Say it.", stream=True))
        kinds = [next(stream).type for _ in range(4)]
        opening = ["created", "in_progress", "output_item.added", "content_part.added"]
        assert kinds == [f"response.{kind}" for kind in opening]
        assert [next(stream).delta, next(stream).delta] == ["Hel", "lo"]
        engine.go_on.set()
        assert [event.delta for event in stream if event.type == "response.output_text.delta"] == [" there."]


@pytest.mark.parametrize("stop", [None, ["e", "\n"], ["\ufffd"]])
def test_streamed_answers_are_those_without_streaming(tiny, stop):
    """The same tokens, log-probabilities and text, for several answers at once."""
    client, _ = tiny
    for seed in (1, 7):
        options = {"seed": seed, "n": 3, "max_tokens": 80, "stop": stop, "logprobs": True}
        options["extra_body"] = {"return_token_ids": True}
        whole = chat(client, **options)
        chunks = list(chat(client, stream=True, stream_options={"include_usage": True}, **options))
        assert chunks[0].prompt_token_ids == whole.prompt_token_ids
        for choice in whole.choices:
            parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
            assert "".join(contents(chunks, choice.index)) == choice.message.content
            assert [token for part in parts for token in getattr(part, "token_ids", [])] == choice.token_ids
            logprobs = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
            assert logprobs == choice.logprobs.content
            assert [part.finish_reason for part in parts if part.finish_reason] == [choice.finish_reason]
        assert chunks[-1].usage == whole.usage
        assert max(len(contents(chunks, index)) for index in range(3)) > (10 if stop is None else 0)


def test_most_likely_tokens_come_with_each_token(tiny):
    """In both APIs, streamed or not: sorted, with the sampled token's own log-probability where it is one of them."""
    client, _ = tiny
    options = {"seed": 2, "max_tokens": 30, "logprobs": True, "top_logprobs": 4}
    entries = chat(client, **options).choices[0].logprobs.content
    streamed = [choice for chunk in chat(client, stream=True, **options) for choice in chunk.choices if choice.logprobs]
    assert [entry for choice in streamed for entry in choice.logprobs.content] == entries
    asked = {"model": "m", "input": "Say it.", "max_output_tokens": 30, "extra_body": {"seed": 2}, "top_logprobs": 4}
    response = client.responses.create(include=["message.output_text.logprobs"], **asked)
    assert response.top_logprobs == 4
    in_response = response.output[0].content[0].logprobs
    assert [[other.logprob for other in entry.top_logprobs] for entry in in_response] == [
        [other.logprob for other in entry.top_logprobs] for entry in entries
    ]
    for entry in entries:
        values = [other.logprob for other in entry.top_logprobs]
        assert len(values) == 4
        assert values == sorted(values, reverse=True)
        assert entry.logprob <= values[0]
        same = [other.logprob for other in entry.top_logprobs if entry.bytes and other.bytes == entry.bytes]
        assert same in ([], [entry.logprob])
    assert any(entry.logprob < entry.top_logprobs[0].logprob for entry in entries)


def test_a_streamed_response_is_that_without_streaming(tiny):
    client, _ = tiny
    options = {"model": "m", "input": "Say it.", "max_output_tokens": 60, "extra_body": {"seed": 3}}
    options["include"] = ["message.output_text.logprobs"]
    whole = client.responses.create(**options)
    events = list(client.responses.create(stream=True, **options))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == whole.output_text
    assert len(deltas) > 10
    entries = [(entry.token, entry.logprob) for event in deltas for entry in event.logprobs]
    assert entries == [(entry.token, entry.logprob) for entry in whole.output[0].content[0].logprobs]
    last = events[-1].response
    assert (last.output_text, last.status, last.usage) == (whole.output_text, whole.status, whole.usage)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert {event.item_id for event in deltas} == {last.output[0].id}


# Calls, empty answers, errors


PARTS = ["", '{"city": "San', " Francisco", '"']
"""Arguments of CALL as they are sampled, without the last brace."""
WIND = {**CALL, "id": "call_1", "function": {"name": "wind", "arguments": "{}"}}


def call_deltas(chunks) -> list:
    return [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or []]


def test_arguments_leave_before_the_call_is_complete():
    engine = ScriptedEngine(["Let me "], "look.", [CALL, WIND], call_parts=PARTS, hold=True)
    with served(engine) as client:
        stream = iter(chat(client, stream=True))
        early = call_deltas([next(stream) for _ in range(6)])
        assert [(call.id, call.function.name) for call in early] == [("call_0", "weather")] + [(None, None)] * 3
        assert [call.function.arguments for call in early] == PARTS
        engine.go_on.set()
        late = list(stream)
        deltas = early + call_deltas(late)
        assert [(call.index, call.function.arguments) for call in deltas[4:]] == [(0, "}"), (1, ""), (1, "{}")]
        assert contents(late) == ["look."]
        assert late[-1].choices[0].finish_reason == "tool_calls"
        with client.chat.completions.stream(model="m", messages=QUESTION) as whole:
            message = whole.get_final_completion().choices[0].message
        assert [call.function.arguments for call in message.tool_calls] == [CALL["function"]["arguments"], "{}"]


@pytest.mark.parametrize("parts", [[], ["Let me look."]])
def test_arguments_are_events_before_the_call_is_complete(parts):
    engine = ScriptedEngine(parts, "", [CALL, WIND], call_parts=PARTS, hold=True)
    check = TypeAdapter(ResponseStreamEvent)
    with served(engine) as client:
        stream = iter(client.responses.create(model="m", input="Say it.", stream=True))
        events = []
        while [event.delta for event in events if event.type == "response.function_call_arguments.delta"] != PARTS[1:]:
            events.append(next(stream))
        engine.go_on.set()
        events += stream
        for event in events:
            check.validate_python(event.model_dump())
        place = len(parts)
        final = events[-1].response
        assert [item.type for item in final.output] == ["message"] * len(parts) + ["function_call"] * 2
        for index, call in enumerate((CALL, WIND)):
            mine = [event for event in events if getattr(event, "output_index", None) == place + index]
            deltas = [event.delta for event in mine if event.type == "response.function_call_arguments.delta"]
            assert "".join(deltas) == call["function"]["arguments"]
            assert (mine[0].type, mine[-1].type) == ("response.output_item.added", "response.output_item.done")
            assert mine[-1].item == final.output[place + index]
            assert final.output[place + index].arguments == call["function"]["arguments"]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        with client.responses.stream(model="m", input="Say it.") as whole:
            assert [item.type for item in whole.get_final_response().output] == [item.type for item in final.output]


def test_items_of_a_response_are_in_the_order_in_which_they_began():
    with served(ScriptedEngine([], "Looking.", [CALL, WIND], call_parts=PARTS)) as client:
        events = list(client.responses.create(model="m", input="Say it.", stream=True))
        whole = client.responses.create(model="m", input="Say it.")
    added = [(event.output_index, event.item.type) for event in events if event.type == "response.output_item.added"]
    assert added == [(0, "function_call"), (1, "message"), (2, "function_call")]
    final = events[-1].response
    assert [item.type for item in final.output] == [kind for _, kind in added]
    assert [item.type for item in whole.output] == ["message", "function_call", "function_call"]
    assert (final.output_text, final.usage) == (whole.output_text, whole.usage)


def test_a_call_that_differs_from_what_was_sent_is_an_error():
    for function in (WIND["function"], {**CALL["function"], "arguments": '{"city": "Bern"}'}):
        with served(ScriptedEngine([], "", [{**CALL, "function": function}], call_parts=PARTS)) as client:
            with pytest.raises(openai.APIError, match="differs"):
                list(chat(client, stream=True))
            last = list(client.responses.create(model="m", input="Say it.", stream=True))[-1]
            assert last.type == "response.failed"


@pytest.mark.parametrize("calls", [[], [CALL]])
def test_an_answer_without_text_can_be_sent_back(calls):
    """Clients put the deltas' fields together: without calls, an empty content has to be among them."""
    with served(ScriptedEngine([], "", calls)) as client:
        chunks = list(chat(client, stream=True))
        assert contents(chunks) == ([] if calls else [""])
        with client.chat.completions.stream(model="m", messages=QUESTION) as stream:
            message = stream.get_final_completion().choices[0].message.model_dump(exclude_none=True)
        answers = [{"role": "tool", "tool_call_id": "call_0", "content": "mild"}] if calls else []
        messages = [*QUESTION, message, *answers, *QUESTION]
        assert client.chat.completions.create(model="m", messages=messages).choices[0].finish_reason


def test_every_event_is_of_its_type():
    check = TypeAdapter(ResponseStreamEvent)
    for parts, calls, call_parts in (
        ([], [], ()),
        (["a", "b"], [], ()),
        (["a"], [CALL], ()),
        ([], [CALL, CALL], ()),
        (["a"], [], PARTS),
    ):
        with served(ScriptedEngine(parts, "", calls, call_parts=call_parts)) as client:
            events = list(client.responses.create(model="m", input="Say it.", stream=True))
            for event in events:
                check.validate_python(event.model_dump())
            with client.responses.stream(model="m", input="Say it.") as stream:
                final = stream.get_final_response()
        added = [event.item.type for event in events if event.type == "response.output_item.added"]
        assert added == [item.type for item in final.output] + ["function_call"] * bool(call_parts)
        assert final.output_text == "".join(parts)


def test_only_an_error_before_the_first_token_has_its_status():
    for parts in ([], ["a"]):
        with served(ScriptedEngine(parts, error=ContextOverflow("too long"))) as client:
            for streamed in ("chat", "completions", "responses")[: 2 if parts else 3]:
                with pytest.raises(openai.APIError, match="too long") as caught:
                    list(stream_of(client, streamed))
                assert caught.value.code == "context_length_exceeded"
                assert isinstance(caught.value, openai.BadRequestError) == (not parts), streamed


@pytest.mark.parametrize("error", [EngineError("out of memory"), KeyError("secret detail")])
def test_an_error_after_the_first_token_is_the_last_event(error, caplog):
    with served(ScriptedEngine(["a"], error=error)) as client:
        last = list(client.responses.create(model="m", input="Say it.", stream=True))[-1]
        assert (last.type, last.response.status, last.response.output) == ("response.failed", "failed", [])
        expected = "out of memory" if isinstance(error, EngineError) else "internal error (KeyError)"
        assert expected in last.response.error.message
        body = {"model": "m", "input": "x", "stream": True}
        text = httpx.post(f"{client.base_url}responses", json=body).text
    assert "secret detail" not in text
    assert ("secret detail" in caplog.text) == isinstance(error, KeyError)


def test_both_streams_end_with_done():
    with served(ScriptedEngine(["a"])) as client:
        for route, body in (("responses", {"input": "x"}), ("chat/completions", {"messages": QUESTION})):
            answer = httpx.post(f"{client.base_url}{route}", json={"model": "m", "stream": True, **body})
            assert answer.headers["content-type"].startswith("text/event-stream")
            *events, last, end = answer.text.split("\n\n")
            assert (last, end) == ("data: [DONE]", "")
            for event in events:
                data = json.loads(event.partition("data: ")[2])
                assert event.startswith("event: " + data["type"] if route == "responses" else "data: ")


def test_an_episodes_answer_is_complete_before_its_stream():
    """Its record does not depend on where the agent stops to read."""
    engine = ScriptedEngine(["a", "b"], "c")
    with served(engine, engines={"k": engine}) as client:
        assert contents(chat(client, stream=True)) == ["abc"]


# Cancellation


def wait_for(condition) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("route", ["chat", "completions", "responses"])
def test_a_stream_that_its_client_closes_is_cancelled(route):
    engine = ScriptedEngine(["a", "b"], hold=True)
    with served(engine) as client:
        stream = stream_of(client, route)
        next(iter(stream))
        assert not engine.cancelled.is_set()
        stream.close()
        wait_for(engine.cancelled.is_set)


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnected_client_frees_its_place_in_the_batch(tiny, monkeypatch, stream):
    """Long before the last token: each pass is slow, so that the whole answer would take 20 s."""
    client, engine = tiny
    sample = engine.batch.sample

    def slowly():
        time.sleep(0.05)
        return sample()

    monkeypatch.setattr(engine.batch, "sample", slowly)
    before = engine.counters["sampled_tokens"]
    body = {"model": "m", "messages": QUESTION, "max_tokens": LONG, "seed": 1, "stream": stream}
    with httpx.Client(timeout=600 if stream else 0.5) as raw:
        with (
            contextlib.suppress(httpx.ReadTimeout),
            raw.stream("POST", f"{client.base_url}chat/completions", json=body) as answer,
        ):
            next(answer.iter_lines())
        if stream:
            wait_for(lambda: engine.batch.active)  # the first line, with the role, may come before the first token
        # leaving the block closes the connection
    wait_for(lambda: not engine.batch.active and engine._task.done())
    assert engine.counters["sampled_tokens"] - before < LONG // 2
    monkeypatch.undo()
    assert chat(client, max_tokens=5, seed=1).usage.completion_tokens == 5


def test_a_text_that_cannot_be_decoded_in_parts_is_sent_when_it_is_complete(tiny, monkeypatch, caplog):
    """It does not fail the other answers of its batch."""
    client, _ = tiny
    whole = chat(client, max_tokens=20, seed=4, n=2)

    def broken(self, tokens):
        raise ValueError("a decoder's defect")

    monkeypatch.setattr("components.inference.growing_text.GrowingText.extend", broken)
    chunks = list(chat(client, max_tokens=20, seed=4, n=2, stream=True))
    assert [contents(chunks, index) for index in range(2)] == [[c.message.content] for c in whole.choices]
    assert "a decoder's defect" in caplog.text
