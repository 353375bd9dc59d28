"""Attention of a prefix trie: each node sees itself and its ancestors, and nothing else is computed.

Nodes are laid out depth first: what lies below node i comes right after it, up to ends[i]. So node j sees node i where
i <= j < ends[i], and the nodes between two branchings are a segment: a run of equal ends. A segment is seen by itself,
causally, and by everything below it, which is one dense block without a mask. On a CPU these blocks are computed one
by one by the flash kernel, and put together by the logarithms of their sums (arXiv:2112.05682); the gradient of a block
is that of the kernel, given the sums of the whole (arXiv:2205.14135, algorithm 4). On a GPU it is FlexAttention with a
block mask, or, where that is missing, scaled dot-product attention with a dense one.

Legend: N nodes, H heads, K key-value heads, D their size.
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
"""Queries from, to, keys from, to, and whether it is causal."""


def mask(ends_N: torch.Tensor) -> torch.Tensor | BlockMask:
    """What is passed to a model as its attention mask, and reaches `attend` with every layer: on a CPU the ends
    themselves, (1, 1, 1, N) int64; on a GPU a block mask, or (1, 1, N, N) bool."""
    if ends_N.device.type == "cpu":
        return ends_N[None, None, None]
    count = len(ends_N)
    if flex_works():
        return create_block_mask(visible(ends_N), None, None, count, count, device=str(ends_N.device))
    nodes_N = torch.arange(count, device=ends_N.device)
    return ((nodes_N <= nodes_N[:, None]) & (nodes_N[:, None] < ends_N))[None, None]


def visible(ends_N: torch.Tensor) -> Any:
    """The same as a function of FlexAttention's."""

    def rule(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (query < ends_N[key])

    return rule


def is_mask(value: Any) -> bool:
    """Whether it comes from `mask` and is for `attend`; a dense one is for plain attention."""
    return isinstance(value, BlockMask) or (isinstance(value, torch.Tensor) and value.dtype == torch.int64)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: torch.Tensor | BlockMask, scale: float | None
) -> torch.Tensor:
    """query (1, H, N, D), key and value (1, K, N, D) to (1, H, N, D)."""
    if isinstance(given, BlockMask):
        found = _compiled()(query, key, value, block_mask=given, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
        assert isinstance(found, torch.Tensor)
        return found
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out: torch.Tensor = _TrieAttention.apply(query, key, value, blocks(given[0, 0, 0]), scale)
    return out


def blocks(ends_N: torch.Tensor) -> list[Block]:
    """The dense blocks of which the attention consists."""
    ends, counts = torch.unique_consecutive(ends_N, return_counts=True)
    found: list[Block] = []
    start = 0
    for end, count in zip(ends.tolist(), counts.tolist(), strict=True):
        stop = start + count
        found.append((start, stop, start, stop, True))
        if stop < end:
            found.append((stop, end, start, stop, False))
        start = stop
    return found


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
            if not causal:  # what the nodes have seen so far, and this, by their shares of the sum
                held, held_sums = out[:, :, first:last], sums[:, :, first:last]
                both = torch.logaddexp(held_sums, own_sums)
                share = (own_sums - both).exp()[..., None].to(own.dtype)
                own, own_sums = torch.lerp(held, own, share.expand_as(own)), both
            out[:, :, first:last], sums[:, :, first:last] = own, own_sums
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.parts, ctx.scale = parts, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        found = [torch.empty_like(one) for one in (query, key, value)]
        for first, last, start, stop, causal in sorted(ctx.parts, key=_causal_first):
            given = (one[:, :, first:last] for one in (grads[0], query))
            keys = (one[:, :, start:stop] for one in (key, value))
            whole = (one[:, :, first:last] for one in (out, sums))
            parts = _flash_backward(*given, *keys, *whole, 0.0, causal, scale=ctx.scale)
            places = slice(first, last), slice(start, stop), slice(start, stop)
            for to, part, place in zip(found, parts, places, strict=True):
                if causal:  # each node is in one such block, and here for the first time
                    to[:, :, place] = part
                else:
                    to[:, :, place] += part
        return (*found, None, None)


@functools.cache
def flex_works() -> bool:
    """Whether FlexAttention can be compiled for the GPU here, forward and backward; tried once."""
    if not torch.cuda.is_available():
        return False
    count = 256  # fewer queries than 128 would take another kernel
    query = torch.randn(1, 2, count, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ends_N = torch.full((count,), count, device="cuda")
    try:
        given = create_block_mask(visible(ends_N), None, None, count, count, device="cuda")
        _compiled()(query, query[:, :1], query[:, :1], block_mask=given, enable_gqa=True).sum().backward()
    except Exception as error:  # noqa: BLE001  no compiler, no kernel for this GPU: it is slower then, not wrong
        log.warning("FlexAttention cannot be used, attention takes a dense mask: %s", error)
        return False
    return True


@functools.cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)
