"""Tests of refused requests: values of other types, unknown keys at every place, and the words of the problems."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from components.errors import SpecError
from components.inference import responses, text_completions, wire

FUNCTION = {
    "name": "weather",
    "description": "Now.",
    "parameters": {"type": "object", "properties": {}},
    "strict": True,
}
SCHEMA = {"name": "a", "description": "b", "strict": True, "schema": {"type": "object"}}
MESSAGE = {"role": "user", "content": "x"}
CHAT = {
    "model": "m",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "mild"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "weather"}},
    "stream": True,
    "stream_options": {"include_usage": True, "include_obfuscation": False},
    "temperature": 1,
    "max_tokens": 5,
    "logprobs": True,
}
FORMAT = {"model": "m", "messages": [MESSAGE], "response_format": {"type": "json_schema", "json_schema": SCHEMA}}
RESPONSES = {
    "model": "m",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "mild"},
    ],
    "tools": [
        {"type": "function", **FUNCTION, "defer_loading": False, "output_schema": None, "allowed_callers": None},
    ],
    "tool_choice": {"type": "function", "name": "weather"},
    "stream": True,
    "stream_options": {"include_obfuscation": False},
}
WORDS = {"model": "m", "input": "x", "text": {"format": {"type": "json_schema", **SCHEMA}}}
COMPLETION = {"model": "m", "prompt": "x", "stream": True, "stream_options": {"include_usage": True}}


def read(body: dict[str, Any]) -> Any:
    if "prompt" in body:
        return text_completions.read_request(body, lambda model: model)
    if "input" in body:
        return responses.read_request(body, lambda model: model, 16, None)
    return wire.read_request(body, lambda model: model, 16)


def problems(body: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        read(body)
    return {problem.path: str(problem) for problem in caught.value.problems}


def objects(body: Any, path: tuple = ()) -> list[tuple]:
    """Return the places of the objects of a request, without those of JSON schemas."""
    items = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    inside = [
        place for key, value in items if key not in ("parameters", "schema") for place in objects(value, (*path, key))
    ]
    return [path, *inside] if isinstance(body, dict) else inside


def at(body: Any, path: tuple) -> Any:
    for key in path:
        body = body[key]
    return body


REQUESTS = {"chat": CHAT, "format": FORMAT, "responses": RESPONSES, "words": WORDS, "completion": COMPLETION}
PLACES = [(name, place) for name, body in REQUESTS.items() for place in objects(body)]


@pytest.mark.parametrize("name", list(REQUESTS))
def test_the_keys_of_the_specification_are_accepted(name):
    read(REQUESTS[name])


@pytest.mark.parametrize(("name", "place"), PLACES, ids=str)
@pytest.mark.parametrize("value", [None, False, {"a": 1}])
def test_an_unknown_key_is_refused_by_name_at_every_place(name, place, value):
    """Also one that another server ignores, such as `cache_control` of a tool."""
    body = copy.deepcopy(REQUESTS[name])
    at(body, place)["cache_control"] = value
    key = ".".join(map(str, (*place, "cache_control")))
    found = problems(body)
    assert list(found) == [key]
    assert "expected one of" in found[key]


def test_there_is_an_object_of_every_kind():
    assert len(PLACES) > 20


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("stream", "no", "stream: 'no': expected true or false"),
        ("stream", 1, "stream: 1: expected true or false"),
        ("logprobs", 0, "logprobs: 0: expected true or false"),
        ("parallel_tool_calls", "false", "parallel_tool_calls: 'false': expected true or false"),
        ("temperature", "0.5", "temperature: '0.5': expected a number"),
        ("temperature", True, "temperature: true: expected a number"),
        ("top_p", "1", "top_p: '1': expected a number"),
        ("max_tokens", True, "max_tokens: true: expected a whole number"),
        ("max_tokens", "16", "max_tokens: '16': expected a whole number"),
        ("max_tokens", 16.0, "max_tokens: 16.0: expected a whole number"),
        ("n", 1.5, "n: 1.5: expected a whole number"),
        ("seed", "1", "seed: '1': expected a whole number"),
        ("stop", 5, "stop: 5: expected text or a list"),
        ("user", 5, "user: 5: expected text"),
        ("presence_penalty", "1", "presence_penalty: '1': expected a number"),
        ("logit_bias", {"5": True}, "logit_bias.5: true: expected a number"),
        ("logit_bias", {"5": "1"}, "logit_bias.5: '1': expected a number"),
        ("stream_options", {"include_usage": "yes"}, "stream_options.include_usage: 'yes': expected true or false"),
        ("stream_options", {"include_usage": 1}, "stream_options.include_usage: 1: expected true or false"),
        ("stream_options", {"include_obfuscation": True}, "stream_options.include_obfuscation: true: expected false"),
        ("stream_options", {"include_obfuscation": 0}, "stream_options.include_obfuscation: 0: expected true or false"),
        ("logit_bias", {"7": 1, "07": 2}, "logit_bias.07: '07': expected a token id in digits without leading zeros"),
        ("logit_bias", {" 7": 1}, "logit_bias. 7: ' 7': expected a token id in digits without leading zeros"),
        ("logit_bias", {"٧": 1}, "logit_bias.٧: '٧': expected a token id"),
        ("stream_options", 5, "stream_options: 5: expected an object"),
        (
            "service_tier",
            "flex",
            "service_tier: 'flex' is not supported by this server",
        ),
        ("store", True, "store: true is not supported by this server; leave it out or send false"),
        ("model", None, "model: null: expected text"),
    ],
)
def test_types_are_strict(key, value, message):
    found = problems({**CHAT, key: value})
    assert message in found[message.partition(":")[0]]


@pytest.mark.parametrize(
    ("body", "key", "message"),
    [
        ({**COMPLETION, "echo": "no"}, "echo", "'no': expected true or false"),
        ({**COMPLETION, "logprobs": True}, "logprobs", "true: expected a whole number"),
        ({**COMPLETION, "temperature": "1"}, "temperature", "'1': expected a number"),
        ({**RESPONSES, "stream": 1}, "stream", "1: expected true or false"),
        ({**RESPONSES, "max_output_tokens": "5"}, "max_output_tokens", "'5': expected a whole number"),
        ({**WORDS, "store": "no"}, "store", "'no': expected true or false"),
        ({**WORDS, "prompt_cache_key": 1}, "prompt_cache_key", "1: expected text"),
        ({"messages": [MESSAGE]}, "model", "is missing"),
        ({**WORDS, "prompt_": 1, "model": "m"}, "prompt_", "no such parameter"),
    ],
)
def test_the_other_apis_are_strict_too(body, key, message):
    assert message in problems(body)[key]


@pytest.mark.parametrize(
    ("body", "key", "message"),
    [
        ({**CHAT, "messages": "hi"}, "messages", "messages: 'hi': expected a list"),
        ({**CHAT, "tools": "f"}, "tools", "tools: 'f': expected a list"),
        ({**CHAT, "stop": ""}, "stop", "stop: '': expected text of at least 1 character or a list"),
        ({**WORDS, "input": ""}, "input", "input: '': expected text of at least 1 character or a list"),
        ({**WORDS, "include": "x"}, "include", "include: 'x': expected a list"),
    ],
)
def test_messages_for_clients_suggest_no_override_of_the_command_line(body, key, message):
    assert problems(body)[key] == message


PROMPTS = "expected a text, a list of token ids, or a list of 1 to 512 of either, none of them empty"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", f"prompt: '': {PROMPTS}"),
        ([], f"prompt: []: {PROMPTS}"),
        ([[]], f"prompt: [[]]: {PROMPTS}"),
        (["a", 1], f"prompt: ['a', 1]: {PROMPTS}"),
        ([True], f"prompt: [true]: {PROMPTS}"),
        ([[1], "x"], f"prompt: [[1], 'x']: {PROMPTS}"),
        ({"a": 1}, f"prompt: {{'a': 1}}: {PROMPTS}"),
        (["a"] * 513, "expected at most 512 prompts per request; it has 513"),
        ([[1]] * 600, "expected at most 512 prompts per request; it has 600"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_wrong_prompt_has_one_message_with_the_limit(prompt, message):
    (text,) = problems({**COMPLETION, "prompt": prompt}).values()
    assert text.endswith(message)


@pytest.mark.parametrize(
    ("prompt", "count"), [("x", 1), ([1] * 600, 1), (["x"] * 512, 512), ([[1], [2, 3]], 2)], ids=lambda v: str(v)[:20]
)
def test_every_form_of_a_prompt_is_accepted(prompt, count):
    assert read({**COMPLETION, "prompt": prompt}).prompts == count


@pytest.mark.parametrize("place", [("tools", 0, "function"), ("tools", 0)])
@pytest.mark.parametrize("value", ["yes", 1])
def test_switches_of_tools_are_strict(place, value):
    chat, answer = copy.deepcopy(CHAT), copy.deepcopy(RESPONSES)
    at(chat, ("tools", 0, "function"))["strict"] = value
    at(answer, ("tools", 0))["strict"] = value
    for body, path in ((chat, "tools.0.function.strict"), (answer, "tools.0.strict")):
        assert f"{value!r}: expected true or false" in problems(body)[path]


def test_whole_numbers_are_numbers():
    (request,) = read({**CHAT, "temperature": 2, "top_p": 1, "presence_penalty": 1, "logit_bias": {"5": 3}}).requests
    assert (request.sampling.temperature, request.change.presence, request.change.bias) == (2.0, 1.0, ((5, 3.0),))


@pytest.mark.parametrize(
    ("choice", "key"),
    [
        ({"type": "function", "function": {"name": 5}}, "tool_choice.function.name"),
        ({"type": "function", "function": "weather"}, "tool_choice.function"),
        ({"type": "function"}, "tool_choice.function"),
        ({"function": {"name": "weather"}}, "tool_choice.type"),
        ({"type": "allowed_tools", "allowed_tools": {}}, "tool_choice"),
        ("any", "tool_choice"),
        (True, "tool_choice"),
        ({"type": "function", "function": {"name": "wether"}}, "tool_choice"),
    ],
)
def test_other_tool_choices_are_refused(choice, key):
    assert list(problems({**CHAT, "tool_choice": choice})) == [key]


@pytest.mark.parametrize(
    ("wanted", "key"),
    [
        ({"type": "json_object", "json_schema": SCHEMA}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {**SCHEMA, "type": "json_schema"}}, "response_format.json_schema.type"),
        ({"type": "json_schema", "json_schema": {**SCHEMA, "strict": "yes"}}, "response_format.json_schema.strict"),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, "response_format.json_schema.name"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({}, "response_format.type"),
        ("json_object", "response_format"),
    ],
)
def test_other_response_formats_are_refused(wanted, key):
    assert list(problems({**FORMAT, "response_format": wanted})) == [key]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("max_token", "max_tokens"),
        ("temprature", "temperature"),
        ("respose_format", "response_format"),
        ("top-p", "top_p"),
        ("reasoning_effort", None),
        ("functions", None),
        ("stop_token_ids", None),
        ("repetition_penalty", None),
        ("guided_json", None),
        ("x" * 5000, None),
    ],
)
def test_a_similar_name_is_suggested_for_a_typing_error_only(name, near):
    text = problems({**CHAT, name: 1})[name]
    assert text.endswith(f"Did you mean '{near}'?") if near else "Did you mean" not in text


def test_similar_names_inside_objects_have_their_path():
    body = copy.deepcopy(CHAT)
    body["stream_options"]["include_usages"] = True
    body["messages"][0]["role"] = "usr"
    found = problems(body)
    assert found["stream_options.include_usages"].endswith("Did you mean 'stream_options.include_usage'?")
    assert found["messages.0.role"].endswith("Did you mean 'user'?")
    for text in found.values():
        assert "None" not in text
