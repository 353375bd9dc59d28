"""Tests of Anthropic's Messages with its client: requests, answers, streams, errors, and prompts of a real template."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import httpx
import openai
import pytest

from components.errors import ContextOverflow
from components.inference.app import AppOptions
from components.inference.protocol import BASE_POLICY, ChatCompletion, ChatRequest, Increment
from components.inference.server import ListenOptions, ModelServer
from components.trajectories.reasoning import ReasoningForm
from tests.inference.test_growing_calls import CALLS, TAGGED, TextEngine

anthropic = pytest.importorskip("anthropic")

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "of a city", "input_schema": SCHEMA}
ASKED = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "Hello"}]}
CACHED = {"cache_control": {"type": "ephemeral"}}
USE = {"type": "tool_use", "id": "call_0_0", "name": "weather", "input": {"city": "Zürich"}}


class Listener:
    """Answers OK, and keeps what it is asked."""

    policy = BASE_POLICY

    def __init__(self, error: Exception | None = None, stop: str | None = None):
        self.asked: list[ChatRequest] = []
        self.error, self.stop = error, stop

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        self.asked.append(request)
        if request.listener is not None:
            request.listener(Increment("OK", [1], [-0.5], [1, 2, 3], self.policy))
        if self.error is not None:
            raise self.error
        message = {"role": "assistant", "content": "OK"}
        return ChatCompletion(message, "stop", [1, 2, 3], [1, 2], [-0.5] * 2, self.policy, stop_string=self.stop)

    def count_tokens(self, request: ChatRequest) -> int:
        self.asked.append(request)
        return 7


@pytest.fixture(scope="module")
def served():
    """A factory of servers of an engine, each with its root, which Anthropic's clients have as address."""
    servers = []

    def serve(engine, key=None, **options):
        servers.append(ModelServer(engine, "m", AppOptions(**options), ListenOptions(key=key)).__enter__())
        return servers[-1].url.removesuffix("/v1")

    yield serve
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def listener(served):
    engine = Listener()
    with anthropic.Anthropic(base_url=served(engine), api_key="k", max_retries=0) as client:
        yield engine, client


USER = {"role": "user", "content": "Hello"}
CALL = {
    "id": "call_0_0",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Zürich"}'},
}
CONVERSATIONS = {
    "blocks of the system": (
        {"system": [{"type": "text", "text": "Be brief.", **CACHED}, {"type": "text", "text": "Be kind."}]},
        [{"role": "system", "content": "Be brief.\nBe kind."}, USER],
    ),
    "a call and its result": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Hello", **CACHED}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": ""},
                        {"type": "text", "text": "Let me look."},
                        USE,
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "call_0_0", "content": "Rain.", "is_error": False},
                        {"type": "text", "text": "And now?"},
                    ],
                },
            ]
        },
        [
            USER,
            {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL], "reasoning": "Hm."},
            {"role": "tool", "tool_call_id": "call_0_0", "content": "Rain."},
            {"role": "user", "content": "And now?"},
        ],
    ),
    "a failed call alone, in messages of their own": (
        {
            "messages": [
                USER,
                {"role": "assistant", "content": "I look."},
                {"role": "assistant", "content": [USE]},
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "call_0_0",
                            "content": [{"type": "text", "text": "no such city"}],
                            "is_error": True,
                        }
                    ],
                },
            ]
        },
        [
            USER,
            {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_0_0", "content": "Error: no such city"},
        ],
    ),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_conversation_is_that_of_chat_completions(listener, name):
    engine, client = listener
    options, expected = CONVERSATIONS[name]
    answer = client.messages.create(**ASKED | options)
    counted = {key: value for key, value in (ASKED | options).items() if key != "max_tokens"}
    assert client.messages.count_tokens(**counted).input_tokens == 7
    assert [request.messages for request in engine.asked[-2:]] == [expected, expected]
    assert (answer.content[0].text, answer.stop_reason, answer.model, answer.role) == (
        "OK",
        "end_turn",
        "m",
        "assistant",
    )
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (3, 2)


