"""Tiny models of transformers' families, and their log-probabilities and gradients as a policy computes them and as
transformers does in float64, with eager attention, on single unpadded sequences."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from components.algorithms.policy.packing import TokenSequence, pack
from components.algorithms.policy.policy import Policy
from components.models.distribution import Cut
from components.models.spec import ModelSpec
from tests.models.tiny_configs import tiny

MAX_LENGTH = 256
GENERATOR = torch.Generator().manual_seed(1)
PROMPT = torch.randint(3, 60, (40,), generator=GENERATOR).tolist()
GIVEN = [
    TokenSequence(
        PROMPT + torch.randint(3, 60, (count,), generator=GENERATOR).tolist(),
        list(range(36, 40 + count, 3)),
        weight=weight,
    )
    for count, weight in ((50, 1.0), (33, -0.5), (12, 0.7))
]


def write(family: str, folder: Path, **options) -> ModelSpec:
    """Write a tiny model of a family whose tokens depend on those before them."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny(family, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    model.save_pretrained(folder)
    return ModelSpec(name="some", source="random", device="cpu", max_length=MAX_LENGTH)


def layout(policy: Policy) -> str:
    return "padded" if policy.padded else "trie"


def computed(policy: Policy) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the log-probabilities of the targets, and the gradient of their weighted sum by parameter."""
    policy.model.requires_grad_(True)
    (packed,) = pack(GIVEN, 1000, padded=policy.padded)
    logprob_S, _ = policy.logprobs(packed, Cut())
    (logprob_S * packed.weight_S).sum().backward()
    return logprob_S.detach().double(), gradients(policy.model)


def expected(folder: Path, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return what `computed` does, by transformers, in float64 unless stated otherwise."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    model.set_experts_implementation("eager")
    logprobs = []
    for sequence in GIVEN:
        tokens_T = torch.tensor(sequence.token_ids)
        logps_TV = model(input_ids=tokens_T[None], use_cache=False).logits[0].double().log_softmax(-1)
        own_S = torch.stack([logps_TV[target - 1, tokens_T[target]] for target in sequence.targets])
        (own_S.sum() * sequence.weight).backward()
        logprobs.append(own_S.detach())
    return torch.cat(logprobs), gradients(model)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients of the base model's parameters."""
    return {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): torch.zeros(parameter.shape)
        if parameter.grad is None
        else parameter.grad.double()
        for name, parameter in model.named_parameters()
        if ".lora_" not in name
    }
