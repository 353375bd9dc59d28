"""Attention for grouped-query models without copying keys and values.

The heads that share a key-value head become additional queries of it: (B, H, Q, D) is reshaped to (B, H_kv, G·Q, D),
so that scaled dot-product attention reads the keys in place. The result equals repeating the keys G times, with 1/G of
the memory traffic, which limits decoding speed on a CPU.

The masks of layers with windows or chunks come from `masks`; `trie_attention` implements the mask of a prefix trie,
`shared_attention` that of a decoding step. Capped scores (Gemma 2) and attention sinks (gpt-oss) are computed by their
formulas; position biases are rejected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from components.errors import ResourceError
from components.models.layer_kinds import stateful_layers

if TYPE_CHECKING:
    import torch

NAME = "espalier_grouped"
SCORES = 1 << 24
"""Number of scores of all rows and heads that are in memory at a time, for capped scores and sinks: 64 MB in float32,
of which the formula takes a few copies. A query's scores are not divided."""


def register() -> str:
    """Register attention and masks with transformers; return the name for `attn_implementation`."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from components.models import masks

    ALL_ATTENTION_FUNCTIONS.register(NAME, grouped_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, masks.layer_mask)
    return NAME


def implementation(config: Any) -> str:
    """Return transformers' own attention that computes a model with this configuration: scaled dot-product attention,
    or eager attention where the former ignores or lacks a part of the model (capped scores, sinks)."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    return "sdpa" if getattr(kind, "_supports_sdpa", False) and not capped else "eager"


def grouped_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """Return (attention output (B, Q, H, D), None). Raises ResourceError for position biases.

    query: (B, H, Q, D). key, value: (B, H_kv, K, D). attention_mask: (B, 1, Q, K), True or 0 where attention is
    allowed, or the result of `trie_attention.mask` or `shared_attention.SlotMask`. Keywords of some families: softcap,
    the cap of the scores; s_aux, (H,) scores of the sinks.
    """
    import torch
    from torch.nn.attention.flex_attention import BlockMask

    from components.models import gpu_attention, shared_attention, trie_attention

    softcap, s_aux = kwargs.get("softcap"), kwargs.get("s_aux")
    if kwargs.get("position_bias") is not None:
        raise ResourceError(f"{type(module).__name__} needs attention with position_bias, which is not supported")
    if isinstance(attention_mask, gpu_attention.GpuMask):
        attention_mask = attention_mask.of(query, key, value, softcap, s_aux)
    if isinstance(attention_mask, trie_attention.TrieMask | BlockMask):
        out = trie_attention.attend(query, key, value, attention_mask, scaling, softcap, s_aux)
        return out.transpose(1, 2).contiguous(), None
    plain = softcap is None and s_aux is None
    if isinstance(attention_mask, shared_attention.SlotMask):
        if plain and attention_mask.shared is not None:
            return shared_attention.attend(query, key, value, attention_mask.shared, scaling).transpose(1, 2), None
        key, value = (tensor[:, :, attention_mask.start :] for tensor in (key, value))
        attention_mask = attention_mask.dense
    batch, heads, length, dim = query.shape
    shared = key.shape[1]
    groups = heads // shared
    if not plain:
        scaling = dim**-0.5 if scaling is None else scaling
        out = _in_parts(query, key, value, attention_mask, scaling, softcap, s_aux)
        return out.transpose(1, 2).contiguous(), None
    if groups > 1:
        query = query.reshape(batch, shared, groups * length, dim)
        if length > 1:
            attention_mask = attention_mask.repeat(1, 1, groups, 1)
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return out.reshape(batch, heads, length, out.shape[-1]).transpose(1, 2).contiguous(), None


def _in_parts(query, key, value, mask, scale, cap, sinks_H):
    """Return the result of `_by_formula`, computed for at most `SCORES` scores at a time."""
    import torch

    batch, heads, length, _ = query.shape
    scores = heads * key.shape[2]
    queries = max(1, min(length, SCORES // scores))
    rows = max(1, SCORES // (scores * queries))
    by_rows = zip(*(tensor.split(rows) for tensor in (query, key, value, mask.expand(batch, -1, -1, -1))), strict=True)
    outs = [
        torch.cat(
            [
                _by_formula(q, k, v, m, scale, cap, sinks_H)
                for q, m in zip(qs.split(queries, 2), ms.split(queries, 2), strict=True)
            ],
            2,
        )
        for qs, k, v, ms in by_rows
    ]
    return torch.cat(outs)


def _by_formula(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    cap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Return softmax([scores, sink]) [v, 0], with scores cap · tanh(q k' scale / cap), (B, H, Q, D)."""
    import torch

    grouped = query.reshape(len(query), key.shape[1], -1, *query.shape[2:])
    scores = (grouped @ key[:, :, None].mT).to(torch.promote_types(query.dtype, torch.float32)) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    mask = mask[:, :, None]
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sinks_H is not None:
        sinks = sinks_H.to(scores.dtype).view(1, key.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights.to(value.dtype) @ value[:, :, None]).flatten(1, 2)


def beyond_slots(model: Any) -> list[str]:
    """Return what a model has that a table of keys and values, of one shape for all layers, cannot store."""
    config, reasons = model.config.get_text_config(), stateful_layers(model)
    if getattr(config, "kv_lora_rank", None):
        reasons.append("latent attention")
    if getattr(config, "num_kv_shared_layers", None):
        reasons.append("layers that share keys and values")
    return reasons


CHANGING = ("longrope", "dynamic")
"""Rotary positions whose angles depend on the longest sequence of a batch."""
CHOSEN = "index_topk"
"""Number of keys that layers with sparse attention choose. Equal scores, such as those that a ReLU sets to 0, are
chosen by the length of the row."""


def refuse_by_length(config: Any, max_length: int, name: str) -> None:
    """Raise ResourceError if the output of a token depends on the length of its row, in sequences of up to
    `max_length` tokens."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = rope.values() if all(isinstance(options, dict) for options in rope.values()) else [rope]
    for options in kinds:
        if options.get("rope_type") in CHANGING:
            longest = options.get("original_max_position_embeddings") or config.max_position_embeddings
            _refuse_length(
                max_length, longest, name, "its rotary positions change with the longest sequence of a batch"
            )
    if chosen := getattr(config, CHOSEN, None):
        _refuse_length(max_length, chosen, name, f"its layers attend to a selection of {chosen} tokens ({CHOSEN})")


def refuse_inexact(config: Any, max_length: int, name: str) -> None:
    """Raise ResourceError for models that depend on more than the tokens and their positions, for sequences of up to
    `max_length` tokens."""
    refuse_by_length(config, max_length, name)
    tuned = getattr(config, "attn_temperature_tuning", None)
    floor = config.floor_scale if tuned else getattr(config, "log_scaling_n_floor", None)
    if floor is not None:
        _refuse_length(max_length, floor, name, "it has a temperature by place in a row")


def _refuse_length(max_length: int, longest: int, name: str, reason: str) -> None:
    if longest < max_length:
        raise ResourceError(
            f"model.max_length = {max_length}: {name} cannot be computed exactly for more than {longest} tokens, "
            f"because {reason}; expected model.max_length={longest} or less, or another model"
        )
