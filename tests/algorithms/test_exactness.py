"""Models that packs do not compute are refused by name; the common families pass."""

from __future__ import annotations

import pytest
import torch
import transformers

from components.algorithms.policy import Policy
from components.errors import ResourceError
from components.models.spec import ModelSpec

SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def save(folder, config) -> ModelSpec:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)  # so that attention is far from uniform
    model.save_pretrained(folder)
    return ModelSpec(name="some", source="random", device="cpu", max_length=32)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma"])
def test_families_of_full_attention_are_trained(tmp_path, family):
    config = getattr(transformers, f"{family}Config")(**SMALL)
    Policy(tmp_path, save(tmp_path, config), seed=0)


def test_a_window_shorter_than_the_longest_sequence_is_refused(tmp_path):
    spec = save(tmp_path, transformers.MistralConfig(**SMALL, sliding_window=16))
    with pytest.raises(ResourceError, match=r"MistralForCausalLM.*16 tokens back.*model\.max_length to 16"):
        Policy(tmp_path, spec, seed=0)
    Policy(tmp_path, spec.model_copy(update={"max_length": 16}), seed=0)


def test_capped_attention_scores_are_refused(tmp_path):
    config = transformers.Gemma2Config(**SMALL, attn_logit_softcapping=0.5, sliding_window=64, query_pre_attn_scalar=8)
    with pytest.raises(ResourceError, match="Gemma2"):
        Policy(tmp_path, save(tmp_path, config), seed=0)


def test_recurrent_layers_are_refused(tmp_path):
    config = transformers.Qwen3NextConfig(
        **SMALL,
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=0,
    )
    with pytest.raises(ResourceError, match="cannot be trained exactly"):
        Policy(tmp_path, save(tmp_path, config), seed=0)