def test_parameters_and_tools_are_those_of_chat_completions(listener):
    engine, client = listener
    options = {"stop_sequences": ["END"], "metadata": {"user_id": "u"}, "service_tier": "auto"}
    options |= {
        "extra_body": {"temperature": 0.5, "top_p": 0.9, "top_k": 7},
        "thinking": {"type": "enabled", "budget_tokens": 20},
    }
    tool = {**WEATHER, **CACHED}
    chosen = {
        None: None,
        "auto": None,
        "any": ("weather",),
        "none": (),
    }
    for kind, calls in chosen.items():
        choice = {} if kind is None else {"tool_choice": {"type": kind}}
        client.messages.create(**ASKED, **options, tools=[tool], **choice)
        request = engine.asked[-1]
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.9, 7, 50)
        assert (sampling.max_thinking_tokens, request.stop, request.form.calls) == (20, ("END",), calls)
        function = {"name": "weather", "description": "of a city", "parameters": SCHEMA}
        assert request.tools == ([] if calls == () else [{"type": "function", "function": function}])
    client.messages.create(**ASKED, tools=[tool], tool_choice={"type": "tool", "name": "weather"})
    assert engine.asked[-1].form.calls == ("weather",)
    client.messages.create(**ASKED, tools=[tool], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert engine.asked[-1].form.single
    client.messages.create(**ASKED, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert json.loads(engine.asked[-1].form.json_schema) == SCHEMA


REFUSED = {
    "messages.0.content.0.type: 'image' is not supported in a message of role 'user'; expected one of text, tool": {
        "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    },
    "messages.0.content.0.type: 'document' is not supported in the result of a call": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "document"}]}],
            }
        ]
    },
    "messages.1.role: this server does not continue an assistant message": {
        "messages": [USER, {"role": "assistant", "content": "I"}]
    },
    "messages.0.content.0.citations: ": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "citations": [{}]}]}]
    },
    "tools.0.type: 'bash_20250124': this server has no built-in tools": {
        "tools": [{"type": "bash_20250124", "name": "bash"}]
    },
    "tools.0.input_schema.type: 'array': expected 'object'": {"tools": [WEATHER | {"input_schema": {"type": "array"}}]},
    "tools.0.parameters: no such key in tools.0": {"tools": [{**WEATHER, "parameters": SCHEMA}]},
    "tool_choice: 'nothing' is none of the tools": {"tool_choice": {"type": "tool", "name": "nothing"}},
    "tool_choice.name: belongs to type 'tool'": {"tool_choice": {"type": "auto", "name": "weather"}},
    "max_tokens: 0: expected at least 1": {"max_tokens": 0},
    "container: 'c' is not supported by this server; leave it out or send null": {"container": "c"},
    "output_config.effort: 'low': expected null": {"output_config": {"effort": "low"}},
    "service_tier: 'priority' is not supported": {"service_tier": "priority"},
    "logit_bias: no such parameter; expected one of ": {"logit_bias": {}},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_supported_is_refused_by_its_name(listener, message):
    with pytest.raises(anthropic.BadRequestError) as caught:
        listener[1].messages.create(**ASKED, extra_body=REFUSED[message])
    assert caught.value.type == "invalid_request_error"
    assert caught.value.api_message.startswith(message), caught.value.api_message


def test_errors_have_the_types_of_anthropics(served, listener):
    root = served(Listener(ContextOverflow("the prompt has 9 tokens", "; shorten")))
    ask = {"base_url": root, "api_key": "k", "max_retries": 0}
    with anthropic.Anthropic(**ask) as client, pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**ASKED)
    assert caught.value.api_message == "prompt is too long: the prompt has 9 tokens"
    with pytest.raises(anthropic.NotFoundError, match="the model 'other' is not here"):
        listener[1].messages.create(**ASKED | {"model": "other"})
    with anthropic.Anthropic(**ask) as client, pytest.raises(anthropic.APIStatusError) as caught:
        list(client.messages.create(**ASKED, stream=True))
    assert caught.value.type == "invalid_request_error", "an error after the first token is an event"
    with anthropic.Anthropic(**ask) as client, pytest.raises(anthropic.NotFoundError, match="no such route"):
        client.messages.batches.list()


@pytest.mark.parametrize("episodes", [False, True])
def test_a_key_is_a_bearer_token_or_x_api_key(served, episodes):
    key = "0123456789abcdefg"
    root = served(Listener(), **{"engines": {key: Listener()}} if episodes else {"key": key})
    for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
        assert httpx.post(f"{root}/v1/messages", json=ASKED, headers=headers).status_code == 200
    for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Bearer wrong"}):
        answer = httpx.post(f"{root}/v1/messages", json=ASKED, headers=headers)
        assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
    for credential in ({"api_key": key}, {"auth_token": key}):
        with anthropic.Anthropic(base_url=root, **credential) as client:
            assert client.messages.create(**ASKED).content[0].text == "OK"


def test_a_stop_sequence_is_named(served):
    with anthropic.Anthropic(base_url=served(Listener(stop="END")), api_key="k") as client:
        answer = client.messages.create(**ASKED, stop_sequences=["END"])
        with client.messages.stream(**ASKED, stop_sequences=["END"]) as stream:
            streamed = stream.get_final_message()
    assert {(a.stop_reason, a.stop_sequence) for a in (answer, streamed)} == {("stop_sequence", "END")}


