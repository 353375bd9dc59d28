"""Packing of token sequences as a prefix trie: every distinct token is computed once.

The episodes of a group share their prompt and, as far as they agree, their answers and observations. Laid out one
after another, each would compute them again. In a pack, a token is a node of a trie; sequences that begin alike share
nodes, at every depth. Attention lets a node see its ancestors, and positions count depth, so each node computes what
it would have computed in its own sequence.

Models for which mask and positions do not say all compute a row for each sequence, filled up to the longest (`layout`):
their packs are bounded by such rows, and hold sequences of about the same length.

Nodes are laid out depth first, as they come when the sequences are sorted: what lies below a node comes right after
it, up to its end. So one number for each node says all: j sees i where i <= j < end(i).

Legend: N nodes of a pack, U nodes from which a sampled token is predicted, S sampled tokens.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import numpy as np
import torch


@dataclass(frozen=True)
class Sequence_:
    """One token stream to learn from."""

    token_ids: Sequence[int]
    """(T,)"""
    targets: Sequence[int]
    """Indices in [1, T) of the sampled tokens."""
    logprobs: Sequence[float] = ()
    """Log-probability of each target when it was sampled; NaN where unknown."""
    advantages: Sequence[float] = ()
    """Of each target; empty means 0."""
    weight: float = 1.0
    """Weight of each of its tokens in the loss."""
    old: Sequence[float] = ()
    """Log-probability of each target under the policy before the first gradient step; empty where not measured."""
    first: int = 0
    """Number of the first target, for those who keep columns of their own: the targets count on from it."""
    episode_tokens: int = 0
    """Sampled tokens of the whole episode, over all of its histories; 0 means those of this sequence."""


@dataclass
class Pack:
    """Sequences in one forward pass."""

    token_ids_N: torch.Tensor
    positions_N: torch.Tensor
    ends_N: torch.Tensor
    """One past the last node below each node; below a leaf there is none."""
    predicting_U: torch.Tensor
    """Nodes whose logits are needed."""
    row_S: torch.Tensor
    """For each sampled token, the index in `predicting_U` of the node that predicts it."""
    token_S: torch.Tensor
    logprob_S: torch.Tensor
    advantage_S: torch.Tensor
    weight_S: torch.Tensor
    old_S: torch.Tensor
    number_S: torch.Tensor
    """Number of the sampled token, from `Sequence_.first` on."""
    sequence_S: torch.Tensor
    """Which sequence of the pack the token belongs to."""
    episode_tokens_S: torch.Tensor
    """Sampled tokens of the episode that the token belongs to."""
    members: list[int]
    """Which of the given sequences are in the pack, in their order."""
    lengths: list[int]
    """Tokens of each of them, as they would count without sharing."""
    computed: int
    """Tokens that a model computes: the nodes, or in padded rows all their places."""

    def to(self, device: torch.device | str) -> Pack:
        """The same with its tensors on a device."""
        moved = {
            one.name: value.to(device)
            for one in fields(self)
            if isinstance(value := getattr(self, one.name), torch.Tensor)
        }
        return replace(self, **moved)


def pack(sequences: Sequence[Sequence_], most_tokens: int, *, padded: bool = False) -> list[Pack]:
    """Distributes sequences over packs of which each computes at most `most_tokens` (a single longer sequence has a
    pack of its own): those that share most together, or where they are computed as padded rows, those of about the
    same length. Sequences without targets are in none. Tokens after the last target are cut off: nothing depends on
    them."""
    learned = [index for index, sequence in enumerate(sequences) if len(sequence.targets)]
    assert all(min(sequences[index].targets) > 0 for index in learned), "nothing comes before the first token"
    # The last target is predicted, not read.
    read = {index: list(sequences[index].token_ids[: max(sequences[index].targets)]) for index in learned}
    order = sorted(learned, key=lambda index: (read[index], index))
    shared = [0, *(_shared(read[one], read[other]) for one, other in pairwise(order))]
    lengths = [len(read[index]) for index in order]
    if padded:
        bins = _fill_rows(lengths, shared, most_tokens)
    else:
        bins = _fill(_subtrees(lengths, shared, most_tokens), shared, most_tokens)
    packs = []
    for ranges in bins:
        together = [order[place] for first, last, _ in sorted(ranges) for place in range(first, last)]
        packs.append(_lay_out(sequences, read, together, padded))
    return sorted(packs, key=lambda one: one.members[0])


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences have in common at their start."""
    length = min(len(one), len(other))
    different_L = np.not_equal(one[:length], other[:length])
    return int(different_L.argmax()) if different_L.any() else length


Range = tuple[int, int, int]
"""Sorted sequences from the first to before the last, and the nodes of their trie."""


def _subtrees(lengths: Sequence[int], shared: Sequence[int], most_tokens: int) -> list[Range]:
    """The largest parts of the trie that fit into a pack. shared: of each sorted sequence with the one before."""
    found, rest = [], [(0, len(lengths))] if lengths else []
    while rest:
        first, last = rest.pop()
        nodes = lengths[first] + sum(lengths[place] - shared[place] for place in range(first + 1, last))
        if nodes <= most_tokens or last == first + 1:
            found.append((first, last, nodes))
            continue
        trunk = min(shared[first + 1 : last])
        cuts = [first, *(place for place in range(first + 1, last) if shared[place] == trunk), last]
        rest += pairwise(cuts)
    return found


