"""Tokens of demonstrations that are trained on, compared with TRL's training templates: copies of published templates
with `{% generation %}` around what is trained on (`trl/chat_templates/*_training.jinja`)."""

from __future__ import annotations

import re
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from components.errors import ResourceError
from components.inference.conversations import Conversations
from components.inference.protocol import ChatRequest
from components.models.chat_template import keeps_history
from components.trajectories.chat import ChatFormat
from components.trajectories.template_options import TemplateOptions
from tests.trajectories.families import Family, tokenizer_of

trl = pytest.importorskip("trl")
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
MARKS = re.compile(
    r"<\|[\w/]+\|>|<｜[\w▁]+｜>|</?(?:start_of_turn|end_of_turn|end_of_utterance|s)>|<\|(?:\w+|\W\|)>|<\w+\|>"
)
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Added tokens that are not special."""
USER = {"role": "user", "content": "Where?"}
LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
CALL = {"id": "call_0_0", "type": "function", "function": {"name": "look_up", "arguments": {"word": "a b"}}}
RESULT = {"role": "tool", "tool_call_id": "call_0_0", "name": "look_up", "content": "near"}


def assistant(content: str, *calls: dict[str, Any], reasoning: str | None = None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    return message | ({"tool_calls": [*calls]} if calls else {}) | ({"reasoning": reasoning} if reasoning else {})


TALKS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "answers": ([USER, assistant("Hello."), USER, assistant("There.")], []),
    "reasoning": ([USER, assistant("There.", reasoning="It is near.")], []),
    "calls": ([USER, assistant("", CALL), RESULT, assistant("There.")], [LOOK_UP]),
    "calls after reasoning": (
        [USER, assistant("", CALL, reasoning="Unknown."), RESULT, assistant("There.", reasoning="Known.")],
        [LOOK_UP],
    ),
}
REFUSED = {
    "idefics3": "does not render the content of an assistant message",
    "llava_next": "has no attribute 'text'",
    "smolvlm": "does not render the content of an assistant message",
}
"""Templates that are refused: they read lists of parts."""
OPENED = {
    "deepseek_r1_distill": ("<｜Assistant｜>", "\n</think>\n\n"),
    "deepseekv3": ("<｜Assistant｜>", "\n</think>\n\n"),
    "nemotron_3_5_lightning": ("<think></think>", "</think>"),
    "nemotron_3_nano": ("<think></think>", "\n</think>\n"),
    "nemotron_3_super": ("<think></think>", "\n</think>\n"),
    "nemotron_3_ultra": ("<think></think>", "</think>"),
}
"""Templates whose prompt opens reasoning: the beginning of an answer without reasoning in TRL's mask, which follows a
prompt that no generation has, and here, where it follows the prompt of a generation."""
SAMPLED_END = {"gptoss": ("<|end|>", "<|return|>")}
"""Ends of earlier answers in TRL's mask and as sampled, if they differ."""
UNCOMPARED = {
    ("deepseek_r1_distill", "reasoning"): "TRL's template drops the field",
    ("deepseekv3", "reasoning"): "TRL's template drops the field",
    ("diffusion_gemma", "calls"): "a diffusion model; TRL trains no token after a call",
    ("diffusion_gemma", "calls after reasoning"): "as above",
    ("gptoss", "calls after reasoning"): "TRL's template drops reasoning before a call once an answer follows",
}
CLOSED = {"qwen3_5_nothink"}
"""Templates whose prompt closes empty reasoning: an answer with reasoning is refused."""


