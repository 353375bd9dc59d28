"""Attention for grouped-query models without copying keys and values.

The heads that share a key-value head are laid out as further queries of it: (B, H, Q, D) becomes
(B, H_kv, G·Q, D), so that scaled dot-product attention runs on the keys as they lie. Equal to repeating the keys G
times, with 1/G of the memory traffic, which is what bounds decoding on a CPU.

It computes plain attention under the mask that it is given, and nothing else: models that need more are refused. The
mask of a prefix trie has a module of its own (`trie_attention`).
"""

from __future__ import annotations

from typing import Any

from components.errors import ResourceError

NAME = "espalier_grouped"
_MORE = ("softcap", "s_aux", "position_bias")
"""What some models pass to attention, and this one does not do: capped scores, sinks, biases by position."""


def register() -> str:
    """Makes the function known to transformers; returns the name to pass as `attn_implementation`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, grouped_attention)
    return NAME


def grouped_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """query (B, H, Q, D); key, value (B, H_kv, K, D); attention_mask (B, 1, Q, K), True or 0 where attention is
    allowed, or what `trie_attention.mask` gives. Returns ((B, Q, H, D), None)."""
    import torch

    from components.models import trie_attention

    if extra := [name for name in _MORE if kwargs.get(name) is not None]:
        raise ResourceError(f"{type(module).__name__} needs attention with {', '.join(extra)}, which is not done here")
    if trie_attention.is_mask(attention_mask):
        return trie_attention.attend(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None
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
    """Raises ResourceError for models whose sequences of up to `max_length` tokens would not be computed exactly under
    masks of our own, with keys and values kept between passes."""
    kinds = set(getattr(config, "layer_types", None) or [])
    window = getattr(config, "sliding_window", None)
    rope = getattr(config, "rope_parameters", None) or {}
    needs = sorted(kinds - {"full_attention", "sliding_attention"})
    if not getattr(config, "num_attention_heads", None):
        needs.append("layers without attention")
    if getattr(config, "kv_lora_rank", None):
        needs.append("latent attention")
    if getattr(config, "attn_logit_softcapping", None):
        needs.append("capped attention scores")
    if ("sliding_attention" in kinds or (not kinds and window)) and not (window and window >= max_length):
        needs.append(f"a sliding window of {window} tokens (model.max_length is {max_length})")
    if rope.get("rope_type") == "longrope" and rope["original_max_position_embeddings"] < max_length:
        needs.append(f"positions that change beyond {rope['original_max_position_embeddings']} tokens")
    if needs:
        raise ResourceError(f"{name} cannot be run exactly here: it needs {', '.join(needs)}. Choose another model")
