"""Tokens of demonstrations that are trained on, with published tokenizers, compared with TRL's training templates."""

from __future__ import annotations

import pytest

from components.models.weights import load_tokenizer
from components.trajectories.chat import ChatFormat
from tests.trajectories.trl_templates import TALKS, TEMPLATES, masked_by_trl, trained

pytestmark = pytest.mark.models
PUBLISHED = [
    ("qwen3", "qwen3"),
    ("qwen3", "qwen3_instruct_2507"),
    ("qwen3", "qwen2_5"),
    ("llama3_1", "llama3"),
    ("gemma3", "gemma3"),
    ("gemma3", "gemma"),
]
"""Folders of tokenizers, and templates of models that use them."""


def test_what_is_trained_on_equals_the_masks_of_trl(real_models, subtests):
    for folder, name in PUBLISHED:
        tokenizer = load_tokenizer(real_models / folder)
        tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
        training, chat = (TEMPLATES / f"{name}_training.jinja").read_text(), ChatFormat(tokenizer)
        for kind, (messages, tools) in TALKS.items():
            if tools and not chat.native_tools:
                continue
            with subtests.test(template=name, kind=kind):
                assert trained(chat, messages, tools) == masked_by_trl(chat, training, messages, tools)
                if "reasoning" in kind and tools:
                    continue  # published templates drop earlier reasoning, so there are several streams
                (stream,) = chat.streams(messages, tools, final=True)
                shown = [{**m, "reasoning_content": m.get("reasoning")} if "reasoning" in m else m for m in messages]
                whole = tokenizer.apply_chat_template(shown, tools=tools or None, chat_template=training)["input_ids"]
                assert whole[: len(stream.token_ids)] == stream.token_ids
