"""Attention for grouped-query models without copying keys and values.

The heads that share a key-value head are laid out as further queries of it: (B, H, Q, D) becomes
(B, H_kv, G·Q, D), so that scaled dot-product attention runs on the keys as they lie. Equal to repeating the keys G
times, with 1/G of the memory traffic, which is what bounds decoding on a CPU.
"""

from __future__ import annotations

NAME = "espalier_grouped"


def register() -> str:
    """Makes the function known to transformers; returns the name to pass as `attn_implementation`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, grouped_attention)
    return NAME


def grouped_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """query (B, H, Q, D); key, value (B, H_kv, K, D); attention_mask (B, 1, Q, K) or, already laid out by
    `repeat_mask`, (B, 1, G·Q, K); True or 0 where attention is allowed. Returns ((B, Q, H, D), None)."""
    import torch

    batch, heads, length, dim = query.shape
    shared = key.shape[1]
    groups = heads // shared
    if groups > 1:
        query = query.reshape(batch, shared, groups * length, dim)
        if attention_mask.shape[2] == length > 1:
            attention_mask = attention_mask.repeat(1, 1, groups, 1)
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return out.reshape(batch, heads, length, dim).transpose(1, 2).contiguous(), None


def repeat_mask(mask, config):
    """(B, 1, Q, K) to (B, 1, G·Q, K) for all layers at once: done by each layer, a training pass would hold one copy a
    layer."""
    groups = config.num_attention_heads // (config.num_key_value_heads or config.num_attention_heads)
    return mask.repeat(1, 1, groups, 1)
