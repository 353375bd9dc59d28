"""Attention for grouped-query models without copying keys and values.

The heads that share a key-value head become additional queries of it: (B, H, Q, D) is reshaped to (B, H_kv, G·Q, D),
so that scaled dot-product attention reads the keys in place. The result equals repeating the keys G times, with 1/G of
the memory traffic, which limits decoding speed on a CPU.

Only standard attention with a mask is supported; models with other variants are rejected. `trie_attention` implements
the mask of a prefix trie.
"""

from __future__ import annotations

from typing import Any

from components.errors import ResourceError

NAME = "espalier_grouped"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Unsupported arguments that some models pass to attention: capped scores, sinks, position biases."""


def register() -> str:
    """Register the function with transformers; return the name for `attn_implementation`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, grouped_attention)
    return NAME


def grouped_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """Return (attention output (B, Q, H, D), None). Raises ResourceError for unsupported arguments.

    query: (B, H, Q, D). key, value: (B, H_kv, K, D). attention_mask: (B, 1, Q, K), True or 0 where attention is
    allowed, or the result of `trie_attention.mask` or `shared_attention.shared_mask`.
    """
    import torch

    from components.models import shared_attention, trie_attention

    if extra := [name for name in _UNSUPPORTED if kwargs.get(name) is not None]:
        raise ResourceError(f"{type(module).__name__} needs attention with {', '.join(extra)}, which is not supported")
    if trie_attention.is_mask(attention_mask):
        return trie_attention.attend(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None
    if isinstance(attention_mask, shared_attention.SharedMask):
        return shared_attention.attend(query, key, value, attention_mask, scaling).transpose(1, 2), None
    batch, heads, length, dim = query.shape
    shared = key.shape[1]
    groups = heads // shared
    if groups > 1:
        query = query.reshape(batch, shared, groups * length, dim)
        if length > 1:
            attention_mask = attention_mask.repeat(1, 1, groups, 1)
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return out.reshape(batch, heads, length, dim).transpose(1, 2).contiguous(), None


def refuse_inexact(config: Any, max_length: int, name: str) -> None:
    """Raise ResourceError for models that custom masks and cached keys and values do not compute exactly, for sequences
    of up to `max_length` tokens."""
    kinds = set(getattr(config, "layer_types", None) or [])
    window = getattr(config, "sliding_window", None)
    rope = getattr(config, "rope_parameters", None) or {}
    unsupported = sorted(kinds - {"full_attention", "sliding_attention"})
    if not getattr(config, "num_attention_heads", None):
        unsupported.append("layers without attention")
    if getattr(config, "kv_lora_rank", None):
        unsupported.append("latent attention")
    if getattr(config, "attn_logit_softcapping", None):
        unsupported.append("capped attention scores")
    if ("sliding_attention" in kinds or (not kinds and window)) and not (window and window >= max_length):
        unsupported.append(f"a sliding window of {window} tokens (model.max_length is {max_length})")
    if rope.get("rope_type") == "longrope" and rope["original_max_position_embeddings"] < max_length:
        unsupported.append(f"positions that change beyond {rope['original_max_position_embeddings']} tokens")
    if unsupported:
        raise ResourceError(
            f"{name} cannot be run exactly here: it needs {', '.join(unsupported)}. Choose another model"
        )
