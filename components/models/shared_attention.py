"""Attention of a decoding step over prefixes that several rows share.

The keys and values of a shared prefix are read once for all its rows instead of once for each row: the queries of the
rows are one matrix, which is multiplied with the prefix (Hydragen, arXiv:2402.05099). The rest of each row is private
to it. The softmax over both parts is exact: a prefix takes part in the softmax over the private keys as one more key,
whose score is the prefix's log-sum-exp and whose value is the prefix's output (arXiv:2402.05099, section 3.1).

Legend: B rows, H heads, K key-value heads, G = H / K heads of a key-value head, W tokens, D head dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True)
class Segment:
    """Tokens [start, stop) that several rows share. rows: their numbers, the first of which is read."""

    rows: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class PrivateRun:
    """Adjacent rows [first, last) whose private tokens are read together: tokens [start, stop) of each."""

    first: int
    last: int
    start: int
    stop: int


@dataclass(frozen=True)
class Sharing:
    """Partition of the tokens of a batch. A segment comes after those that contain its rows and end where it starts;
    every row is in one run, and tokens of a run that are in a segment of the row are masked."""

    segments: tuple[Segment, ...]
    private: tuple[int, ...]
    """First private token of each row."""
    runs: tuple[PrivateRun, ...]
    """Runs when the batch was partitioned; since then, `grown` tokens were added to each row."""
    grown: int = 0


@dataclass(frozen=True, eq=False)
class SharedMask:
    """Partition of the tokens that a decoding step attends to."""

    segments: list[tuple[torch.Tensor | None, Segment]]
    """Segments with the numbers of their rows; None means all rows."""
    runs: list[tuple[PrivateRun, torch.Tensor]]
    """Runs with the bias (rows, 1, 1, tokens) of their scores: 0 or -inf."""


@dataclass(frozen=True, eq=False)
class SlotMask:
    """Mask of a pass over cached keys and values, of which the first `start` tokens are not read."""

    dense: torch.Tensor
    """(B, 1, Q, K) bool mask of the tokens from `start` on, True where attention is allowed."""
    start: int = 0
    shared: SharedMask | None = None
    """The same mask as a partition; None if each row is read by itself."""


def shared_mask(mask_B11W: torch.Tensor, sharing: Sharing) -> SlotMask:
    """Return the mask of a decoding step with its partition."""
    rows = len(mask_B11W)
    segments = [
        (None if len(segment.rows) == rows else torch.tensor(segment.rows), segment) for segment in sharing.segments
    ]
    own_B11W = mask_B11W & (torch.arange(mask_B11W.shape[-1]) >= torch.tensor(sharing.private)[:, None, None, None])
    runs = []
    for run in sharing.runs:
        run = PrivateRun(run.first, run.last, run.start, run.stop + sharing.grown)
        own = own_B11W[run.first : run.last, :, :, run.start : run.stop]
        runs.append((run, torch.zeros(own.shape).masked_fill_(~own, -math.inf)))
    return SlotMask(mask_B11W, shared=SharedMask(segments, runs))


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: SharedMask, scale: float | None
) -> torch.Tensor:
    """Return the attention output (B, H, 1, D) of query (B, H, 1, D), key and value (B, K, W, D), float32 on a CPU."""
    rows, heads, _, dim = query.shape
    scale = dim**-0.5 if scale is None else scale
    query = query.reshape(rows, key.shape[1], heads // key.shape[1], dim)
    out, sums = _shared(query, key, value, mask, scale)
    for run, bias in mask.runs:
        _add_private(query, key, value, (out, sums), run, bias, scale)
    return out.view(rows, heads, 1, dim)


def _shared(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: SharedMask, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output (B, K, G, D) over the shared tokens and its log-sum-exp (B, K, G, 1)."""
    out = query.new_zeros(query.shape)
    sums = query.new_full((*query.shape[:-1], 1), -math.inf)
    for index, segment in mask.segments:
        part = query if index is None else query[index]
        own, own_sums = _segment(part, key, value, segment, scale)
        if index is None and segment.start == 0:
            out, sums = own, own_sums
            continue
        index = torch.arange(len(query)) if index is None else index
        totals = torch.logaddexp(sums[index], own_sums)
        out[index] = torch.lerp(out[index], own, (own_sums - totals).exp().expand_as(own))
        sums[index] = totals
    return out, sums


def _segment(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segment: Segment, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output (B, K, G, D) over a segment and its log-sum-exp (B, K, G, 1): the rows' queries are one
    matrix for each key-value head."""
    rows, shared, groups, dim = query.shape
    queries = query.transpose(0, 1).reshape(1, shared, rows * groups, dim)
    source = slice(segment.rows[0], segment.rows[0] + 1)
    tokens = slice(segment.start, segment.stop)
    out, sums = _flash(queries, key[source, :, tokens], value[source, :, tokens], 0.0, False, scale=scale)
    return (
        out.view(shared, rows, groups, dim).transpose(0, 1).contiguous(),
        sums.view(shared, rows, groups, 1).transpose(0, 1).contiguous(),
    )


def _add_private(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    shared: tuple[torch.Tensor, torch.Tensor],
    run: PrivateRun,
    bias: torch.Tensor,
    scale: float,
) -> None:
    """Add the private tokens of a run to the output over the shared ones, in place."""
    rows, tokens = slice(run.first, run.last), slice(run.start, run.stop)
    out, sums = (part[rows].flatten(0, 1) for part in shared)  # (rows · K, G, D or 1): views
    key, value = (part[rows, :, tokens].flatten(0, 1) for part in (key, value))  # (rows · K, tokens, D): views
    query = query[rows].flatten(0, 1)
    bias = bias.expand(-1, len(query) // len(bias), -1, -1).flatten(0, 1).expand(-1, query.shape[1], -1)
    scores = torch.baddbmm(bias, query, key.transpose(1, 2), alpha=scale)
    weights = torch.cat([sums, scores], -1).softmax(-1)
    out.mul_(weights[..., :1]).baddbmm_(weights[..., 1:], value)
