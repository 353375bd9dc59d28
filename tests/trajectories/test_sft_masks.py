"""Tokens of demonstrations that are trained on, compared with TRL's training templates."""

from __future__ import annotations

import pytest

from components.errors import ResourceError
from components.inference.conversations import Conversations
from components.inference.protocol import ChatRequest
from components.models.chat_template import keeps_history
from components.trajectories.chat import ChatFormat
from components.trajectories.template_options import TemplateOptions

pytest.importorskip("trl")
from tests.trajectories.trl_templates import (
    CALL,
    CLOSED,
    LOOK_UP,
    REFUSED,
    RESULT,
    TALKS,
    TEMPLATES,
    USER,
    assistant,
    expected,
    formats,
    published,
    talks,
    trained,
)


def test_what_is_trained_on_equals_the_masks_of_trl(subtests):
    """TRL also trains on text that no model samples: the end of the prompt, such as `<think>`, and space after the end
    of the answer. It is left out here."""
    names = sorted(path.name.removesuffix("_training.jinja") for path in TEMPLATES.glob("*_training.jinja"))
    assert len(names) > 25
    for name in names:
        if name in REFUSED:
            with subtests.test(template=name), pytest.raises(ResourceError, match=REFUSED[name]):
                formats(name)
            continue
        chat, training = formats(name)
        for kind, messages, tools in talks(name, chat):
            with subtests.test(template=name, kind=kind):
                if name in CLOSED and "reasoning" in kind:
                    with pytest.raises(ResourceError, match="differently from the head"):
                        trained(chat, messages, tools)
                    continue
                assert trained(chat, messages, tools) == expected(name, chat, training, messages, tools)


def test_kept_reasoning_makes_one_history_with_any_template(subtests):
    """Without reasoning, the text between answers is the template's own."""
    names = [path.stem for path in sorted(TEMPLATES.glob("*.jinja")) if not path.stem.endswith("_training")]
    chats = {name: ChatFormat(published(name)) for name in names if name not in REFUSED}
    chats["qwen3 without thinking"] = ChatFormat(
        published("qwen3", before="{%- set enable_thinking = false -%}{{- '' }}")
    )
    chats = {name: chat for name, chat in chats.items() if chat.reasoning}
    assert len(chats) > 20
    closed = {*CLOSED, "qwen3 without thinking"}
    for name, chat in chats.items():
        with subtests.test(template=name):
            chat.tokenizer.chat_template = TemplateOptions(keep_reasoning=True).write(chat.tokenizer.chat_template)
            kept = ChatFormat(chat.tokenizer)
            assert keeps_history(kept)
            asked, called, result, answered = TALKS["calls after reasoning"][0]
            talk = [asked, called, result, answered] * 2
            bare = [{key: message[key] for key in message if key != "reasoning"} for message in talk]
            (stream,) = kept.streams(bare if name in closed else talk, [LOOK_UP])
            conversations, spans = Conversations(kept, 10**6), iter(stream.spans)
            for turn in (1, 3, 5, 7):
                start, end = next(spans)
                request = ChatRequest(bare[:turn], [LOOK_UP])
                assert conversations.prompt(request) == stream.token_ids[:start]
                conversations.record_response(request, (bare if name in closed else talk)[turn], stream.token_ids[:end])
                own = chat.continuation(bare[: turn + 2], [LOOK_UP], turn, closed=True)
                assert own in (None, kept.continuation(bare[: turn + 2], [LOOK_UP], turn, closed=True))


def test_reasoning_from_a_client_for_a_prompt_that_closes_reasoning_is_the_templates_to_show():
    chat = ChatFormat(published("qwen3_5_nothink"))
    chat.tokenizer.chat_template = TemplateOptions(keep_reasoning=True).write(chat.tokenizer.chat_template)
    kept, talk = ChatFormat(chat.tokenizer), [*TALKS["reasoning"][0], USER]
    assert kept.prompt_ids(talk, []) == chat.encode(chat.render(talk, [], generate=True))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("calls", [False, True])
def test_the_end_of_another_kind_of_message_stays_in_no_later_prompt(calls, keep):
    """GLM ends an answer with the start of the question (`<|user|>`), and a call with that of its result."""
    tokenizer = published("glm4moe")
    tokenizer.chat_template = TemplateOptions(keep_reasoning=keep).write(tokenizer.chat_template)
    chat = ChatFormat(tokenizer)
    message = assistant("", CALL) if calls else assistant("There.")
    talk = [USER, message, RESULT if calls else USER]
    conversations, request = Conversations(chat, 10**6), ChatRequest([USER], [LOOK_UP])
    for end in chat.end_ids:
        (stream,) = chat.streams([USER, message], [LOOK_UP])
        tokens = [*stream.token_ids[:-1], end]
        conversations.record_response(request, message, tokens)
        prompt = conversations.prompt(ChatRequest(talk, [LOOK_UP]))
        assert (prompt[: len(tokens)] == tokens) is (end == chat.id_of_end(message))
        own = chat.render(talk, [LOOK_UP], generate=True)
        assert chat.tokenizer.decode(prompt).split() == own.split()
