"""Attention over a prefix trie on a GPU (`trie_attention`): FlexAttention with a block mask, or a dense mask.

Legend: N nodes, Q and K tiles of queries and keys, H heads.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from components.models.masks import FULL, AttentionRange

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class GpuMask:
    """Mask of a large pack on a GPU, for layers with one reach: a block mask where FlexAttention works, else a dense
    one."""

    ends_N: torch.Tensor
    depths_N: torch.Tensor
    reach: AttentionRange

    @functools.cached_property
    def blocks(self) -> BlockMask:
        return block_mask(self.ends_N, self.depths_N, self.reach)

    @functools.cached_property
    def dense(self) -> torch.Tensor:
        return dense_mask(self.ends_N, self.depths_N, self.reach)

    def of(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cap: float | None,
        sinks_H: torch.Tensor | None,
    ) -> BlockMask | torch.Tensor:
        """Return the mask for the attention of a layer."""
        shapes = *query.shape[1::2], *key.shape[1::2], value.shape[-1]
        return self.blocks if flex_works(query.dtype, shapes, cap, sinks_H is not None) else self.dense


TILE = 128
"""Number of queries and of keys of a block of FlexAttention."""


def block_mask(ends_N: torch.Tensor, depths_N: torch.Tensor, reach: AttentionRange = FULL) -> BlockMask:
    """Return the block mask of FlexAttention, in memory that grows with N and (N / TILE)²: `create_block_mask` computes
    all N² pairs of nodes. No operation waits for the device.

    A block of earlier keys matters to queries from j on if one of them has descendants from j on, and is visible as a
    whole if all of them have all of these queries as descendants. In layers with a window, some blocks count as partly
    visible that are not visible at all; the mask function hides their pairs.
    """
    count = len(ends_N)
    tiles = -(-count // TILE)

    def per_tile(values_N: torch.Tensor, fill: int) -> torch.Tensor:
        return functional.pad(values_N, (0, tiles * TILE - count), value=fill).view(tiles, TILE)

    tile_K = torch.arange(tiles, device=ends_N.device)
    tile_Q1, first_N = tile_K[:, None], reach.first(depths_N)
    visible_QK = (tile_K < tile_Q1) & (per_tile(ends_N, 0).amax(1) > tile_Q1 * TILE)
    visible_QK &= per_tile(depths_N, -1).amax(1) >= per_tile(first_N, count).amin(1)[:, None]
    full_QK = (tile_K < tile_Q1) & (per_tile(ends_N, count).amin(1) >= (tile_Q1 + 1) * TILE)
    full_QK &= per_tile(depths_N, count).amin(1) >= per_tile(first_N, 0).amax(1)[:, None]
    partial_QK = (visible_QK & ~full_QK) | (tile_K == tile_Q1)
    return BlockMask.from_kv_blocks(
        *_tiles(partial_QK),
        *_tiles(full_QK),
        BLOCK_SIZE=TILE,
        mask_mod=visible(ends_N, depths_N, reach),
        seq_lengths=(count, count),
    )


def _tiles(chosen_QK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the (1, 1, Q) number of chosen tiles of keys, and the (1, 1, Q, K) tiles with the chosen ones first."""
    order_QK = chosen_QK.int().argsort(dim=-1, descending=True, stable=True)
    return chosen_QK.sum(-1, dtype=torch.int32)[None, None], order_QK.int()[None, None]


def dense_mask(ends_N: torch.Tensor, depths_N: torch.Tensor, reach: AttentionRange = FULL) -> torch.Tensor:
    """Return the (1, 1, N, N) bool mask, True where attention is allowed."""
    nodes_N = torch.arange(len(ends_N), device=ends_N.device)
    return visible(ends_N, depths_N, reach)(0, 0, nodes_N[:, None], nodes_N)[None, None]


