"""Tests of the Responses API with OpenAI's client: parsing, follow-up requests, and rejections."""

from __future__ import annotations

import json

import openai
import pytest
from openai.types.responses import Response

from components.inference.app import AppOptions
from components.inference.protocol import BASE_POLICY, ChatCompletion, ChatRequest
from components.inference.server import ModelServer
from tests.inference.scripted import decode, served

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CHAT_WEATHER = {"type": "function", "function": {name: WEATHER[name] for name in ("name", "description", "parameters")}}


class Forecaster:
    """Says the last words, or, offered tools, calls the first one for each city that these name."""

    policy = BASE_POLICY

    def __init__(self) -> None:
        self.requests: list[ChatRequest] = []

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        self.requests.append(request)
        text = request.messages[-1]["content"]
        message: dict = {"role": "assistant", "content": text.upper()}
        cities = text.split() if request.tools and request.messages[-1]["role"] == "user" else []
        if cities:
            message = {"role": "assistant", "content": "Let me look."}
            message["tool_calls"] = [
                {
                    "id": f"call_{index}",
                    "type": "function",
                    "function": {"name": request.tools[0]["function"]["name"], "arguments": json.dumps({"city": city})},
                }
                for index, city in enumerate(cities)
            ]
        ids = [ord(letter) for letter in message["content"]]
        reason = "length" if request.sampling.max_tokens == 1 else "tool_calls" if cities else "stop"
        return ChatCompletion(message, reason, [1, 2, 3], ids, [-0.5] * len(ids), self.policy)

    def load_policy(self, version: str, folder: str | None) -> None:
        raise AssertionError

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def episodes():
    """A server of two episodes, by key, and what they are asked."""
    engines = {"one": Forecaster(), "two": Forecaster()}
    with ModelServer(Forecaster(), "policy", AppOptions(decode=decode, engines=engines)) as server:
        yield server, engines


@pytest.fixture
def engine(episodes):
    episodes[1]["one"].requests.clear()
    return episodes[1]["one"]


@pytest.fixture(scope="module")
def client(episodes):
    with openai.OpenAI(base_url=episodes[0].url, api_key="one", timeout=600) as client:
        yield client


def ask(client: openai.OpenAI, given="hello", **options) -> Response:
    return client.responses.create(model="policy", input=given, **options)


def test_an_answer_reads_like_openais(client, engine):
    answer = ask(client, instructions="Shout.", max_output_tokens=17, temperature=0.5)
    Response.model_validate(answer.model_dump())  # every field that its type demands, of the type that it demands
    assert answer.output_text == "HELLO"
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (3, 5, 8)
    (asked,) = engine.requests
    assert asked.messages == [{"role": "system", "content": "Shout."}, {"role": "user", "content": "hello"}]
    assert (asked.sampling.max_tokens, asked.sampling.temperature) == (17, 0.5)
    cut = ask(client, max_output_tokens=1, store=False)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (cut.completed_at, cut.store) == (None, False)


PENALTIES = {"presence_penalty": 0, "frequency_penalty": 0.0}
REQUIRED = [
    "id",
    "object",
    "created_at",
    "completed_at",
    "status",
    "incomplete_details",
    "model",
    "previous_response_id",
    "instructions",
    "output",
    "error",
    "tools",
    "tool_choice",
    "truncation",
    "parallel_tool_calls",
    "text",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "top_logprobs",
    "temperature",
    "reasoning",
    "user",
    "usage",
    "max_output_tokens",
    "max_tool_calls",
    "store",
    "background",
    "service_tier",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
]
"""Required fields of a response (Open Responses, schema of ResponseResource)."""


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_the_fields_that_open_responses_requires(client, engine, stream):
    options = {"tools": [WEATHER], "safety_identifier": "s", "prompt_cache_key": "k", "extra_body": PENALTIES}
    if stream:
        with client.responses.create(model="policy", input="hello", stream=True, **options) as events:
            responses = [event.response for event in events if hasattr(event, "response")]
        assert [response.status for response in responses] == ["in_progress", "in_progress", "completed"]
    else:
        responses = [ask(client, **options)]
    for response in responses:
        data = response.model_dump(exclude_unset=True)
        assert [name for name in REQUIRED if name not in data] == []
        numbers = ("top_p", "temperature", "presence_penalty", "frequency_penalty", "top_logprobs", "created_at")
        assert [name for name in numbers if not isinstance(data[name], int | float)] == []
        assert (data["store"], data["safety_identifier"], data["prompt_cache_key"]) == (True, "s", "k")
        assert {"type", "name", "description", "parameters", "strict"} <= set(data["tools"][0])
        if response.status == "completed":
            assert response.completed_at >= response.created_at
            assert {"type", "text", "annotations", "logprobs"} <= set(data["output"][0]["content"][0])


