"""Attention over a prefix trie: each node attends to itself and its ancestors, and nothing else is computed.

Nodes are in depth-first order: the descendants of node i follow it directly, up to ends[i]. Node j attends to node i if
i <= j < ends[i] and the depth of i is in the layer's range (`masks.AttentionRange`): all ancestors, those of a sliding
window, or those of a chunk. The nodes between two branching points are a segment: a run of equal ends. A segment
attends to itself causally, and all its descendants attend to it, which is one dense block without a mask. With a window
segments are cut into pieces that attend to all of themselves, and a block has the descendants that are near enough. On
a CPU, the flash kernel computes these blocks, which are combined by their log-sum-exps (arXiv:2112.05682); the gradient
of a block is the kernel's, given the log-sum-exp of the whole row (arXiv:2205.14135, algorithm 4). Capped scores
(Gemma 2), which the kernel does not know, take the formulas of a block. An attention sink (gpt-oss) is one more key of
each row, with the value 0. On a GPU, other masks are used (`gpu_attention`).

Legend: N nodes, H heads, K key-value heads, G = H / K heads of a key-value head, D head dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask

from components.models import gpu_attention
from components.models.gpu_attention import GpuMask, dense_mask
from components.models.masks import FULL, AttentionRange, Paths, paths

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

CAPPED_KEYS = 512
"""Maximum number of keys of a block whose scores are in memory: those of capped attention."""


@dataclass(frozen=True)
class Block:
    """Queries [first, last) that attend to keys [start, stop): a causal block, one with a (queries, keys) mask
    `allowed_QK`, or all of them."""

    first: int
    last: int
    start: int
    stop: int
    causal: bool = False
    allowed_QK: torch.Tensor | None = None

    def bias(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the (queries, keys) bias of the scores, 0 or -inf; None if it is 0."""
        if self.allowed_QK is None:
            return None
        return torch.zeros(self.allowed_QK.shape, dtype=dtype).masked_fill_(~self.allowed_QK, -torch.inf)


@dataclass(frozen=True, eq=False)
class TrieMask:
    """Mask of a trie on a CPU, for layers with one reach."""

    ends_N: torch.Tensor
    depths_N: torch.Tensor
    reach: AttentionRange

    @functools.cached_property
    def blocks(self) -> list[Block]:
        return blocks(self.ends_N, self.depths_N, self.reach)

    @functools.cached_property
    def small_blocks(self) -> list[Block]:
        return blocks(self.ends_N, self.depths_N, self.reach, CAPPED_KEYS)


def trie_paths(ends_N: torch.Tensor, depths_N: torch.Tensor) -> Paths:
    """Return the attention of a trie, to pass to a model as its mask."""
    return paths(lambda reach: mask(ends_N, depths_N, reach), 1, len(ends_N))


DENSE_NODES = 2048
"""Largest number of nodes of a pack that takes a dense mask on a GPU.

FlexAttention compiles for up to 27 s (20 s, and 7 s more for other numbers of blocks), where a dense mask starts in
0.3 s. On an H200, a step of 0.6 billion parameters on some 5,000 nodes took 0.141 s with FlexAttention and 0.170 s with
a dense mask, and with the layers as a CUDA graph 0.087 and 0.149 s: compilation pays after 430 to 930 such steps, once
for each root, which keeps the compiled kernels. As the difference grows with the square of the nodes, it pays after
thousands of packs of 2,048 nodes, which few trainings compute.
"""


def mask(
    ends_N: torch.Tensor, depths_N: torch.Tensor, reach: AttentionRange = FULL
) -> TrieMask | GpuMask | torch.Tensor:
    """Return the mask for layers with this reach."""
    if ends_N.device.type == "cpu":
        return TrieMask(ends_N, depths_N, reach)
    large = len(ends_N) > DENSE_NODES
    return GpuMask(ends_N, depths_N, reach) if large else dense_mask(ends_N, depths_N, reach)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    trie_mask: TrieMask | BlockMask,
    scale: float | None,
    cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention output (1, H, N, D) of query (1, H, N, D), key and value (1, K, N, D). The size of
    values and output may differ from that of queries and keys (latent attention). cap: of the scores. sinks_H: score of
    each head's attention sink."""
    if isinstance(trie_mask, BlockMask):
        return gpu_attention.flex(query, key, value, trie_mask, scale, cap, sinks_H)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    parts = trie_mask.blocks if cap is None else trie_mask.small_blocks
    width, size = max(query.shape[-1], value.shape[-1]), value.shape[-1]
    query, key, value = (_padded(tensor, width) for tensor in (query, key, value))
    out: torch.Tensor = _TrieAttention.apply(query, key, value, sinks_H, parts, scale, cap)
    return out[..., :size]


