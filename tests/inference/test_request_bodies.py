"""Tests of refused requests: values of other types, unknown keys at every place, and the words of the problems."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from components.errors import SpecError
from components.inference import chat_completions, responses, text_completions
from components.inference.request_bodies import RequestContext

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
    api = text_completions if "prompt" in body else responses if "input" in body else chat_completions
    return api.read_request(body, RequestContext(lambda model: model))


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


def test_the_keys_of_the_specification_are_accepted():
    for body in REQUESTS.values():
        read(body)


def test_an_unknown_key_is_refused_by_name_at_every_place():
    """Also one that another server ignores, such as `cache_control` of a tool."""
    places = [(name, place) for name, body in REQUESTS.items() for place in objects(body)]
    assert len(places) > 20
    for name, place in places:
        for value in (None, False, {"a": 1}):
            body = copy.deepcopy(REQUESTS[name])
            at(body, place)["cache_control"] = value
            key = ".".join(map(str, (*place, "cache_control")))
            ((path, text),) = problems(body).items()
            assert path == key, (name, value)
            assert "expected one of" in text, (name, place, value)


def function(**keys: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": keys}]


def call(arguments: str) -> list[dict[str, Any]]:
    return [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]


def schema_format(**keys: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {**SCHEMA, **keys}}}


PROMPTS = "expected a text, a list of token ids, or a list of 1 to 512 of either, none of them empty"
SWITCH, NUMBER, WHOLE = "expected true or false", "expected a number", "expected a whole number"
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    # types are strict
    (CHAT, {"stream": "no"}, f"stream: 'no': {SWITCH}"),
    (CHAT, {"stream": 1}, f"stream: 1: {SWITCH}"),
    (CHAT, {"parallel_tool_calls": "false"}, f"parallel_tool_calls: 'false': {SWITCH}"),
    (CHAT, {"temperature": "0.5"}, f"temperature: '0.5': {NUMBER}"),
    (CHAT, {"temperature": True}, f"temperature: true: {NUMBER}"),
    (CHAT, {"max_tokens": True}, f"max_tokens: true: {WHOLE}"),
    (CHAT, {"max_tokens": "16"}, f"max_tokens: '16': {WHOLE}"),
    (CHAT, {"max_tokens": 16.0}, f"max_tokens: 16.0: {WHOLE}"),
    (CHAT, {"seed": "1"}, f"seed: '1': {WHOLE}"),
    (CHAT, {"user": 5}, "user: 5: expected text"),
    (CHAT, {"model": None}, "model: null: expected text"),
    (CHAT, {"stop": 5}, "stop: 5: expected text or a list"),
    (CHAT, {"stop": ""}, "stop: '': expected text of at least 1 character or a list"),
    (CHAT, {"messages": "hi"}, "messages: 'hi': expected a list"),
    (CHAT, {"tools": "f"}, "tools: 'f': expected a list"),
    (CHAT, {"logit_bias": {"5": True}}, f"logit_bias.5: true: {NUMBER}"),
    (CHAT, {"stream_options": 5}, "stream_options: 5: expected an object"),
    (CHAT, {"stream_options": {"include_usage": 1}}, f"stream_options.include_usage: 1: {SWITCH}"),
    (CHAT, {"stream_options": {"include_obfuscation": 0}}, f"stream_options.include_obfuscation: 0: {SWITCH}"),
    (CHAT, {"tools": function(name="weather", strict=1)}, f"tools.0.function.strict: 1: {SWITCH}"),
    (CHAT, {"tools": function(name="weather", strict="yes")}, f"tools.0.function.strict: 'yes': {SWITCH}"),
    (COMPLETION, {"echo": "no"}, f"echo: 'no': {SWITCH}"),
    (COMPLETION, {"logprobs": True}, f"logprobs: true: {WHOLE}"),
    (COMPLETION, {"temperature": "1"}, f"temperature: '1': {NUMBER}"),
    (RESPONSES, {"stream": 1}, f"stream: 1: {SWITCH}"),
    (RESPONSES, {"max_output_tokens": "5"}, f"max_output_tokens: '5': {WHOLE}"),
    (RESPONSES, {"tools": [{"type": "function", **FUNCTION, "strict": "yes"}]}, f"tools.0.strict: 'yes': {SWITCH}"),
    (WORDS, {"store": "no"}, f"store: 'no': {SWITCH}"),
    (WORDS, {"prompt_cache_key": 1}, "prompt_cache_key: 1: expected text"),
    (WORDS, {"input": ""}, "input: '': expected text of at least 1 character or a list"),
    (WORDS, {"include": "x"}, "include: 'x': expected a list"),
    # bounds
    (CHAT, {"temperature": -1}, "temperature: -1: expected at least 0"),
    (CHAT, {"top_p": 0}, "top_p: 0: expected at least 1e-09"),
    (CHAT, {"min_p": 1.5}, "min_p: 1.5: expected at most 1"),
    (CHAT, {"n": 0}, "n: 0: expected at least 1"),
    (CHAT, {"presence_penalty": 2.5}, "presence_penalty: 2.5: expected at most 2"),
    (CHAT, {"frequency_penalty": -3}, "frequency_penalty: -3: expected at least -2"),
    (CHAT, {"top_logprobs": 21}, "top_logprobs: 21: expected at most 20"),
    (CHAT, {"stop": [""]}, "stop.0: '': expected text of at least 1 character"),
    (CHAT, {"stop": ["a"] * 17}, "stop: ['a', 'a'"),
    (CHAT, {"logit_bias": {"5": 101}}, "logit_bias.5: 101: expected at most 100"),
    (CHAT, {"logit_bias": {"x": 1}}, "logit_bias.x: 'x': expected a token id in digits"),
    (CHAT, {"logit_bias": {"7": 1, "07": 2}}, "logit_bias.07: '07': expected a token id in digits without"),
    (CHAT, {"logit_bias": {" 7": 1}}, "logit_bias. 7: ' 7': expected a token id in digits without leading zeros"),
    (CHAT, {"logit_bias": {"٧": 1}}, "logit_bias.٧: '٧': expected a token id"),
    (COMPLETION, {"logprobs": 21}, "logprobs: 21: expected at most 20"),
    # parameters that depend on each other
    (FORMAT, {"top_logprobs": 3}, "top_logprobs: is allowed with logprobs: true only"),
    (FORMAT, {"stream_options": {"include_usage": True}}, "stream_options: is allowed with stream: true only"),
    (FORMAT, {"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens: differs from max_completion_tokens"),
    (COMPLETION, {"max_tokens": 0}, "max_tokens: 0 is allowed with echo: true only"),
    (COMPLETION, {"stream": False}, "stream_options: is allowed with stream: true only"),
    (WORDS, {"top_logprobs": 3}, "top_logprobs: is allowed with include: ['message.output_text.logprobs'] only"),
    # what this server does not do
    (CHAT, {"service_tier": "flex"}, "service_tier: 'flex' is not supported by this server"),
    (CHAT, {"store": True}, "store: true is not supported by this server; leave it out or send false"),
    (CHAT, {"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation: true: "),
    (COMPLETION, {"best_of": 2}, "best_of: 2 is not supported"),
    (COMPLETION, {"suffix": "end"}, "suffix: 'end' is not supported"),
    (WORDS, {"reasoning": {"effort": "high"}}, "reasoning: {'effort': 'high'} is not supported"),
    (WORDS, {"text": {"verbosity": "low"}}, "text.verbosity: 'low': expected null"),
    (WORDS, {"background": True}, "background: true is not supported"),
    (WORDS, {"conversation": "conv_1"}, "conversation: 'conv_1' is not supported"),
    (WORDS, {"truncation": "auto"}, "truncation: 'auto' is not supported"),
    (WORDS, {"include": ["file_search_call.results"]}, "include.0: 'file_search_call.results': expected one of"),
    (WORDS, {"tools": [{"type": "web_search"}]}, "tools.0.type: 'web_search': this server has no built-in tools"),
    (RESPONSES, {"tools": [{"type": "function", **FUNCTION, "defer_loading": True}]}, "tools.0.defer_loading: true: "),
    # parameters of the other APIs
    (WORDS, {"max_tokens": 3}, "max_tokens: no such parameter"),
    (WORDS, {"prompt_": 1}, "prompt_: no such parameter"),
    (COMPLETION, {"prompt_logprobs": 1}, "prompt_logprobs: no such parameter"),
    # tools and their choice
    (FORMAT, {"tools": [{"type": "function"}]}, "tools.0.function: is missing"),
    (FORMAT, {"tool_choice": "required"}, "tool_choice: 'required' needs tools"),
    (WORDS, {"tool_choice": "required"}, "tool_choice: 'required' needs tools"),
    (CHAT, {"tool_choice": "any"}, "tool_choice: 'any' is not supported"),
    (CHAT, {"tool_choice": True}, "tool_choice: "),
    (CHAT, {"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice: "),
    (CHAT, {"tool_choice": {"type": "function"}}, "tool_choice.function: "),
    (CHAT, {"tool_choice": {"type": "function", "function": "weather"}}, "tool_choice.function: "),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": 5}}}, "tool_choice.function.name: "),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "wether"}}}, "tool_choice: 'wether' is none"),
    (CHAT, {"tool_choice": {"function": {"name": "weather"}}}, "tool_choice.type: "),
    (CHAT, {"tool_choice": "required", "tools": function(name="f(")}, "tools: 'f(' cannot be called by name"),
    (CHAT, {"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format: a response"),
    # formats
    (FORMAT, {"response_format": "json_object"}, "response_format: "),
    (FORMAT, {"response_format": {}}, "response_format.type: "),
    (FORMAT, {"response_format": {"type": "xml"}}, "response_format.type: 'xml' is not supported"),
    (FORMAT, {"response_format": {"type": "json_object", "json_schema": SCHEMA}}, "response_format.json_schema: "),
    (FORMAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema: null: expected an object"),
    (
        FORMAT,
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name: is missing",
    ),
    (FORMAT, schema_format(type="json_schema"), "response_format.json_schema.type: "),
    (FORMAT, schema_format(strict="yes"), "response_format.json_schema.strict: "),
    (FORMAT, schema_format(schema=None), "response_format.json_schema.schema: null: expected a JSON schema"),
    (WORDS, {"text": {"format": {"type": "xml"}}}, "text.format.type: 'xml' is not supported"),
    # messages and items
    (FORMAT, {"messages": [{"role": "user"}]}, "messages.0.content: is missing"),
    (FORMAT, {"messages": [{"role": "tool", "content": "31"}]}, "messages.0.tool_call_id: "),
    (FORMAT, {"messages": [{"role": "robot", "content": "31"}]}, "messages.0.role: 'robot': expected one of system"),
    (FORMAT, {"messages": [{**MESSAGE, "tool_calls": call("{}")}]}, "messages.0.tool_calls: a message of role 'user'"),
    *(
        (
            FORMAT,
            {"messages": [{"role": "assistant", "content": "", "tool_calls": call(arguments)}]},
            "messages.0.tool_calls.0.function.arguments: expected the text of a JSON object",
        )
        for arguments in ('["x"]', "{")
    ),
    (
        FORMAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.0: {'type': 'image_url', 'image_url': {'url': 'x'}}: expected a part of type 'text'",
    ),
    *(
        (WORDS, {"input": [item]}, text)
        for item, text in (
            ({"role": "user", "content": [{"type": "input_image"}]}, "input.0.content.0.type: 'input_image' is not"),
            ({"type": "computer_call_output", "call_id": "c", "output": {}}, "input.0.type: 'computer_call_output'"),
            ({"type": ["message"]}, "input.0.type: ['message'] is not supported"),
            ({"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}, "input.0.arguments: "),
            ({"type": "function_call_output", "output": "x"}, "input.0.call_id: is missing"),
            ({"role": "robot", "content": "x"}, "input.0.role: 'robot': expected one of"),
            ({"type": "reasoning", "summary": []}, "input: has reasoning items only"),
        )
    ),
    # prompts
    *(
        (COMPLETION, {"prompt": prompt}, f"prompt: {shown}: {PROMPTS}")
        for prompt, shown in (
            ("", "''"), ([], "[]"), ([[]], "[[]]"), (["a", 1], "['a', 1]"), ([True], "[true]"), ([-1], "[-1]"),
            ([[1], "x"], "[[1], 'x']"), ({"a": 1}, "{'a': 1}"),
        )
    ),
]  # fmt: skip
"""A valid request, what is changed, and how its only problem begins: with its key."""


def test_what_cannot_be_done_is_refused_by_name():
    texts = [(list(problems({**body, **change}).values()), text) for body, change, text in REFUSED]
    assert [(actual, text) for actual, text in texts if len(actual) != 1 or not actual[0].startswith(text)] == []


def test_a_missing_model_is_named():
    assert problems({"messages": [MESSAGE]})["model"] == "model: is missing"


def test_too_many_prompts_are_refused_with_the_limit():
    for prompt, count in ((["a"] * 513, 513), ([[1]] * 600, 600)):
        (text,) = problems({**COMPLETION, "prompt": prompt}).values()
        assert text.endswith(f"expected at most 512 prompts per request; it has {count}")


def test_every_form_of_a_prompt_is_accepted():
    for prompt, count in (("x", 1), ([1] * 600, 1), (["x"] * 512, 512), ([[1], [2, 3]], 2)):
        assert read({**COMPLETION, "prompt": prompt}).prompts == count


def test_whole_numbers_are_numbers():
    (request,) = read({**CHAT, "temperature": 2, "top_p": 1, "presence_penalty": 1, "logit_bias": {"5": 3}}).requests
    assert (request.sampling.temperature, request.change.presence, request.change.bias) == (2.0, 1.0, ((5, 3.0),))


def test_a_similar_name_is_suggested_for_a_typing_error_only():
    near = {
        "max_token": "max_tokens",
        "temprature": "temperature",
        "respose_format": "response_format",
        "top-p": "top_p",
        "tool_choise": "tool_choice",
        **dict.fromkeys(["reasoning_effort", "functions", "stop_token_ids", "repetition_penalty", "x" * 5000]),
    }
    for name, similar in near.items():
        text = problems({**CHAT, name: 1})[name]
        assert text.endswith(f"Did you mean '{similar}'?") if similar else "Did you mean" not in text, name
        assert {"response_format", "tool_choice", "logit_bias", "service_tier"} <= set(re.findall(r"\w+", text)), name


def test_similar_names_inside_objects_have_their_path():
    body = copy.deepcopy(CHAT)
    body["stream_options"]["include_usages"] = True
    body["messages"][0]["role"] = "usr"
    found = problems(body)
    assert found["stream_options.include_usages"].endswith("Did you mean 'stream_options.include_usage'?")
    assert found["messages.0.role"].endswith("Did you mean 'user'?")
    for text in found.values():
        assert "None" not in text