def loop(client: openai.OpenAI, *, remembered: bool) -> Response:
    """A conversation with tools as the client's documentation writes it: with the items themselves, or with the id of
    the answer before."""
    talk: list = [{"role": "user", "content": "Bern Oslo"}]
    answer = ask(client, talk, tools=[WEATHER])
    while calls := [item for item in answer.output if item.type == "function_call"]:
        told = [
            {"type": "function_call_output", "call_id": call.call_id, "output": f"rain in {json.loads(call.arguments)}"}
            for call in calls
        ]
        if remembered:
            answer = ask(client, told, tools=[WEATHER], previous_response_id=answer.id)
        else:
            talk += [*answer.output, *told]
            answer = ask(client, talk, tools=[WEATHER], store=False)
    return answer


def test_a_conversation_with_parallel_calls_goes_round(client, engine):
    answer = loop(client, remembered=False)
    first, second = engine.requests
    assert answer.output_text == "RAIN IN {'CITY': 'OSLO'}"
    assert first.tools == second.tools == [CHAT_WEATHER]
    calls = [
        {
            "id": f"call_{n}",
            "type": "function",
            "function": {"name": "weather", "arguments": json.dumps({"city": city})},
        }
        for n, city in enumerate(["Bern", "Oslo"])
    ]
    assert second.messages == [
        {"role": "user", "content": "Bern Oslo"},
        {"role": "assistant", "content": "Let me look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_0", "content": "rain in {'city': 'Bern'}"},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain in {'city': 'Oslo'}"},
    ]
    loop(client, remembered=True)
    assert engine.requests[2:] == [
        ChatRequest(one.messages, one.tools, one.policy, one.sampling, other.seed)
        for one, other in zip((first, second), engine.requests[2:], strict=True)
    ]


def test_an_answer_before_is_of_this_episode_and_without_its_instructions(episodes, client, engine):
    first = ask(client, "hello", instructions="Shout.")
    ask(client, "more", previous_response_id=first.id, instructions="Whisper.")
    assert [message["content"] for message in engine.requests[1].messages] == ["Whisper.", "hello", "HELLO", "more"]
    with openai.OpenAI(base_url=episodes[0].url, api_key="two") as other:
        with pytest.raises(openai.BadRequestError, match="is no stored response of this episode") as caught:
            ask(other, previous_response_id=first.id)
        assert caught.value.param == "previous_response_id"
    unkept = ask(client, store=False)
    with pytest.raises(openai.BadRequestError, match="is no stored response of this episode"):
        ask(client, previous_response_id=unkept.id)


def test_references_stand_for_stored_items(client, engine):
    """As Vercel's AI SDK sends them: the items of an answer by their ids, then the outputs."""
    loop(client, remembered=False)
    user = {"role": "user", "content": "Bern Oslo"}
    answer = ask(client, [user], tools=[WEATHER])
    references = [{"type": "item_reference", "id": item.id} for item in answer.output]
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": f"rain in {json.loads(item.arguments)}"}
        for item in answer.output
        if item.type == "function_call"
    ]
    assert (len(references), len(outputs)) == (3, 2)
    ask(client, [user, *references, *outputs], tools=[WEATHER])
    assert engine.requests[3].messages == engine.requests[1].messages