THINKING = ReasoningForm("<think>", "</think>", opened=False)
ANSWERS = {
    "text": ("It is mild.", ["text"], "end_turn"),
    "calls": (TAGGED, ["tool_use"] * 3, "tool_use"),
    "all": (f"<think>\nHm.\n</think>\n\nLet me see: \n{TAGGED}", ["thinking", "text", *["tool_use"] * 3], "tool_use"),
    "an invalid call": (TAGGED[:-5], ["text"], "end_turn"),
    "nothing": ("", ["text"], "end_turn"),
}


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("name", ANSWERS)
def test_a_stream_is_the_whole_answer(served, name, live):
    """The helpers of the client put it together, sync and async. Not live: an episode that is recorded."""
    text, kinds, reason = ANSWERS[name]
    engine = TextEngine(text, True, THINKING)
    root = served(engine, **{} if live else {"engines": {"k": engine}})
    with anthropic.Anthropic(base_url=root, api_key="k") as client:
        whole = client.messages.create(**ASKED, tools=[WEATHER])
        events = list(client.messages.create(**ASKED, tools=[WEATHER], stream=True))
        with client.messages.stream(**ASKED, tools=[WEATHER]) as stream:
            streamed = stream.get_final_message()

    async def ask():
        async with (
            anthropic.AsyncAnthropic(base_url=root, api_key="k") as client,
            client.messages.stream(**ASKED, tools=[WEATHER]) as stream,
        ):
            return await stream.get_final_message()

    for message in (streamed, asyncio.run(ask())):
        assert message.model_dump(exclude={"id"}) == whole.model_dump(exclude={"id"})
    assert ([block.type for block in whole.content], whole.stop_reason) == (kinds, reason)
    calls = [
        (block.name, json.dumps(block.input, ensure_ascii=False)) for block in whole.content if block.type == "tool_use"
    ]
    assert calls == (CALLS if "tool_use" in kinds else [])
    assert [event.type for event in events if not event.type.startswith("content")] == [
        "message_start",
        "message_delta",
        "message_stop",
    ], "the client leaves out the ping"
    assert len(events) > 12 or not live or name not in ("text", "all"), "as it is sampled"


def test_events_end_as_anthropics_do(served):
    text = httpx.post(f"{served(TextEngine('Hi', True))}/v1/messages", json=ASKED | {"stream": True}).text
    names = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event")]
    assert (names[:3], names[-1]) == (["message_start", "ping", "content_block_start"], "message_stop")
    assert "[DONE]" not in text


@pytest.mark.models
def test_a_prompt_is_that_of_the_published_template(served, real_models):
    """Also after an answer that was sampled: with its thinking, which the template drops from earlier turns."""
    from transformers import AutoTokenizer

    from components.inference.conversations import Conversations
    from components.trajectories.chat import ChatFormat

    tokenizer = AutoTokenizer.from_pretrained(real_models / "qwen3")

    class Engine(Listener):
        conversations = Conversations(ChatFormat(tokenizer), 4096)

        async def chat(self, request):
            prompt = self.conversations.prompt(request)
            self.asked.append(replace(request, messages=[prompt]))
            text = "<think>\nHm.\n</think>\n\n<tool_call>\n" + '{"name": "weather", "arguments": {"city":"Zürich"}}'
            ids = [*tokenizer.encode(f"{text}\n</tool_call>"), tokenizer.convert_tokens_to_ids("<|im_end|>")]
            return self.conversations.completion(request, prompt, ids, [-0.5] * len(ids), frozenset(ids[-1:]))

    engine = Engine()
    with anthropic.Anthropic(base_url=served(engine), api_key="k") as client:
        talk = [USER]
        answer = client.messages.create(**ASKED | {"system": "Be brief.", "tools": [WEATHER], "messages": talk})
        result = {"type": "tool_result", "tool_use_id": answer.content[-1].id, "content": "Rain."}
        talk = [*talk, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        client.messages.create(**ASKED | {"system": "Be brief.", "tools": [WEATHER], "messages": talk})
    assert [block.type for block in answer.content] == ["thinking", "tool_use"]
    (first,), (second,) = (request.messages for request in engine.asked)
    function = {"name": "weather", "description": "of a city", "parameters": SCHEMA}
    plain = [{"role": "system", "content": "Be brief."}, USER]
    options = {"tools": [{"type": "function", "function": function}], "add_generation_prompt": True, "tokenize": False}
    assert tokenizer.decode(first) == tokenizer.apply_chat_template(plain, **options)
    sampled = tokenizer.decode(second)[len(tokenizer.decode(first)) :]
    assert sampled.startswith("<think>\nHm.\n</think>\n\n<tool_call>\n" + '{"name": "weather", "arguments": {"city":"Z')
    assert "<tool_response>\nRain.\n</tool_response>" in sampled


def test_the_openai_client_still_gets_its_own_errors(listener):
    client = openai.OpenAI(base_url=f"{listener[1].base_url}/v1", api_key="k")
    with client, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=[])
    assert caught.value.param == "messages"
