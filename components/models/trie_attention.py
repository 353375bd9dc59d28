"""Attention over a prefix trie: each node attends to itself and its ancestors, and nothing else is computed.

Nodes are in depth-first order: the descendants of node i follow it directly, up to ends[i]. Node j attends to node i if
i <= j < ends[i]. The nodes between two branching points are a segment: a run of equal ends. A segment attends to itself
causally, and all its descendants attend to it, which is one dense block without a mask. On a CPU, the flash kernel
computes these blocks, which are combined by their log-sum-exps (arXiv:2112.05682); the gradient of a block is the
kernel's, given the log-sum-exp of the whole row (arXiv:2205.14135, algorithm 4). On a GPU, FlexAttention with a block
mask is used or, if it is not available, scaled dot-product attention with a dense mask.

Legend: N nodes, H heads, K key-value heads, D head dimension.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

log = logging.getLogger(__name__)

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

Block = tuple[int, int, int, int, bool]
"""Start and end of the queries, start and end of the keys, and True for a causal block."""


def mask(ends_N: torch.Tensor) -> torch.Tensor | BlockMask:
    """Return the attention mask to pass to a model, which passes it to `attend` in each layer. On a CPU: the ends,
    (1, 1, 1, N) int64. On a GPU: a block mask, or (1, 1, N, N) bool."""
    if ends_N.device.type == "cpu":
        return ends_N[None, None, None]
    count = len(ends_N)
    if flex_works():
        return create_block_mask(visible(ends_N), None, None, count, count, device=str(ends_N.device))
    return dense_mask(ends_N)


def dense_mask(ends_N: torch.Tensor) -> torch.Tensor:
    """Return the (1, 1, N, N) bool mask, True where attention is allowed."""
    nodes_N = torch.arange(len(ends_N), device=ends_N.device)
    return ((nodes_N <= nodes_N[:, None]) & (nodes_N[:, None] < ends_N))[None, None]


def visible(ends_N: torch.Tensor) -> Any:
    """Return the mask as a mask function of FlexAttention."""

    def rule(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (query < ends_N[key])

    return rule


def is_mask(value: Any) -> bool:
    """Return True for a mask of `mask` that `attend` handles; a dense mask is for standard attention."""
    return isinstance(value, BlockMask) or (isinstance(value, torch.Tensor) and value.dtype == torch.int64)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    trie_mask: torch.Tensor | BlockMask,
    scale: float | None,
) -> torch.Tensor:
    """Return the attention output (1, H, N, D) of query (1, H, N, D), key and value (1, K, N, D)."""
    if isinstance(trie_mask, BlockMask):
        grouped = query.shape[1] != key.shape[1]
        output = _compiled()(query, key, value, block_mask=trie_mask, scale=scale, enable_gqa=grouped)
        assert isinstance(output, torch.Tensor)
        return output
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out: torch.Tensor = _TrieAttention.apply(query, key, value, blocks(trie_mask[0, 0, 0]), scale)
    return out


def blocks(ends_N: torch.Tensor) -> list[Block]:
    """Return the dense blocks of the attention."""
    ends, counts = torch.unique_consecutive(ends_N, return_counts=True)
    parts: list[Block] = []
    start = 0
    for end, count in zip(ends.tolist(), counts.tolist(), strict=True):
        stop = start + count
        parts.append((start, stop, start, stop, True))
        if stop < end:
            parts.append((stop, end, start, stop, False))
        start = stop
    return parts


def _causal_first(block: Block) -> bool:
    return not block[-1]


class _TrieAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, parts: list[Block], scale: float
    ) -> torch.Tensor:
        out = torch.empty_like(query)
        sums = torch.empty(query.shape[:-1], dtype=torch.float32)
        for first, last, start, stop, causal in sorted(parts, key=_causal_first):
            q, k, v = query[:, :, first:last], key[:, :, start:stop], value[:, :, start:stop]
            own, own_sums = _flash(q, k, v, 0.0, causal, scale=scale)
            if not causal:  # combine with the blocks so far, weighted by the shares of the softmax sum
                previous, previous_sums = out[:, :, first:last], sums[:, :, first:last]
                total_sums = torch.logaddexp(previous_sums, own_sums)
                share = (own_sums - total_sums).exp()[..., None].to(own.dtype)
                own, own_sums = torch.lerp(previous, own, share.expand_as(own)), total_sums
            out[:, :, first:last], sums[:, :, first:last] = own, own_sums
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.parts, ctx.scale = parts, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        gradients = [torch.empty_like(tensor) for tensor in (query, key, value)]
        for first, last, start, stop, causal in sorted(ctx.parts, key=_causal_first):
            queries = (tensor[:, :, first:last] for tensor in (grads[0], query))
            keys = (tensor[:, :, start:stop] for tensor in (key, value))
            totals = (tensor[:, :, first:last] for tensor in (out, sums))
            parts = _flash_backward(*queries, *keys, *totals, 0.0, causal, scale=ctx.scale)
            places = slice(first, last), slice(start, stop), slice(start, stop)
            for gradient, part, place in zip(gradients, parts, places, strict=True):
                if causal:  # each node is in exactly one causal block, which comes first
                    gradient[:, :, place] = part
                else:
                    gradient[:, :, place] += part
        return (*gradients, None, None)


@functools.cache
def flex_works() -> bool:
    """Return True if FlexAttention compiles for the GPU, forward and backward. Cached."""
    if not torch.cuda.is_available():
        return False
    count = 256  # fewer than 128 queries would use another kernel
    try:
        with torch.inference_mode(False), torch.enable_grad():  # the first caller may compute without gradients
            query = torch.randn(1, 2, count, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            ends_N = torch.full((count,), count, device="cuda")
            block_mask = create_block_mask(visible(ends_N), None, None, count, count, device="cuda")
            _compiled()(query, query[:, :1], query[:, :1], block_mask=block_mask, enable_gqa=True).sum().backward()
    except Exception as error:  # noqa: BLE001  no compiler or no kernel for this GPU: the fallback is slower, not wrong
        log.warning("FlexAttention cannot be used, attention takes a dense mask: %s", error)
        return False
    return True


RECOMPILE_LIMIT = 64
"""Maximum number of compiled kernels. Each combination of dtype, head counts, gradients or none, and one, two or more
blocks needs its own; beyond torch's default of 8, attention would silently compute all scores."""


@functools.cache
def _compiled() -> Any:
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, RECOMPILE_LIMIT)  # torch.compile takes it from 2.12 on
    return torch.compile(flex_attention, dynamic=True)