def test_a_reference_to_an_unknown_item_is_rejected(client):
    answer = ask(client, "Bern Oslo", tools=[WEATHER]).id.removeprefix("resp_")
    for item in ("msg_1", f"fc_{answer}_7", f"rs_{answer}", "", f"msg_{answer}_0"):
        given = [{"role": "user", "content": "a"}, {"type": "item_reference", "id": item}]
        with pytest.raises(openai.BadRequestError, match="no stored response has this item; send the item") as caught:
            ask(client, given)
        assert caught.value.param == "input.1.id", item


def told(answer: Response) -> list:
    """The items of an answer, without their ids."""
    return [
        (item.content[0].text, item.status) if item.type == "message" else (item.call_id, item.name, item.arguments)
        for item in answer.output
    ]


@pytest.mark.parametrize("given", ["hello", "Bern Oslo"])
def test_a_stream_tells_the_same_answer(client, engine, given):
    options = {"tools": [WEATHER]} if given != "hello" else {}
    whole = ask(client, given, include=["message.output_text.logprobs"], **options)
    with client.responses.stream(
        model="policy", input=given, include=["message.output_text.logprobs"], **options
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    message = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done"]
    message += ["content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    items = [*message, *(call * 2 if options else [])]
    assert kinds == [f"response.{kind}" for kind in ("created", "in_progress", *items, "completed")]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert told(final) == told(whole)
    logprobs = final.output[0].content[0].logprobs
    assert "".join(logprob.token for logprob in logprobs) == whole.output_text
    assert {logprob.logprob for logprob in logprobs} == {-0.5}


def test_an_answer_that_was_cut_ends_its_stream_as_incomplete(client, engine):
    last = list(ask(client, max_output_tokens=1, stream=True))[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")


def test_items_are_understood(client, engine):
    given = [
        {"role": "developer", "content": "Shout."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in ("a", "???")]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "???"},
    ]
    ask(client, given)
    assert engine.requests[0].messages == [
        {"role": "system", "content": "Shout."},
        {"role": "user", "content": "a???"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "???"},
    ]


def test_a_refusal_is_openais_and_does_not_reach_the_engine(client, engine):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, conversation="conv_1")
    assert (caught.value.param, caught.value.type) == ("conversation", "invalid_request_error")
    assert not engine.requests


def test_a_server_without_episodes_remembers_nothing_and_says_so():
    engine = Forecaster()
    with served(engine, "policy") as client:
        assert ask(client).output_text == "HELLO"
        for option in ({"store": True}, {"previous_response_id": "resp_1"}):
            with pytest.raises(openai.BadRequestError, match="send the whole conversation as input") as caught:
                ask(client, **option)
            assert caught.value.param == next(iter(option))
        with pytest.raises(openai.BadRequestError, match="stores no responses; send the item itself"):
            ask(client, [{"type": "item_reference", "id": "msg_1"}])
        ask(client, tools=[{**WEATHER, "strict": True}])
        assert engine.requests[-1].form.strict


def test_in_an_episode_tools_may_be_strict(client, engine):
    """What is drawn from is the collector's there: the agent is not refused for what its library sends."""
    ask(client, tools=[{**WEATHER, "strict": True}])
    client.chat.completions.create(
        model="policy",
        messages=[{"role": "user", "content": "x"}],
        tools=[{**CHAT_WEATHER, "function": {**CHAT_WEATHER["function"], "strict": True}}],
    )
    assert [request.tools for request in engine.requests] == [[CHAT_WEATHER], [CHAT_WEATHER]]
    assert not any(request.form.strict for request in engine.requests)
    with pytest.raises(openai.BadRequestError, match="training needs its own responses"):
        ask(client, tools=[WEATHER], parallel_tool_calls=False)