def test_what_is_trained_on_equals_the_masks_of_trl(subtests):
    """TRL also trains on text that no model samples: the end of the prompt, such as `<think>`, and space after the end
    of the answer. It is left out here."""
    names = sorted(path.name.removesuffix("_training.jinja") for path in TEMPLATES.glob("*_training.jinja"))
    assert len(names) > 25
    for name in names:
        if name in REFUSED:
            with subtests.test(template=name), pytest.raises(ResourceError, match=REFUSED[name]):
                _formats(name)
            continue
        chat, training = _formats(name)
        for kind, (messages, tools) in TALKS.items():
            if (name, kind) in UNCOMPARED or (tools and not chat.native_tools):
                continue
            with subtests.test(template=name, kind=kind):
                if name in CLOSED and "reasoning" in kind:
                    with pytest.raises(ResourceError, match="differently from the head"):
                        _trained(chat, messages, tools)
                    continue
                *earlier, last = _masked_by_trl(chat, training, messages, tools)
                end, sampled = SAMPLED_END.get(name, ("", ""))
                ended = (text.removesuffix(end) + sampled if text.endswith(end) else text for text in earlier)
                expected = [*ended, last]
                if name in OPENED:
                    expected = [_opened(text, *OPENED[name]) for text in expected]
                assert _trained(chat, messages, tools) == expected


def test_kept_reasoning_makes_one_history_with_any_template(subtests):
    """Without reasoning, the text between answers is the template's own."""
    names = [path.stem for path in sorted(TEMPLATES.glob("*.jinja")) if not path.stem.endswith("_training")]
    chats = {name: _format(name) for name in names if name not in REFUSED}
    chats["qwen3 without thinking"] = _format("qwen3", before="{%- set enable_thinking = false -%}{{- '' }}")
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
    chat = _format("qwen3_5_nothink")
    chat.tokenizer.chat_template = TemplateOptions(keep_reasoning=True).write(chat.tokenizer.chat_template)
    kept, talk = ChatFormat(chat.tokenizer), [*TALKS["reasoning"][0], USER]
    assert kept.prompt_ids(talk, []) == chat.encode(chat.render(talk, [], generate=True))


def _opened(text: str, without: str, closing: str) -> str:
    """Return an answer of TRL's mask as it follows on a prompt that opens reasoning."""
    if not text.startswith(without):
        return text
    rest = text.removeprefix(without)
    return closing + (rest.lstrip("\n") if closing.endswith("\n") else rest)


def _formats(name: str) -> tuple[ChatFormat, str]:
    """Return the format of the published template over a tokenizer with its special tokens, and TRL's template."""
    training = (TEMPLATES / f"{name}_training.jinja").read_text()
    return _format(name, marks=training), training


def _format(name: str, *, before: str = "", marks: str = "") -> ChatFormat:
    """Return the format of the published template. before: text before it. marks: text with more special tokens."""
    published = before + (TEMPLATES / f"{name}.jinja").read_text()
    special = tuple(sorted({*MARKS.findall(published + marks), "<bos>"}))
    eos = "<|endoftext|>" if name.startswith("phi") else "<eos>"
    return ChatFormat(tokenizer_of(Family(name, published, (*special, eos), PLAIN, bos="<bos>", eos=eos)))


def _trained(chat: ChatFormat, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[str]:
    streams = chat.streams(messages, tools, final=True)
    return [chat.tokenizer.decode(stream.token_ids[slice(*span)]) for stream in streams for span in stream.spans]


def _masked_by_trl(
    chat: ChatFormat, training: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> list[str]:
    shown = [
        message | {name: message["reasoning"] for name in ("reasoning_content", "thinking") if "reasoning" in message}
        for message in messages
    ]
    render = partial(chat.tokenizer.apply_chat_template, tools=tools or None)
    masked = render(shown, chat_template=training, return_dict=True, return_assistant_tokens_mask=True)
    pairs = zip(masked["input_ids"], masked["assistant_masks"], strict=True)
    spans = [[token for token, _ in run] for trained, run in groupby(pairs, key=lambda pair: pair[1]) if trained]
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    answers = []
    for turn, span in zip(turns, spans, strict=True):
        prompt = render(shown[:turn], add_generation_prompt=True, tokenize=False)
        text = chat.tokenizer.decode(span).rstrip()
        known = max(size for size in range(len(text)) if prompt.endswith(text[:size]))
        answers.append(text[known:])
    return answers
