"""Tests of reasoning: a field of its own of a message, in which nothing is called."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.inference.conversations import Conversations
from components.inference.growing_text import growing_message, growing_response
from components.inference.protocol import ChatRequest
from components.inference.transformers.sampling import ReasoningLimit
from components.trajectories.call_forms import FORMS
from components.trajectories.convert import to_openai
from components.trajectories.reasoning import ReasoningForm
from components.trajectories.template_options import TemplateOptions
from tests.trajectories.families import FAMILIES, QUESTIONS, Family, Scripted, chat_format, episode, sampled
from tests.trajectories.test_chat import FIND, TALK, assistant, tool, user

CALL = '<tool_call>\n{"name": "find-order", "arguments": {"order": "K482"}}\n</tool_call>'
THINK = ReasoningForm("<think>", "</think>", opened=False)
OPENED = ReasoningForm("<think>", "</think>", opened=True)
COMMAND_A = Family(
    "Command A Reasoning",
    r"""
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|CHATBOT_TOKEN|>' }}
        {%- if message.thinking %}{{- '<|START_THINKING|>' + message.thinking + '<|END_THINKING|>' }}{%- endif %}
        {{- '<|START_RESPONSE|>' + message.content + '<|END_RESPONSE|>' }}
    {%- else %}{{- '<|USER_TOKEN|>' + message.content }}
    {%- endif %}
    {{- '<|END_OF_TURN_TOKEN|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|CHATBOT_TOKEN|>' }}{%- endif %}""",
    tuple(
        f"<|{name}|>"
        for name in (
            *("CHATBOT_TOKEN", "USER_TOKEN", "END_OF_TURN_TOKEN", "START_RESPONSE", "END_RESPONSE"),
            *("START_THINKING", "END_THINKING"),
        )
    ),
)


@pytest.fixture(scope="module")
def qwen3():
    return chat_format(FAMILIES["qwen3"])


def test_text_after_the_reasoning_is_the_answer():
    answers = {
        "<think>\nWhy?\n</think>\n\nBern": ("Why?", "Bern"),
        "\n<think></think>Bern": ("", "Bern"),
        "<think>cut sh": ("cut sh", ""),
        "<think>cut </thi": ("cut </thi", ""),
        "Bern": (None, "Bern"),
        "It says <think>a</think>": (None, "It says <think>a</think>"),
        "<think>a</think>b</think>c": ("a", "b</think>c"),
    }
    assert {text: THINK.split(text) for text in answers} == answers
    opened = {
        "Why?\n</think>\n\nBern": ("Why?", "Bern"),
        "cut sh": ("cut sh", ""),
        "<think>Why?</think>Bern": ("Why?", "Bern"),
        "</think>Bern": ("", "Bern"),
    }
    assert {text: OPENED.split(text) for text in opened} == opened


def test_calls_in_reasoning_are_not_calls(qwen3):
    rejected = f"<think>\nShould I {CALL}? No, and <tool_call> alone is no call.\n</think>\n\n"
    assert qwen3.parse_text(f"{rejected}It is shipped.", 0) == {
        "role": "assistant",
        "content": "It is shipped.",
        "reasoning": f"Should I {CALL}? No, and <tool_call> alone is no call.",
    }
    called = qwen3.parse_text(f"{rejected}{CALL}", 0)
    assert (called["content"], len(called["tool_calls"])) == ("", 1)
    unfinished = qwen3.parse_text(f"<think>\nI call {CALL}", 0)
    assert unfinished == {"role": "assistant", "content": "", "reasoning": f"I call {CALL}"}


@given(
    pieces=st.lists(st.sampled_from(["<think>", "</think>", "<thi", "</thi", "\n", " ", "a"]), max_size=6),
    cut=st.integers(0, 40),
)
@pytest.mark.parametrize("form", [THINK, OPENED], ids=["written", "opened"])
def test_a_growing_text_shows_the_reasoning_and_the_answer_of_the_whole_text(form, pieces, cut):
    text = "".join(pieces)
    reasoning, content = form.split(text)
    assert (reasoning or "").startswith(form.certain(text[:cut]))
    start = form.answer_start(text[:cut])
    if start is not None:
        assert start == form.answer_start(text)
        assert content.startswith(text[start:cut].lstrip("\n") if start else text[:cut])


def test_reasoning_before_a_channel_of_the_answer():
    """Command A samples the mark of its response itself. What precedes the mark is no part of the answer, except for
    its reasoning."""
    chat = chat_format(COMMAND_A)
    assert (chat.channel, chat.closing) == ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    thought = chat.encode("<|START_THINKING|>Why?<|END_THINKING|>")
    tokens = [*thought, *chat.encode("<|START_RESPONSE|>Bern.<|END_RESPONSE|>"), chat.end_id]
    message = {"role": "assistant", "content": "Bern.", "reasoning": "Why?"}
    assert (chat.parse(tokens, 0), chat.reasoning_tokens(tokens)) == (message, len(thought))
    growing = growing_message(chat, ())
    streamed = [(growing.extend([token]), growing.reasoning) for token in tokens[:-1]]
    assert ["".join(parts) for parts in zip(*streamed, strict=True)] == ["", "Why?"]


def test_no_message_of_harmony_is_lost():
    """Reasoning is all analysis, content all others; a message to a recipient is a call or is shown as text. Streams
    report the beginnings of both."""
    chat = chat_format(FAMILIES["gpt_oss"])
    analysis, final = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
    said = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    find = " to=functions.find-order<|channel|>commentary json<|message|>"
    next_one = "<|end|><|start|>assistant"
    cases = {
        f"{said}{final}Bern": (None, "I look.\nBern", "I look.\nBern"),
        f"{analysis}a{next_one}{said}{analysis}b{next_one}{final}Bern": ("a\nb", "I look.\nBern", "I look.\nBern"),
        f"{final}Bern<|end|> and more": (None, "Bern\n and more", "Bern"),
        f"{final}Bern{next_one}{find}{{}}": (None, "Bern\nto=functions.find-order {}", "Bern"),
        f"{said}{find}{{bad}}": (None, "I look.\nto=functions.find-order {bad}", ""),
        f"{analysis}a{next_one}{find}{{": ("a", "to=functions.find-order {", ""),
        "<|channel|>analysis to=python code<|message|>print(1)": (None, "to=python print(1)", ""),
        f"{analysis}a{next_one}<|channel|>fin": ("a", "", ""),
        f"{analysis}a{final}b{next_one}{final}c{analysis}d<|end|>e{final}": (
            f"a{final.replace('<', '< ')}b",
            f"c{analysis.replace('<', '< ')}d\ne{final.replace('<', '< ')}",
            f"c{analysis.replace('<', '< ')}d",
        ),
        "Bern": (None, "Bern", ""),
    }
    for text, (reasoning, content, streamed) in cases.items():
        message = chat.parse_text(text, 0, [FIND])
        assert (message.get("reasoning"), message["content"], "tool_calls" in message) == (reasoning, content, False)
        assert chat.message_of(text) == message
        assert chat.render([user("Where?"), message, user("And?")], [FIND], generate=True), "the template accepts it"
        growing = growing_message(chat, (), tools=[FIND])
        parts = [(growing.extend([token]), growing.reasoning) for token in chat.encode(text)]
        assert ["".join(part) for part in zip(*parts, strict=True)] == [streamed, reasoning or ""], text
    thought, head = chat.encode(f"{analysis}a<|end|>"), chat.encode("<|start|>assistant")
    spoken = [*head, *chat.encode("<|channel|>commentary<|message|>I look.<|end|>")]
    tokens = [*thought, *spoken, *head, *thought, *head, *chat.encode(f"{final}Bern"), chat.end_id]
    assert chat.reasoning_tokens(tokens) == len([*thought, *head, *thought])
    (call,) = chat.parse_text(f"{said}{find}{{}}", 0, [FIND])["tool_calls"]
    assert call["function"] == {"name": "find-order", "arguments": "{}"}


def conversation(qwen3, client_keeps: bool):
    """Conversations with a cached response that reasons, and its message as a client has it."""
    conversations = Conversations(qwen3, 10_000)
    first = ChatRequest([user("Where?")], [FIND])
    sampled = [*qwen3.encode(f"<think>\nLook it up.\n</think>\n\n{CALL}"), qwen3.end_id]
    prompt = conversations.prompt(first)
    completion = conversations.completion(first, prompt, sampled, [0.0] * len(sampled), frozenset([qwen3.end_id]))
    assert completion.message["reasoning"] == "Look it up."
    message = dict(completion.message)
    if not client_keeps:
        del message["reasoning"]
    return conversations, prompt + sampled, [user("Where?"), message]


@pytest.mark.parametrize("client_keeps", [True, False])
def test_a_client_need_not_send_reasoning_back(qwen3, client_keeps):
    """Most clients of OpenAI's API do not. Prompts are the same: the template decides what stays."""
    conversations, tokens, talk = conversation(qwen3, client_keeps)
    result = tool("shipped") | {"tool_call_id": talk[1]["tool_calls"][0]["id"]}
    within = conversations.prompt(ChatRequest([*talk, result], [FIND]))
    assert within[: len(tokens)] == tokens, "calls and results continue the tokens"
    later = conversations.prompt(ChatRequest([*talk, result, user("Thanks.")], [FIND]))
    text = qwen3.tokenizer.decode(later)
    assert "Look it up." not in text, "Qwen 3 drops reasoning once the user speaks again"
    assert later == qwen3.prompt_ids([*talk, result, user("Thanks.")], [FIND])


