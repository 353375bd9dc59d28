"""Tests of the HTTP server over a real socket with OpenAI's client."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import urllib.error
import urllib.request

import openai
import pytest
import torch

from components.errors import ContextOverflow, EngineError, ResourceError, StalePolicy
from components.inference import server as server_module
from components.inference.app import STALLED_SECONDS, AppOptions
from components.inference.connection import BoundedConnection
from components.inference.protocol import ChatCompletion, ChatRequest, LogitChange, ResponseForm
from components.inference.server import ListenOptions, ModelServer
from tests.inference.scripted import decode, served

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


class EchoEngine:
    """Answers with what it was asked, so that a test sees what reached the engine. A token is a character."""

    def __init__(self) -> None:
        self.policy = "v7"
        self.requests: list[ChatRequest] = []

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        self.requests.append(request)
        last = request.messages[-1]["content"]
        await asyncio.sleep(0)
        if request.policy != self.policy:
            raise StalePolicy(f"asked for policy {request.policy}, but the engine holds {self.policy}")
        if last == "long":
            raise ContextOverflow("the prompt has 9000 tokens")
        if last == "fail":
            raise EngineError("out of memory")
        if last == "bug":
            raise KeyError("secret detail")
        if last == "sleep":
            await asyncio.sleep(60)
        message: dict = {"role": "assistant", "content": f"{last} {request.seed}"}
        if request.tools:
            function = {"name": request.tools[0]["function"]["name"], "arguments": '{"city": "Bern"}'}
            message = {"role": "assistant", "content": "", "tool_calls": [_call(function)]}
        ids = [ord(letter) for letter in message["content"]] or [0]
        reason = "tool_calls" if request.tools else "stop"
        return ChatCompletion(message, reason, [1, 2, 3], ids, [-0.5] * len(ids), self.policy)

    def load_policy(self, version: str, adapter_dir: str | None) -> None:
        self.policy = version

    def close(self) -> None:
        pass


def _call(function: dict) -> dict:
    return {"id": "call_0", "type": "function", "function": function}


@pytest.fixture(scope="module")
def running():
    engine = EchoEngine()
    with ModelServer(engine, "shop", AppOptions(decode=decode)) as server:
        yield server, engine


@pytest.fixture
def engine(running) -> EchoEngine:
    running[1].requests.clear()
    return running[1]


@pytest.fixture(scope="module")
def client(running):
    with openai.OpenAI(base_url=running[0].url, api_key="none", timeout=600) as client:
        yield client


def ask(client: openai.OpenAI, content: str = "hello", **options):
    options = {"model": "shop", "seed": 5} | options
    return client.chat.completions.create(messages=[{"role": "user", "content": content}], **options)


def post(server: ModelServer, body: bytes, content_type: str = "application/json") -> tuple[int, dict]:
    request = urllib.request.Request(
        f"{server.url}/chat/completions", data=body, headers={"content-type": content_type}
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=600)
    with caught.value as error:
        return error.code, json.loads(error.read())["error"]


def test_an_answer_reads_like_openais(client, engine):
    answer = ask(client)
    assert answer.object == "chat.completion"
    assert answer.model == "shop@v7"
    assert answer.choices[0].message.content == "hello 5"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 7, 10)


def test_sampling_reaches_the_engine(client, engine):
    ask(client, temperature=0.5, top_p=0.9, max_tokens=17, extra_body={"top_k": 4, "min_p": 0.05})
    ask(client, temperature=0, max_completion_tokens=18)
    ask(client)
    first, second, third = engine.requests
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.top_k) == (0.5, 0.9, 4)
    assert (first.sampling.min_p, second.sampling.min_p) == (0.05, 0.0)
    assert (first.sampling.max_tokens, first.seed, first.policy) == (17, 5, "v7")
    assert (second.sampling.temperature, second.sampling.max_tokens) == (0, 18)
    assert (third.sampling.temperature, third.sampling.top_p, third.sampling.max_tokens) == (1.0, 1.0, 512)


def test_stop_strings_reach_the_engine(client, engine):
    for stop, expected in [("\n", ("\n",)), (["END", "###"], ("END", "###")), (None, ()), ([], ())]:
        ask(client, stop=stop, n=2)
        assert [request.stop for request in engine.requests[-2:]] == [expected, expected]


def test_without_a_seed_requests_differ(client, engine):
    for _ in range(3):
        ask(client, seed=None)
    assert len({request.seed for request in engine.requests}) == 3


def test_several_answers_are_drawn_with_seeds_of_their_own(client, engine):
    answer = ask(client, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == ["hello 5", "hello 6", "hello 7"]
    assert answer.usage.completion_tokens == 21


def test_logprobs_and_token_ids(client, engine):
    answer = ask(client, "é", logprobs=True, extra_body={"return_token_ids": True})
    content = answer.choices[0].logprobs.content
    assert [token.token for token in content] == ["é", " ", "5"]
    assert content[0].bytes == [0xC3, 0xA9]
    assert {token.logprob for token in content} == {-0.5}
    assert answer.prompt_token_ids == [1, 2, 3]
    assert answer.choices[0].token_ids == [ord(letter) for letter in "é 5"]
    assert "token_ids" not in ask(client).choices[0].model_dump()


def test_a_conversation_with_tools_goes_round(client, engine):
    messages = [{"role": "user", "content": "Is it warm?"}]
    first = client.chat.completions.create(model="shop", messages=messages, tools=[WEATHER])
    assert first.choices[0].finish_reason == "tool_calls"
    call = first.choices[0].message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Bern"})
    assert engine.requests[0].tools == [WEATHER]

    # The client's own objects go back, with all the fields that it fills in.
    messages += [first.choices[0].message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "31 °C"}]
    client.chat.completions.create(model="shop", messages=messages)
    function = {"name": "weather", "arguments": '{"city": "Bern"}'}
    assert engine.requests[1].messages == [
        {"role": "user", "content": "Is it warm?"},
        {"role": "assistant", "content": "", "tool_calls": [_call(function)]},
        {"role": "tool", "content": "31 °C", "tool_call_id": "call_0"},
    ]


def test_messages_of_the_npm_client_can_be_sent_back(client, engine):
    """Its `finalChatCompletion` adds `parsed` and `parsed_arguments`, and leaves an empty content null."""
    function = {"name": "weather", "arguments": '{"city": "Bern"}', "parsed_arguments": None}
    call = {"id": "c1", "type": "function", "function": function}
    answers = [
        {"role": "assistant", "content": None, "refusal": None, "parsed": None},
        {"role": "assistant", "content": None, "refusal": None, "parsed": None, "tool_calls": [call]},
    ]
    messages = [
        {"role": "user", "content": "hello"},
        answers[0],
        {"role": "user", "content": "rain?"},
        answers[1],
        {"role": "tool", "tool_call_id": "c1", "content": "yes"},
    ]
    client.chat.completions.create(model="shop", messages=messages)
    sent = engine.requests[-1].messages
    assert sent[1] == {"role": "assistant", "content": ""}
    assert sent[3]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    ]


def test_text_parts_and_the_developer_role_are_understood(client, engine):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": parts}]
    client.chat.completions.create(model="shop", messages=messages)
    assert engine.requests[0].messages == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "ab"},
    ]


@pytest.mark.parametrize("tools", [None, [WEATHER]])
def test_streamed_chunks_add_up_to_the_whole_answer(client, engine, tools):
    options = {"logprobs": True, "n": 2, "extra_body": {"return_token_ids": True}} | ({"tools": tools} if tools else {})
    whole = ask(client, **options)
    with client.chat.completions.stream(
        model="shop", seed=5, messages=[{"role": "user", "content": "hello"}], **options
    ) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        final = stream.get_final_completion()
    for index, choice in enumerate(whole.choices):
        assert final.choices[index].message.content == choice.message.content
        assert final.choices[index].finish_reason == choice.finish_reason
        assert final.choices[index].logprobs.content == choice.logprobs.content
        streamed = [part for chunk in chunks for part in chunk.choices if part.index == index]
        assert [part.token_ids for part in streamed if hasattr(part, "token_ids")] == [choice.token_ids]
        if tools:
            call, streamed_call = choice.message.tool_calls[0], final.choices[index].message.tool_calls[0]
            assert (streamed_call.id, streamed_call.function.arguments) == (call.id, call.function.arguments)
    assert chunks[0].prompt_token_ids == [1, 2, 3]


def test_streamed_usage_comes_when_asked_for(client, engine):
    last = list(ask(client, stream=True, stream_options={"include_usage": True}))[-1]
    assert (last.choices, last.usage.completion_tokens) == ([], 7)
    assert all(chunk.usage is None for chunk in ask(client, stream=True))


def test_a_policy_is_addressed_by_version(client, engine):
    assert ask(client, model="shop@v7").model == "shop@v7"
    with pytest.raises(openai.ConflictError, match="asked for policy v6, but the engine holds v7") as caught:
        ask(client, model="shop@v6")
    assert caught.value.code == "stale_policy"
    assert len(engine.requests) == 2  # the client does not ask again
    with pytest.raises(openai.NotFoundError, match="'gpt-5' is not here; this server has 'shop'"):
        ask(client, model="gpt-5")


def test_a_body_does_not_wait_for_the_acknowledgement_of_its_headers(engine, monkeypatch):
    options = []
    made = BoundedConnection.connection_made

    def connection_made(self, transport):
        made(self, transport)
        options.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(BoundedConnection, "connection_made", connection_made)
    with ModelServer(engine, "echo") as server:
        urllib.request.urlopen(server.url.removesuffix("/v1") + "/health", timeout=60).close()
    assert options == [1]


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["shop", "shop@v7"]
    assert client.models.retrieve("shop@v7").id == "shop@v7"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("shop@v6")


def test_a_refusal_names_all_mistakes_and_does_not_reach_the_engine(client, engine):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, temperature=-1, stop=[""], extra_body={"max_token": 3})
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")
    for part in ("temperature: -1", "stop.0", "max_token", "id you mean 'max_tokens'?"):
        assert part in caught.value.message
    talk = [{"role": "user", "content": "Hello", "reasoning_content": "a"}, {"role": "system", "content": "b"}]
    talk[1] |= {"reasoning": "c", "reasoning_content": ""}  # the empty one is neutral
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="shop", messages=talk)
    assert caught.value.message.count("has no reasoning") == 2
    for part in ("messages.0.reasoning_content: a message of role 'user'", "messages.1.reasoning: a message of role"):
        assert part in caught.value.message
    assert not engine.requests


def test_forms_and_changed_logits_reach_the_engine(client, engine):
    ask(client, tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "weather"}})
    ask(client, tools=[WEATHER], tool_choice="none")
    ask(client, response_format={"type": "json_object"}, logit_bias={"5": 10}, presence_penalty=0.5, n=2)
    ask(client, tools=[{"type": "function", "function": {**WEATHER["function"], "strict": True}}])
    ask(client, tools=[WEATHER], response_format={"type": "json_object"})
    ask(client, tools=[WEATHER], parallel_tool_calls=False)
    ask(client, parallel_tool_calls=False)
    call, none, *objects, strict, either, single, free = engine.requests
    assert single.form == ResponseForm(strict=True, single=True)
    assert strict.form == ResponseForm(strict=True)
    assert either.form == ResponseForm(json_schema='{"type": "object"}', strict=True)
    assert free.form == ResponseForm()
    assert (call.form, call.altered) == (ResponseForm(calls=("weather",)), True)
    assert (none.form, none.tools, none.altered) == (ResponseForm(calls=()), [], False)
    assert [request.form for request in objects] == [ResponseForm(json_schema='{"type": "object"}', calls=())] * 2
    assert objects[1].change == LogitChange(((5, 10.0),), presence=0.5)


def test_an_engine_without_alternatives_refuses_them(client):
    with pytest.raises(openai.BadRequestError, match="returns the sampled tokens only") as caught:
        ask(client, logprobs=True, top_logprobs=3)
    assert caught.value.param == "top_logprobs"


def test_values_that_change_nothing_pass(client, engine):
    neutral = {
        "stop": None,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "user": "someone",
    }
    assert ask(client, **neutral).choices[0].message.content == "hello 5"
    assert not engine.requests[-1].altered


def test_engine_failures_carry_openais_error_object(running, client, engine):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "long")
    assert (caught.value.code, caught.value.type) == ("context_length_exceeded", "invalid_request_error")
    with pytest.raises(openai.InternalServerError, match="out of memory"):
        ask(client, "fail")
    with pytest.raises(openai.BadRequestError):
        ask(client, "long", stream=True)  # a stream has not begun when the engine fails
    assert len(engine.requests) == 3


def test_an_error_nobody_expected_keeps_its_details_in_the_log(client, engine, caplog):
    with pytest.raises(openai.InternalServerError, match=r"internal error \(KeyError\)") as caught:
        ask(client, "bug")
    assert "secret detail" not in caught.value.message
    deadline = time.monotonic() + 600
    while "secret detail" not in caplog.text:  # it is logged after the answer is sent
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_request_that_takes_too_long_ends():
    with (
        served(EchoEngine(), "shop", timeout=0.5) as client,
        pytest.raises(openai.InternalServerError, match=r"did not answer within 0\.5 s") as caught,
    ):
        ask(client, "sleep")
    assert caught.value.status_code == 504


def test_a_body_that_is_no_json_object_is_refused(running):
    for body in (b"", b"[]", b"{", b'"x"'):
        status, error = post(running[0], body)
        assert (status, error["type"]) == (400, "invalid_request_error"), body


def test_a_web_page_cannot_post_without_asking_first(running):
    """Browsers send text/plain to other origins without a preflight request."""
    status, _ = post(running[0], b'{"model": "shop", "messages": [{"role": "user", "content": "x"}]}', "text/plain")
    assert status == 400


def test_unknown_routes_answer_in_the_same_form(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model="shop", input="x")
    assert caught.value.type == "invalid_request_error"
    assert "POST /v1/embeddings: no such route; this server has POST /v1/chat/completions, " in caught.value.message
    assert "GET /v1/models, " in caught.value.message


def test_another_method_is_refused_with_the_allowed_one(client):
    with pytest.raises(openai.APIStatusError) as caught:
        client.get("/chat/completions", cast_to=object)
    assert (caught.value.status_code, caught.value.type) == (405, "invalid_request_error")
    assert "GET /v1/chat/completions: this path has no such method; expected POST" in caught.value.message
    assert caught.value.response.headers["allow"] == "POST"


def test_a_missing_model_is_no_unknown_route(client):
    with pytest.raises(openai.NotFoundError, match="the model 'other' is not here; this server has 'shop") as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_health(running):
    with urllib.request.urlopen(running[0].url.removesuffix("/v1") + "/health", timeout=600) as answer:
        assert json.load(answer) == {"status": "ok", "model": "shop", "policy": "v7", "recording": False}


def test_health_says_when_the_engine_makes_no_progress(make_engine):
    engine = make_engine()
    forward, entered, released = engine.batch._forward, threading.Event(), threading.Event()

    def hang(*arguments, **options):
        result = forward(*arguments, **options)
        entered.set()
        assert released.wait(600)
        return result

    engine.batch._forward = hang
    with ModelServer(engine, "tiny") as server, openai.OpenAI(base_url=server.url, api_key="none") as client:
        health = server.url.removesuffix("/v1") + "/health"
        messages = [{"role": "user", "content": "Hi"}]
        asking = threading.Thread(
            target=client.chat.completions.create, kwargs={"model": "tiny", "messages": messages, "max_tokens": 1}
        )
        asking.start()
        assert entered.wait(600)
        engine.batch.progressed -= STALLED_SECONDS
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(health, timeout=600)
        state = json.load(caught.value)
        assert (caught.value.code, state["status"]) == (503, "stalled")
        assert state["stalled_seconds"] >= STALLED_SECONDS
        released.set()
        asking.join()
        with urllib.request.urlopen(health, timeout=600) as answer:
            assert json.load(answer)["status"] == "ok"


def test_the_server_listens_on_this_machine_only_and_ends_with_its_block():
    threads = threading.active_count()
    with ModelServer(EchoEngine(), "shop") as server:
        assert server.host == "127.0.0.1"
        socket.create_connection(("127.0.0.1", server.port), timeout=5).close()
        with pytest.raises(ResourceError, match=f"port {server.port}"):
            ModelServer(EchoEngine(), "other", listen=ListenOptions(port=server.port)).__enter__()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", server.port), timeout=5)
    assert threading.active_count() == threads


def test_concurrent_requests_reach_the_engine_together(running, engine):
    async def many() -> list[str]:
        async with openai.AsyncOpenAI(base_url=running[0].url, api_key="none", timeout=600) as client:
            answers = await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model="shop", seed=index, messages=[{"role": "user", "content": "hi"}]
                    )
                    for index in range(16)
                )
            )
        return [answer.choices[0].message.content for answer in answers]

    assert asyncio.run(many()) == [f"hi {index}" for index in range(16)]


def test_without_a_decoder_tokens_are_named_by_id():
    with served(EchoEngine(), "shop", decode=None) as client:
        content = ask(client, "a", logprobs=True).choices[0].logprobs.content
    assert [token.token for token in content] == ["token_id:97", "token_id:32", "token_id:53"]
    assert content[0].bytes is None


def test_the_command_says_what_is_wrong(tmp_path, caplog):
    assert server_module.main([str(tmp_path)]) == 2
    assert f"{tmp_path} holds no model" in caplog.text


def test_invalid_arguments_are_refused_before_the_model_is_loaded(tmp_path, capsys):
    empty, number = "expected a text that is not empty", "expected a whole number from"
    for option, value, words in (
        ("--adapters", "nowhere", "'nowhere': expected an existing folder"),
        ("--adapters", "", f"'': {empty}"),
        ("--name", "", f"'': {empty}"),
        ("--name", " ", f"' ': {empty}"),
        ("--name", "n" * 2000, "2000 characters: expected at most"),
        ("--host", "", f"'': {empty}"),
        ("--allowed-host", "", f"'': {empty}"),
        ("--port", "99999", f"'99999': {number}"),
        ("--port", "x", f"'x': {number}"),
        ("--max-length", "0", f"'0': {number}"),
        ("--max-length", "-5", f"'-5': {number}"),
    ):
        with pytest.raises(SystemExit) as caught:
            server_module.main([str(tmp_path), option, value])
        assert caught.value.code == 2
        assert f"argument {option}: {words}" in capsys.readouterr().err


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_that_are_parts_of_characters_have_their_bytes(base_dir, stream):
    """The two bytes of ü, one sampled token each."""
    from transformers import AutoTokenizer

    with (
        server_module.serve_model(base_dir, name="shop", device="cpu") as server,
        openai.OpenAI(base_url=server.url, api_key="none", timeout=600, max_retries=0) as client,
    ):
        first, second = AutoTokenizer.from_pretrained(base_dir).convert_tokens_to_ids(["Ã", "¼"])
        entries = []
        for token in (first, second):
            options = {"logit_bias": {str(token): 100}, "max_tokens": 1, "logprobs": True, "top_logprobs": 2}
            answer = ask(client, stream=stream, model="shop", temperature=0, **options)
            choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
            entries += [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert [entry.token for entry in entries] == ["\ufffd", "\ufffd"]
    assert bytes(byte for entry in entries for byte in entry.bytes) == "ü".encode()
    assert [entry.top_logprobs[0].bytes for entry in entries] == [[0xC3], [0xBC]]
    assert all(other.bytes is not None for entry in entries for other in entry.top_logprobs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is available")
def test_cuda_without_a_device_is_refused(base_dir, caplog):
    assert server_module.main([str(base_dir), "--device", "cuda"]) == 2
    assert "device = 'cuda': torch" in caplog.text
