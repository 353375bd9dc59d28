"""Tokenizers whose named class changes the rules of their file."""

from __future__ import annotations

import json

from transformers import AutoTokenizer, LlamaConfig

from components.models.weights import load_tokenizer
from tests.trajectories.families import FAMILIES, tokenizer_of

TEXT = "It is here:\n\nGrüße"


def test_space_is_kept_where_the_named_class_drops_it(tmp_path):
    """DeepSeek-R1-Distill-Llama: a byte-level tokenizer under the class of SentencePiece's."""
    tokenizer = tokenizer_of(FAMILIES["deepseek_r1"])
    tokenizer.save_pretrained(tmp_path)
    LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "LlamaTokenizerFast"}))
    named = AutoTokenizer.from_pretrained(tmp_path)
    assert " " not in named.decode(named(TEXT, add_special_tokens=False).input_ids)
    read = load_tokenizer(tmp_path)
    assert read(TEXT, add_special_tokens=False).input_ids == tokenizer(TEXT, add_special_tokens=False).input_ids
    assert (read.chat_template, read.eos_token) == (tokenizer.chat_template, tokenizer.eos_token)
