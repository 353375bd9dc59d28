"""Tiny configurations of transformers' families of causal language models."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "sliding_window": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "ffn_hidden_size": 48,
    # latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 512,
    # states
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_n_heads": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_d_state": 8,
    "mamba_d_ssm": 64,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "ssm_state_size": 8,
    "state_size": 8,
    "time_step_rank": 4,
    "mamba_dt_rank": 4,
    # other names of the same
    "d_model": 32,
    "n_embd": 32,
    "n_layer": 2,
    "num_layers": 2,
    "n_head": 4,
    "n_positions": 512,
    "max_seq_len": 512,
    "rotary_dim": 4,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 300,
    "num_kv_shared_layers": 0,
}
HYBRID = ["linear_attention", "full_attention"]
OPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_hidden_layers": 3,
        "num_kv_shared_layers": 1,
        "intermediate_size": [48] * 3,
        "activation_sparsity_pattern": [0.0] * 3,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 512},
    "granitemoehybrid": {"layer_types": HYBRID, "shared_intermediate_size": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": HYBRID, "linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "minimax": {"layer_types": HYBRID},
    "nemotron_h": {"layer_types": ["linear_attention", "mlp", "full_attention"], "num_hidden_layers": 3},
    "olmo_hybrid": {"layer_types": HYBRID},
    "qwen3_5_moe_text": {"layer_types": HYBRID},
    "qwen3_5_text": {"layer_types": HYBRID},
    "qwen3_next": {"layer_types": HYBRID},
    "qwen4_exp_text": {"layer_types": HYBRID, "indexer_head_dim": 8, "indexer_num_heads": 2},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "n_mamba_heads": 4,
        "hybrid_layer_ids": [1],
        "num_mem_blocks": 1,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""Options of families whose layers have kinds, or that need other sizes."""


def tiny(family: str, **options: Any) -> PreTrainedConfig:
    """Return a configuration of two layers, 32 wide, with a layer of each kind."""
    default = AutoConfig.for_model(family)
    known = {*default.to_dict(), *default.attribute_map}
    sizes = {name: value for name, value in SIZES.items() if name in known}
    if "kv_lora_rank" in known:  # keys and values of each head are made from a latent
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    if family.startswith("gemma4"):
        sizes.pop("head_dim", None)  # differs by layer
    if getattr(default, "sliding_window", None) is None:
        sizes.pop("sliding_window", None)
    return AutoConfig.for_model(family, **{**sizes, **OPTIONS.get(family, {}), **options})