@pytest.mark.parametrize("keep", [False, True])
def test_a_prompt_may_begin_the_reasoning_after_results_only(keep):
    """As Gemma 4's: what the model weighs there is no call, neither while it is sampled nor when it is complete."""
    family = FAMILIES["qwen3"]
    template = TemplateOptions(keep_reasoning=keep).write(family.template)
    head = "{% if add_generation_prompt and messages[-1].role == 'tool' %}{{ '<think>\n' }}{% endif %}"
    chat = chat_format(replace(family, template=template + head))
    conversations, tokens, talk = conversation(chat, True)
    request = ChatRequest([*talk, tool("shipped") | {"tool_call_id": talk[1]["tool_calls"][0]["id"]}], [FIND])
    prompt = conversations.prompt(request)
    assert prompt[: len(tokens)] == tokens
    assert chat.tokenizer.decode(prompt).endswith("<|im_start|>assistant\n<think>\n")
    thought = chat.encode(f"Call {CALL}? No.")
    sampled = [*thought, *chat.encode("\n</think>\n\nShipped."), chat.end_id]
    answer = conversations.completion(request, prompt, sampled, [0.0] * len(sampled), frozenset([chat.end_id]))
    expected = {"role": "assistant", "content": "Shipped.", "reasoning": f"Call {CALL}? No."}
    assert answer.message == expected
    assert len(thought) < answer.reasoning_tokens < len(sampled)
    growing = growing_response(chat.after(prompt), request)
    assert (growing.extend(thought), growing.reasoning, growing.calls) == ("", f"Call {CALL}? No.", [])
    assert ReasoningLimit(chat.after(prompt), 3).next_token(thought) == chat.encode("\n</think>")[0]
    (*_, stream) = chat.streams([*request.messages, answer.message], [FIND])
    shown = stream.token_ids[slice(*stream.spans[-1])]
    assert chat.tokenizer.decode(shown) == chat.tokenizer.decode(sampled), "as a demonstration"