def _padded(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Return a tensor padded to `width`: itself if it has that size, of which `pad` would return a copy."""
    missing = width - tensor.shape[-1]
    return functional.pad(tensor, (0, missing)) if missing else tensor


def blocks(
    ends_N: torch.Tensor, depths_N: torch.Tensor, reach: AttentionRange = FULL, most: int | None = None
) -> list[Block]:
    """Return the blocks of the attention, the causal ones first; each pair of nodes is in at most one. most: maximum
    number of keys of a block."""
    first_N = reach.first(depths_N)
    segments, counts = torch.unique_consecutive(ends_N, return_counts=True)
    own: list[Block] = []
    others: list[Block] = []
    start = 0
    for end, count in zip(segments.tolist(), counts.tolist(), strict=True):
        segment_stop = start + count
        while start < segment_stop:
            stop = start + int((first_N[start:segment_stop] <= depths_N[start]).sum())  # the last one attends to all
            stop = min(stop, start + most) if most else stop
            own.append(Block(start, stop, start, stop, causal=True))
            near = first_N[stop:end] <= depths_N[stop - 1]
            runs, lengths = torch.unique_consecutive(near, return_counts=True)
            first = stop
            for attends, length in zip(runs.tolist(), lengths.tolist(), strict=True):
                last = first + length
                if attends:
                    bound_Q1 = first_N[first:last, None]
                    allowed_QK = depths_N[start:stop] >= bound_Q1 if bound_Q1.max() > depths_N[start] else None
                    others.append(Block(first, last, start, stop, allowed_QK=allowed_QK))
                first = last
            start = stop
    return own + others


class _TrieAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks_H: torch.Tensor | None,
        parts: list[Block],
        scale: float,
        cap: float | None,
    ) -> torch.Tensor:
        out = torch.empty_like(query)
        sums = torch.empty(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32))
        for part in parts:
            queries, keys = slice(part.first, part.last), slice(part.start, part.stop)
            own, own_sums = _block(query[:, :, queries], key[:, :, keys], value[:, :, keys], part, scale, cap)
            if not part.causal:  # combine with the blocks so far, weighted by the shares of the softmax sum
                previous, previous_sums = out[:, :, queries], sums[:, :, queries]
                total_sums = torch.logaddexp(previous_sums, own_sums)
                share = (own_sums - total_sums).exp()[..., None].to(own.dtype)
                own, own_sums = torch.lerp(previous, own, share.expand_as(own)), total_sums
            out[:, :, queries], sums[:, :, queries] = own, own_sums
        if sinks_H is not None:
            totals = torch.logaddexp(sums, sinks_H[:, None].to(sums.dtype))
            out.mul_((sums - totals).exp()[..., None])
            sums = totals
        ctx.save_for_backward(query, key, value, sinks_H, out, sums)
        ctx.parts, ctx.scale, ctx.cap = parts, scale, cap
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks_H, out, sums = ctx.saved_tensors
        gradients = [torch.empty_like(tensor) for tensor in (query, key, value)]
        for part in ctx.parts:
            queries, keys = slice(part.first, part.last), slice(part.start, part.stop)
            tensors = [tensor[:, :, queries] for tensor in (grads[0], query, out, sums)]
            tensors += [tensor[:, :, keys] for tensor in (key, value)]
            own = _block_backward(tensors, part, ctx.scale, ctx.cap)
            for gradient, share, place in zip(gradients, own, (queries, keys, keys), strict=True):
                if part.causal:  # each node is in exactly one causal block, which comes first
                    gradient[:, :, place] = share
                else:
                    gradient[:, :, place] += share
        sinks_gradient = None
        if sinks_H is not None and ctx.needs_input_grad[3]:
            mean = (grads[0] * out).sum(-1, dtype=sums.dtype)
            shares = (sinks_H[:, None].to(sums.dtype) - sums).exp()
            sinks_gradient = -(shares * mean).sum((0, 2)).to(sinks_H.dtype)
        return (*gradients, sinks_gradient, None, None, None)


def _block(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: Block, scale: float, cap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and log-sum-exp of a block."""
    if cap is None:
        own: tuple[torch.Tensor, torch.Tensor] = _flash(
            query, key, value, 0.0, block.causal, attn_mask=block.bias(query.dtype), scale=scale
        )
        return own
    scores, _ = _capped_scores(query, key, block, scale, cap)
    sums = scores.logsumexp(-1)
    out = (scores - sums[..., None]).exp().to(value.dtype) @ value[:, :, None]
    return out.flatten(1, 2), sums.flatten(1, 2)


def _block_backward(
    tensors: Sequence[torch.Tensor], block: Block, scale: float, cap: float | None
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of a block's query, key and value. tensors: the gradient of the output and the query of the
    block, output and log-sum-exp of its whole rows, and key and value of the block."""
    grad, query, out, sums, key, value = tensors
    if cap is None:
        bias = block.bias(query.dtype)
        gradients: tuple[torch.Tensor, ...] = _flash_backward(
            grad, query, key, value, out, sums, 0.0, block.causal, attn_mask=bias, scale=scale
        )
        return gradients
    scores, slope = _capped_scores(query, key, block, scale, cap)
    grouped = (1, key.shape[1], -1, *query.shape[2:])
    weights = (scores - sums.view(grouped[:-1])[..., None]).exp()
    query, out, grad = (tensor.reshape(grouped).to(weights.dtype) for tensor in (query, out, grad))
    key, value = (tensor[:, :, None].to(weights.dtype) for tensor in (key, value))
    scores_gradient = weights * (grad @ value.mT - (grad * out).sum(-1, keepdim=True)) * slope * scale
    return (
        (scores_gradient @ key).flatten(1, 2),
        (scores_gradient.mT @ query).sum(2),
        (weights.mT @ grad).sum(2),
    )


def _capped_scores(
    query: torch.Tensor, key: torch.Tensor, block: Block, scale: float, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores cap · tanh(q k' scale / cap) of a block (arXiv:2408.00118, section 2), each (1, K, G, queries,
    keys) in at least float32, and their derivative by q k' scale."""
    grouped = query.reshape(1, key.shape[1], -1, *query.shape[2:])
    dtype = torch.promote_types(query.dtype, torch.float32)
    ratio = torch.tanh((grouped @ key[:, :, None].mT).to(dtype) * scale / cap)
    scores = cap * ratio
    if block.causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    elif block.allowed_QK is not None:
        scores.masked_fill_(~block.allowed_QK, -torch.inf)
    return scores, 1 - ratio * ratio
