"""Tiny models of families of transformers, written as their published files are: experts one by one, and a language
model below the names of a multimodal one. Their tokenizer has a token for each byte."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Gemma3Config

from components.models import random_weights
from components.models.files import save
from tests.models.tiny_configs import tiny

VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
}
MULTIMODAL = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""Families whose files hold more than the causal language model that is loaded from them, and those of the latter."""


def write(family: str, out: Path, **options: int) -> Path:
    """Write the tiny model of a family. `gemma3` and those of MULTIMODAL have a vision tower."""
    tokenizer = random_weights._byte_tokenizer()
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 4096, **options}
    if family == "gemma3":
        text, vision = tiny("gemma3_text", **sizes).to_dict(), {**VISION, "patch_size": 14, "image_size": 28}
        config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    elif family in MULTIMODAL:
        text = tiny(MULTIMODAL[family], **sizes).to_dict()
        vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}
        config = AutoConfig.for_model(family, text_config=text, vision_config=vision)
    else:
        config = tiny(family, **sizes)
    out.mkdir(parents=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kind = AutoModelForImageTextToText if family in MULTIMODAL else AutoModelForCausalLM
        model = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    save(model, out)
    random_weights._save_tokenizer(tokenizer, out)
    return out