@pytest.mark.parametrize(
    ("given", "continued", "shown"),
    [(None, True, "second"), ("second", True, "second"), ("first", False, "first"), ("edited", False, "edited")],
)
def test_reasoning_from_a_client_is_what_a_prompt_shows(qwen3, given, continued, shown):
    """Also if the cached response with the same content has other reasoning. Without it, the latest is continued."""
    conversations, first = Conversations(qwen3, 10_000), ChatRequest([user("Where?")], [FIND])
    prompt = conversations.prompt(first)
    for reasoning in ("first", "second"):
        tokens = [*prompt, *qwen3.encode(f"<think>\n\n{reasoning}\n\n</think>\n\n{CALL}"), qwen3.end_id]
        message = qwen3.parse(tokens[len(prompt) :], 0, [FIND])
        conversations.record_response(first, message, tokens)
    talk = [user("Where?"), message | {"reasoning": given}, tool("shipped")]
    later = conversations.prompt(ChatRequest(talk, [FIND]))
    assert (later[: len(tokens)] == tokens) is continued
    text = qwen3.tokenizer.decode(later)
    assert [name for name in ("first", "second", "edited") if name in text] == [shown]


def test_the_keys_of_a_conversation_are_computed_once_for_each_message(qwen3, monkeypatch):
    lengths: dict[int, int] = {}
    conversations, dumps = Conversations(qwen3, 10**6), json.dumps
    for count in (50, 100):
        written: list[str] = []
        with monkeypatch.context() as patch:
            patch.setattr(json, "dumps", lambda *a, written=written, **k: written.append(dumps(*a, **k)) or written[-1])
            conversations._recalled(ChatRequest([*map(user, "ab"), assistant("c")] * count, []))
        lengths[count] = sum(map(len, written))
    assert lengths[100] < 2.1 * lengths[50]


