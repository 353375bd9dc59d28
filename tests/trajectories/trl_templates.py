"""Tokens of demonstrations that TRL's training templates train on: copies of published templates with
`{% generation %}` around what is trained on (`trl/chat_templates/*_training.jinja`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import trl

from components.trajectories.chat import ChatFormat
from tests.trajectories.families import LOOK_UP, Family, tokenizer_of

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
MARKS = re.compile(
    r"<\|[\w/]+\|>|<｜[\w▁]+｜>|</?(?:start_of_turn|end_of_turn|end_of_utterance|s)>|<\|(?:\w+|\W\|)>|<\w+\|>"
)
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Added tokens that are not special."""
USER = {"role": "user", "content": "Where?"}
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


def talks(name: str, chat: ChatFormat) -> Iterator[tuple[str, list[dict[str, Any]], list[dict[str, Any]]]]:
    """Yield kind, messages and tools of each conversation that can be compared under a template."""
    for kind, (messages, tools) in TALKS.items():
        if (name, kind) not in UNCOMPARED and (chat.native_tools or not tools):
            yield kind, messages, tools


def expected(
    name: str, chat: ChatFormat, training: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> list[str]:
    """Return the answers of TRL's mask, as a model samples them: with the ends of answers that it samples, and after a
    prompt that opens reasoning."""
    *earlier, last = masked_by_trl(chat, training, messages, tools)
    end, sampled = SAMPLED_END.get(name, ("", ""))
    answers = [*(text.removesuffix(end) + sampled if text.endswith(end) else text for text in earlier), last]
    return [_opened(text, *OPENED[name]) for text in answers] if name in OPENED else answers


def _opened(text: str, without: str, closing: str) -> str:
    """Return an answer of TRL's mask as it follows on a prompt that opens reasoning."""
    if not text.startswith(without):
        return text
    rest = text.removeprefix(without)
    return closing + (rest.lstrip("\n") if closing.endswith("\n") else rest)


def formats(name: str) -> tuple[ChatFormat, str]:
    """Return the format of the published template, and TRL's training template."""
    return ChatFormat(published(name)), (TEMPLATES / f"{name}_training.jinja").read_text()


def published(name: str, *, before: str = "") -> Any:
    """Return a tokenizer of bytes with a published template and its special tokens. before: text before it."""
    template, training = TEMPLATES / f"{name}.jinja", TEMPLATES / f"{name}_training.jinja"
    texts = [path.read_text() for path in (template, training) if path.is_file()]
    special = tuple(sorted({*MARKS.findall("".join(texts)), "<bos>"}))
    eos = "<|endoftext|>" if name.startswith("phi") else "<eos>"
    tokenizer = tokenizer_of(Family(name, before + texts[0], (*special, eos), PLAIN, bos="<bos>", eos=eos))
    tokenizer.name_or_path = name
    return tokenizer


def trained(chat: ChatFormat, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[str]:
    streams = chat.streams(messages, tools, final=True)
    return [chat.tokenizer.decode(stream.token_ids[slice(*span)]) for stream in streams for span in stream.spans]


def masked_by_trl(
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


def rendered(chat: ChatFormat, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[str]:
    """Return what transformers renders for each assistant message after its prompt, up to the end of the message. A
    template that marks reasoning, and reads no field of it, gets it as part of the content."""
    render = partial(chat.tokenizer.apply_chat_template, tools=tools or None, tokenize=False)
    if "</think>" in chat.tokenizer.chat_template and not chat.renders_reasoning:
        messages = [
            message | {"content": f"<think>\n{message['reasoning']}\n</think>\n\n{message['content']}"}
            if "reasoning" in message
            else message
            for message in messages
        ]
    answers = []
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = render(messages[:turn], add_generation_prompt=True)
            end = chat.end_of(message)
            answers.append(render(messages[: turn + 1]).removeprefix(prompt).partition(end)[0] + end)
    return answers
