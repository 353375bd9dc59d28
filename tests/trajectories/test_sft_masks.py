"""Tokens of demonstrations that are trained on, compared with TRL's training templates: copies of published templates
with `{% generation %}` around what is trained on (`trl/chat_templates/*_training.jinja`)."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

import pytest

from components.errors import ResourceError
from components.trajectories.chat import ChatFormat
from tests.trajectories.families import Family, tokenizer_of

trl = pytest.importorskip("trl")
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
MARKS = re.compile(r"<\|[\w/]+\|>|<｜[\w▁]+｜>|</?(?:start_of_turn|end_of_turn|end_of_utterance|s)>|<\|?turn\|?>")
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Added tokens that are not special."""
TALK = [
    {"role": "user", "content": "Hi?"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": "There."},
]
REFUSED = {
    "glm4moe": "does not mark where an assistant message ends",
    "idefics3": "does not render the content of an assistant message",
    "llava_next": "has no attribute 'text'",
    "smolvlm": "does not render the content of an assistant message",
}
"""Templates that are refused: GLM ends a message with the start of the next one; the others read lists of parts."""
OPENED = {
    "deepseek_r1_distill",
    "deepseekv3",
    "nemotron_3_5_lightning",
    "nemotron_3_nano",
    "nemotron_3_super",
    "nemotron_3_ultra",
}
"""Templates whose prompt opens reasoning that their own rendering of an answer lacks."""
SAMPLED_END = {"gptoss": ("<|end|>", "<|return|>")}
"""Ends of earlier answers in TRL's mask and as sampled, if they differ."""


def test_what_is_trained_on_equals_the_masks_of_trl(subtests):
    """TRL also trains on text that no model samples: the end of the prompt, such as `<think>`, and space after the end
    of the answer. It is left out here."""
    names = sorted(path.name.removesuffix("_training.jinja") for path in TEMPLATES.glob("*_training.jinja"))
    assert len(names) > 25
    for name in names:
        with subtests.test(template=name):
            if name in REFUSED:
                with pytest.raises(ResourceError, match=REFUSED[name]):
                    _formats(name)
                continue
            chat, training = _formats(name)
            if name in OPENED:
                with pytest.raises(ResourceError, match="differently from the head"):
                    _trained(chat)
                continue
            end, sampled = SAMPLED_END.get(name, ("", ""))
            masked = [text.removesuffix(end) + sampled for text in _masked_by_trl(chat, training)[:-1]]
            assert _trained(chat) == [*masked, _masked_by_trl(chat, training)[-1]]


def _formats(name: str) -> tuple[ChatFormat, str]:
    """Return the format of the published template over a tokenizer with its special tokens, and TRL's template."""
    published, training = ((TEMPLATES / f"{name}{kind}.jinja").read_text() for kind in ("", "_training"))
    special = tuple(sorted({*MARKS.findall(published + training), "<bos>"}))
    eos = "<|endoftext|>" if name.startswith("phi") else "<eos>"
    family = Family(name, published, (*special, eos), PLAIN, bos="<bos>", eos=eos)
    return ChatFormat(tokenizer_of(family)), training


def _trained(chat: ChatFormat) -> list[str]:
    streams = chat.streams(TALK, [], final=True)
    return [chat.tokenizer.decode(stream.token_ids[slice(*span)]) for stream in streams for span in stream.spans]


def _masked_by_trl(chat: ChatFormat, training: str) -> list[str]:
    options = {"chat_template": training, "return_dict": True, "return_assistant_tokens_mask": True}
    shown = chat.tokenizer.apply_chat_template(TALK, **options)
    pairs = zip(shown["input_ids"], shown["assistant_masks"], strict=True)
    spans = [[token for token, _ in run] for masked, run in groupby(pairs, key=lambda pair: pair[1]) if masked]
    answers = []
    for turn, span in zip((1, 3), spans, strict=True):
        prompt = chat.tokenizer.apply_chat_template(TALK[:turn], add_generation_prompt=True, tokenize=False)
        text = chat.tokenizer.decode(span).rstrip()
        known = max(size for size in range(len(text)) if prompt.endswith(text[:size]))
        answers.append(text[known:])
    return answers