def test_a_demonstration_with_reasoning_has_the_tokens_that_the_model_would_sample(qwen3):
    talk = [user("Where?"), assistant("", ("find-order", {"order": "K482"})) | {"reasoning": "Look it up."}]
    (stream,) = qwen3.streams(talk, [FIND])
    sampled = stream.token_ids[slice(*stream.spans[0])]
    assert qwen3.tokenizer.decode(sampled).startswith("<think>\nLook it up.\n</think>")
    assert qwen3.parse(sampled, 0, [FIND])["reasoning"] == "Look it up."


def test_a_template_without_a_place_for_reasoning_gets_it_as_text():
    chat = chat_format(FAMILIES["smollm3"])
    text = chat.render([*TALK[1:2], assistant("Shipped.") | {"reasoning": "K482."}], [], generate=False)
    assert "<think>\nK482.\n</think>\n\nShipped." in text
    magistral = """{%- for message in messages %}{%- if message.role == 'user' %}[INST]{{ message.content }}[/INST]
        {%- elif message.content is string %}{{ message.content + '</s>' }}
        {%- else %}{%- for block in message.content %}{%- if block['type'] == 'thinking' %}
            {{- '[THINK]' + block['thinking'] + '[/THINK]' }}{% else %}{{ block['text'] }}{% endif %}
        {%- endfor %}{{ '</s>' }}{% endif %}{% endfor %}"""  # reasoning is a part of the content
    chat = chat_format(Family("magistral", magistral, ("</s>", "[INST]", "[/INST]", "[THINK]", "[/THINK]")))
    talk = [user("Where?"), assistant("Shipped.") | {"reasoning": "K482."}]
    assert chat.render(talk, [], generate=False) == "[INST]Where?[/INST][THINK]K482.[/THINK]Shipped.</s>"


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
def test_kept_reasoning_makes_an_episode_one_history(name):
    """Served again, without the tokens, the prompt is the same."""
    family = FAMILIES[name]
    template = TemplateOptions(keep_reasoning=True).write(family.template)
    chat = chat_format(replace(family, template=template))
    engine = Scripted(chat, sampled(family, chat))
    trajectory = episode(engine)
    assert trajectory.success
    (history,) = trajectory.histories
    assert chat.tokenizer.decode(history.token_ids).count("let me see") == 2 * QUESTIONS
    messages = [to_openai(message) for message in history.messages[:-1]]
    served = chat.tokenizer.decode(chat.prompt_ids(messages, trajectory.tools))
    assert served.split() == chat.tokenizer.decode(engine.said[-1][0]).split()
    (stream,) = chat.streams([to_openai(message) for message in history.messages], trajectory.tools)
    assert chat.tokenizer.decode(stream.token_ids).split() == chat.tokenizer.decode(history.token_ids).split()


def test_a_form_of_calls_can_be_named():
    family = FAMILIES["qwen3"]
    template = TemplateOptions(call_form="pythonic").write(family.template)
    chat = chat_format(replace(family, template=template))
    assert not chat.native_tools
    assert "Call a tool like this: [find-order(" in chat.render(TALK[:2], [FIND], generate=True)
    template = TemplateOptions(call_form="tagged_json").write(family.template)
    assert chat_format(replace(family, template=template)).call_form is FORMS["tagged_json"]