def _fill(parts: list[Range], shared: Sequence[int], most_tokens: int) -> list[list[Range]]:
    """Bin packing: the largest part first, each to where it adds fewest nodes (best fit, decreasing)."""
    least = _Least(shared)
    bins: list[list[Range]] = []  # each in the order of the sequences: a part shares most with a neighbour
    sizes: list[int] = []
    for part in sorted(parts, key=lambda one: (-one[2], one[0])):
        best: tuple[int, int, int] | None = None
        for index, held in enumerate(bins):
            at = bisect(held, part)
            shares = [least.between(*sorted((part, other))) for other in held[max(at - 1, 0) : at + 1]]
            added = part[2] - max(shares)
            if sizes[index] + added <= most_tokens:
                best = min(best or (added, most_tokens, index), (added, most_tokens - sizes[index], index))
        if best is None:
            bins.append([part])
            sizes.append(part[2])
        else:
            insort(bins[best[2]], part)
            sizes[best[2]] += best[0]
    return bins


def _fill_rows(lengths: Sequence[int], shared: Sequence[int], most_tokens: int) -> list[list[Range]]:
    """Rows padded to the longest of a pack, the longest ones first. A row is a sequence and those before it that are
    nothing but its beginning."""
    ends = [
        place for place in range(1, len(lengths) + 1) if place == len(lengths) or shared[place] < lengths[place - 1]
    ]
    rows = [(first, last, lengths[last - 1]) for first, last in pairwise([0, *ends])]
    bins: list[list[Range]] = []
    for row in sorted(rows, key=lambda one: (-one[2], one[0])):
        if bins and (len(bins[-1]) + 1) * bins[-1][0][2] <= most_tokens:
            bins[-1].append(row)
        else:
            bins.append([row])
    return bins


class _Least:
    """The least of any stretch of numbers, at once (sparse table)."""

    def __init__(self, numbers: Sequence[int]):
        self._of = [np.asarray(numbers)]  # [k][i]: of the 2^k numbers from i on
        while len(self._of[-1]) > (half := 2 ** (len(self._of) - 1)):
            self._of.append(np.minimum(self._of[-1][:-half], self._of[-1][half:]))

    def between(self, one: Range, other: Range) -> int:
        """Nodes that a part of the trie has in common with a later one: the least of what neighbours from the end of
        the one to the start of the other share."""
        start, stop = one[1], other[0] + 1
        k = (stop - start).bit_length() - 1
        return int(min(self._of[k][start], self._of[k][stop - 2**k]))


def _lay_out(sequences: Sequence[Sequence_], read: dict[int, list[int]], ordered: Sequence[int], padded: bool) -> Pack:
    """The pack of some sequences. read: their tokens; ordered: their indices, sorted by these."""
    tokens: list[int] = []
    depths: list[int] = []
    ends: list[int] = []
    paths: dict[int, list[int]] = {}
    path: list[int] = []
    before: list[int] = []
    for index in ordered:
        common = _shared(before, read[index])
        for node in path[common:]:
            ends[node] = len(tokens)
        new = range(len(tokens), len(tokens) + len(read[index]) - common)
        tokens += read[index][common:]
        depths += range(common, len(read[index]))
        ends += [0] * len(new)
        path, before = [*path[:common], *new], read[index]
        paths[index] = path
    for node in path:
        ends[node] = len(tokens)
    leaves = sum(end == node + 1 for node, end in enumerate(ends))
    computed = leaves * (max(depths) + 1) if padded else len(tokens)
    return _with_targets(sequences, paths, tokens, depths, ends, computed)


def _with_targets(
    sequences: Sequence[Sequence_],
    paths: dict[int, list[int]],
    tokens: list[int],
    depths: list[int],
    ends: list[int],
    computed: int,
) -> Pack:
    members = sorted(paths)
    nodes: list[int] = []
    targets: list[int] = []
    owners: list[int] = []
    numbers: list[int] = []
    episode_tokens: list[int] = []
    columns: dict[str, list[float]] = {name: [] for name in ("logprobs", "advantages", "weight", "old")}
    for place, index in enumerate(members):
        sequence = sequences[index]
        count = len(sequence.targets)
        nodes += [paths[index][target - 1] for target in sequence.targets]
        targets += [sequence.token_ids[target] for target in sequence.targets]
        owners += [place] * count
        episode_tokens += [sequence.episode_tokens or count] * count
        numbers += range(sequence.first, sequence.first + count)
        unknown = [float("nan")] * count
        columns["logprobs"] += sequence.logprobs or unknown
        columns["advantages"] += sequence.advantages or [0.0] * count
        columns["weight"] += [sequence.weight] * count
        columns["old"] += sequence.old or unknown
    assert all(len(column) == len(targets) for column in columns.values()), "one value for each target"
    predicting, rows = torch.unique(torch.tensor(nodes), return_inverse=True)
    logprob_S, advantage_S, weight_S, old_S = (torch.tensor(column, dtype=torch.float32) for column in columns.values())
    return Pack(
        torch.tensor(tokens),
        torch.tensor(depths),
        torch.tensor(ends),
        predicting,
        rows,
        torch.tensor(targets),
        logprob_S,
        advantage_S,
        weight_S,
        old_S,
        torch.tensor(numbers),
        torch.tensor(owners),
        torch.tensor(episode_tokens, dtype=torch.float32),
        members,
        [len(sequences[index].token_ids) for index in members],
        computed,
    )
