"""Tiny models with random weights of families of transformers, written as their published files are: experts one by
one, and a language model below the names of a multimodal one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from components.models import random_weights
from components.models.files import save

_SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "initializer_range": 0.15,
}  # fmt: skip
_SPARSE = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
_SHARED = {**_SPARSE, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
           "linear_value_head_dim": 16}  # fmt: skip

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {**_SPARSE, "num_experts": 4, "head_dim": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": ("DeepseekV3", {**_SHARED, **_LATENT, "num_key_value_heads": 4, "n_shared_experts": 1}),
    "glm4_moe": ("Glm4Moe", {**_SHARED, "n_shared_experts": 1, "head_dim": 16}),
    "minimax_m2": ("MiniMaxM2", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
    "ernie4_5_moe": ("Ernie4_5_Moe", {"moe_intermediate_size": 64, "moe_num_experts": 4, "moe_k": 2}),
    "phimoe": ("Phimoe", {"num_local_experts": 4}),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
    "qwen3_next": (
        "Qwen3Next",
        {**_SPARSE, **_LINEAR, "num_experts": 4, "shared_expert_intermediate_size": 64, "num_hidden_layers": 4},
    ),
    "gpt2": ("GPT2", {"n_positions": 4096, "n_embd": 64, "n_layer": 2, "n_head": 4}),
    "gemma3": ("Gemma3", {}),
}  # fmt: skip
"""Prefix of the classes of each family, and its own settings."""


def write(family: str, out: Path) -> Path:
    """Write the tiny model of a family with the tokenizer of a token for each byte."""
    tokenizer = random_weights._byte_tokenizer()
    prefix, own = FAMILIES[family]
    sizes = _SIZES | {"vocab_size": tokenizer.get_vocab_size()} | own
    if family == "gpt2":
        sizes = {key: value for key, value in sizes.items() if not key.startswith(("hidden", "num_", "intermediate"))}
    if family == "gemma3":
        vision = _VISION | {"image_size": 28, "patch_size": 14}
        sizes = {"text_config": sizes | {"head_dim": 16}, "vision_config": vision, "mm_tokens_per_image": 4}
    config = getattr(transformers, f"{prefix}Config")(**sizes)
    out.mkdir(parents=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    save(model, out)
    random_weights._save_tokenizer(tokenizer, out)
    return out
