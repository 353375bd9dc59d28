"""A Llama in plain torch and float64: eager attention, one sequence at a time, LoRA merged into the weights.

It computes the same as the trainers on packs, independently of the library.

Legend: T tokens, S sampled tokens, D hidden, V vocabulary, P trainable numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

Adapter = Mapping[str, torch.Tensor]
"""LoRA tensors under PEFT's parameter names."""


class PlainLlama:
    def __init__(self, folder: Path, lora_scale: float):
        """Load config and weights from a transformers folder. lora_scale: alpha over rank."""
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
        self.lora_scale = lora_scale

    def hidden(self, token_ids: Sequence[int], adapter: Adapter | None) -> torch.Tensor:
        """Return the (T, D) last hidden states, after the final norm. adapter: None is the base model."""
        config, length = self.config, len(token_ids)
        heads, shared = config["num_attention_heads"], config["num_key_value_heads"]
        size = config["hidden_size"] // heads
        theta = config["rope_parameters"]["rope_theta"]
        frequencies = theta ** -(torch.arange(0, size, 2).double() / size)
        angle_TE = torch.arange(length).double()[:, None] * torch.cat([frequencies, frequencies])
        later_TT = torch.ones(length, length).triu(1).bool()

        def rotated(x_HTE: torch.Tensor) -> torch.Tensor:
            low, high = x_HTE.chunk(2, -1)
            return x_HTE * angle_TE.cos() + torch.cat([-high, low], -1) * angle_TE.sin()

        def norm(x_TD: torch.Tensor, name: str) -> torch.Tensor:
            variance = x_TD.square().mean(-1, keepdim=True) + config["rms_norm_eps"]
            return x_TD * variance.rsqrt() * self.weights[f"{name}.weight"]

        def linear(x_TD: torch.Tensor, name: str) -> torch.Tensor:
            weight = self.weights[f"{name}.weight"]
            if adapter is not None:
                a, b = (adapter[f"base_model.model.{name}.lora_{side}.default.weight"] for side in "AB")
                weight = weight + self.lora_scale * b @ a
            return x_TD @ weight.T

        x_TD = self.weights["model.embed_tokens.weight"][torch.tensor(token_ids)]
        for number in range(config["num_hidden_layers"]):
            layer = f"model.layers.{number}"
            y_TD = norm(x_TD, f"{layer}.input_layernorm")
            query, key, value = (
                linear(y_TD, f"{layer}.self_attn.{side}_proj").view(length, -1, size).transpose(0, 1) for side in "qkv"
            )
            query, key = rotated(query), rotated(key)
            key, value = (tensor.repeat_interleave(heads // shared, 0) for tensor in (key, value))
            score_HTT = (query @ key.transpose(1, 2) / size**0.5).masked_fill(later_TT, -torch.inf)
            attended = (score_HTT.softmax(-1) @ value).transpose(0, 1).reshape(length, -1)
            x_TD = x_TD + linear(attended, f"{layer}.self_attn.o_proj")
            y_TD = norm(x_TD, f"{layer}.post_attention_layernorm")
            gate = torch.nn.functional.silu(linear(y_TD, f"{layer}.mlp.gate_proj"))
            x_TD = x_TD + linear(gate * linear(y_TD, f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj")
        return norm(x_TD, "model.norm")

    def logps(self, hidden_TD: torch.Tensor, temperature: float) -> torch.Tensor:
        """Return the (T, V) log-probabilities of the next token."""
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return torch.log_softmax(hidden_TD @ head.T / temperature, -1)


def flat(adapter: Adapter) -> torch.Tensor:
    """Return the (P,) numbers of an adapter, or of its gradient, ordered by name."""
    return torch.cat([adapter[name].double().reshape(-1) for name in sorted(adapter)])