def visible(ends_N: torch.Tensor, depths_N: torch.Tensor, reach: AttentionRange = FULL) -> Any:
    """Return the mask as a mask function of FlexAttention."""
    first_N = reach.first(depths_N)

    def ancestor(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (query < ends_N[key])

    def near_ancestor(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (query < ends_N[key]) & (depths_N[key] >= first_N[query])

    return ancestor if reach == FULL else near_ancestor


def flex(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_mask: BlockMask,
    scale: float | None,
    cap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    options: dict[str, Any] = {} if cap is None else {"score_mod": capped(cap)}
    if sinks_H is not None:
        options["return_aux"] = AuxRequest(lse=True)
    grouped = query.shape[1] != key.shape[1]
    output = _compiled()(query, key, value, block_mask=block_mask, scale=scale, enable_gqa=grouped, **options)
    if sinks_H is None:
        assert isinstance(output, torch.Tensor)
        return output
    out, sums = output[0], output[1].lse
    share = torch.sigmoid(sums - sinks_H[:, None].to(sums.dtype))  # of the keys in the softmax sum with the sink
    return (out * share[..., None]).to(out.dtype)


@functools.cache
def capped(cap: float) -> Any:
    """Return the score function of FlexAttention that caps scores: always the same one, so that it is compiled once."""

    def rule(score: torch.Tensor, *_: Any) -> torch.Tensor:
        return cap * torch.tanh(score / cap)

    return rule


TOLERANCE = 0.1
"""Largest difference of outputs of FlexAttention from the formula, for random inputs: rounding stays below it in every
dtype."""


@functools.cache
def flex_works(dtype: torch.dtype, shapes: tuple[int, ...], cap: float | None, sinks: bool) -> bool:
    """Return True if FlexAttention compiles for the GPU, forward and backward, and computes what a dense mask does.
    Cached. shapes: numbers of query heads, their size, numbers of key heads, their size, that of the values."""
    if not torch.cuda.is_available():
        return False
    heads, dim, shared, _, value_dim = shapes
    count = 256  # fewer than 128 queries would use another kernel
    try:
        # The first caller may compute without gradients, or in a layer that checkpoints its tensors by hooks.
        with torch.inference_mode(False), torch.enable_grad(), saved_tensors_hooks(lambda x: x, lambda x: x):
            generator = torch.Generator("cuda").manual_seed(0)
            options: dict[str, Any] = {"device": "cuda", "dtype": dtype, "requires_grad": True, "generator": generator}
            sizes = (heads, dim), (shared, dim), (shared, value_dim)
            query, key, value = (torch.randn(1, number, count, size, **options) for number, size in sizes)
            sinks_H = torch.randn(heads, **options) if sinks else None
            ends_N, depths_N = torch.full((count,), count, device="cuda"), torch.arange(count, device="cuda")
            out = flex(query, key, value, block_mask(ends_N, depths_N), None, cap, sinks_H)
            out.sum().backward()
            expected = _formula(query, key, value, dense_mask(ends_N, depths_N), cap, sinks_H)
            difference = (out - expected).abs().max().item()
    except Exception as error:  # noqa: BLE001  no compiler or no kernel for this GPU: the fallback is slower, not wrong
        log.warning("FlexAttention cannot be used, attention takes a dense mask: %s", error)
        return False
    if difference > TOLERANCE:
        log.warning("FlexAttention is off by %.2g, attention takes a dense mask", difference)
    return difference <= TOLERANCE


def _formula(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    cap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Return the output (1, H, N, D) by the formula, in float32."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.float().repeat_interleave(groups, 1) for tensor in (key, value))
    scores = query.float() @ key.mT * query.shape[-1] ** -0.5
    scores = (scores if cap is None else cap * torch.tanh(scores / cap)).masked_fill(~mask, -torch.inf)
    totals = scores.logsumexp(-1)
    if sinks_H is not None:
        totals = torch.logaddexp(totals, sinks_H[:, None].float())
    return (scores - totals[..., None]).exp() @ value


RECOMPILE_LIMIT = 64
"""Maximum number of compiled kernels. Each combination of dtype, head counts, gradients or none, and one, two or more
blocks needs its own; beyond torch's default of 8, attention would silently compute all scores."""


@functools.cache
def _compiled() -> Any:
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, RECOMPILE_LIMIT)  # torch.compile takes it from 2.12 on
    return torch.compile(flex_attention, dynamic=True)
