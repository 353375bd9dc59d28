"""Tests of the exported chat template: it renders conversations as in training."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings

from components.errors import EngineError
from components.trajectories.chat import ChatFormat
from components.trajectories.portable import portable_template
from tests.trajectories.families import FAMILIES, chat_format
from tests.trajectories.templates import HERMES, OTHER_CALLS, STRICT
from tests.trajectories.test_chat import FIND, TALK, assistant, conversations, tool

BARE = {"type": "function", "function": {"name": "now"}}
ODD = {
    "type": "function",
    "function": {"name": "odd", "description": 'Says "a\\b" {x} <y>', "parameters": {"type": "object"}},
}
TOOLS = ([], [FIND], [BARE, FIND, ODD])


def served(chat: ChatFormat, messages, tools, generate: bool) -> str:
    """Render as a server does: with the template alone, and call arguments as mappings."""
    handed = [dict(message) for message in messages]
    for message in handed:
        if message.get("tool_calls"):
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ]
    options = {"tools": tools or None, "tokenize": False, "add_generation_prompt": generate}
    return chat.tokenizer.apply_chat_template(handed, chat_template=portable_template(chat), **options)


@pytest.mark.parametrize("template", [None, STRICT, OTHER_CALLS], ids=["chatml", "strict", "other calls"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=conversations())
def test_it_says_what_the_rollout_says(make_format, template, messages):
    chat = make_format(template)
    for tools in TOOLS:
        for generate in (False, True):
            assert served(chat, messages, tools, generate) == chat.render(messages, tools, generate=generate)


@pytest.mark.parametrize("name", FAMILIES)
def test_so_it_is_for_every_family_of_models(name):
    chat = chat_format(FAMILIES[name])
    call = {"order": "K482", "from": ["Grüße", 1.5, True, None, {"deep er": {}}], "no word": "x"}
    talk = [*TALK[:2], assistant("Let me see.", ("find-order", call), ("now", {})), tool("a"), tool("b", 1), *TALK[4:]]
    for tools in TOOLS:
        for turns in (2, 5, len(talk)):
            try:
                wanted = chat.render(talk[:turns], tools, generate=True)
            except EngineError:
                continue
            if not chat.native_tools:
                assert served(chat, talk[:turns], tools, True) == wanted


def test_a_template_with_a_place_for_tools_stays(make_format):
    assert portable_template(make_format(HERMES)) == HERMES


@pytest.mark.parametrize("template", [None, STRICT, OTHER_CALLS], ids=["chatml", "strict", "other calls"])
def test_read_again_it_gives_the_same_prompts(make_format, template):
    """Our own servers read the export's tokenizer as they read the model's."""
    chat = make_format(template)
    again = make_format(portable_template(chat))
    for tools in TOOLS:
        for turns in range(2, len(TALK) + 1):
            assert again.prompt_ids(TALK[:turns], tools) == chat.prompt_ids(TALK[:turns], tools)
    assert (again.native_tools, again.end_id) == (False, chat.end_id)
