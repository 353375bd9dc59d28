"""Packing of token sequences as a prefix trie: every distinct token is computed once.

The episodes of a group share their prompt and, as far as they agree, their answers and observations. Separate sequences
would compute the shared tokens several times. In a pack, a token is a node of a trie; sequences with a common prefix
share nodes, at every depth. Each node attends to its ancestors and its position is its depth, so each node computes the
same output as in its own sequence.

For models that depend on more than mask and positions, packs are computed as one row per sequence, padded to the
longest (`padded_layout`): their size is counted in padded rows, and they contain sequences of similar length.

Nodes are laid out depth first, in the order of the sorted sequences: the descendants of a node follow it directly, up
to its end. So one number per node defines the attention mask: j attends to i if i <= j < end(i). In layers with sliding
windows or chunks, the depth of i is bounded too.

Legend: N nodes of a pack, U nodes from which a sampled token is predicted, S sampled tokens; B rows and T positions of
padded rows.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from components.errors import ArtifactError
from components.models import trie_attention


@dataclass(frozen=True)
class TokenSequence:
    """One token sequence to train on."""

    token_ids: Sequence[int]
    """Token ids, (T,)."""
    targets: Sequence[int]
    """Indices in [1, T) of the sampled tokens."""
    logprobs: Sequence[float] = ()
    """Log-probability of each target under the policy that sampled it; NaN if unknown."""
    advantages: Sequence[float] = ()
    """Advantage of each target; empty means 0."""
    weight: float = 1.0
    """Weight of each target in the loss."""
    old: Sequence[float] = ()
    """Log-probability of each target under the policy before the first gradient step; empty if not measured."""
    first: int = 0
    """Number of the first target, for callers that keep their own columns; the other targets are numbered
    consecutively."""
    episode_tokens: int = 0
    """Number of sampled tokens of the whole episode, over all of its histories; 0 means those of this sequence."""
    role: str = ""
    """Role of the episode that sampled the targets, which matters to policies with an adapter for each role."""


@dataclass
class Pack:
    """Sequences that one forward pass computes."""

    token_ids_N: torch.Tensor
    positions_N: torch.Tensor
    ends_N: torch.Tensor
    """Index after the last descendant of each node; a leaf has no descendants."""
    predicting_U: torch.Tensor
    """Nodes whose logits are needed."""
    row_S: torch.Tensor
    """Index in `predicting_U` of the node that predicts each sampled token."""
    token_S: torch.Tensor
    logprob_S: torch.Tensor
    advantage_S: torch.Tensor
    weight_S: torch.Tensor
    old_S: torch.Tensor
    number_S: torch.Tensor
    """Number of each sampled token, counted from `TokenSequence.first`."""
    sequence_S: torch.Tensor
    """Index within the pack of the sequence of each sampled token."""
    episode_tokens_S: torch.Tensor
    """Number of sampled tokens of the episode of each sampled token."""
    members: list[int]
    """Indices of the input sequences in the pack, in ascending order."""
    lengths: list[int]
    """Number of tokens of each sequence without prefix sharing."""
    computed: int
    """Number of tokens that a model computes: the nodes, or all positions of padded rows."""
    role: str = ""
    """Role of all sequences; empty if they have different ones."""

    def to(self, device: torch.device | str) -> Pack:
        """Return the pack with its tensors on a device."""
        moved = {
            field.name: value.to(device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return replace(self, **moved)


def pack(
    sequences: Sequence[TokenSequence], most_tokens: int, *, padded: bool = False, by_role: bool = False
) -> list[Pack]:
    """Distribute sequences over packs that compute at most `most_tokens` tokens each (a longer sequence gets its own
    pack). A pack combines the sequences that share the longest prefixes or, as padded rows, those of similar length;
    with `by_role`, only sequences of one role. Sequences without targets are dropped. Tokens after the last target are
    cut off, because nothing depends on them."""
    trained: dict[str, list[int]] = defaultdict(list)
    for index, sequence in enumerate(sequences):
        if len(sequence.targets):
            trained[sequence.role if by_role else ""].append(index)
    packs = [packed for together in trained.values() for packed in _packs(sequences, together, most_tokens, padded)]
    return sorted(packs, key=lambda packed: packed.members[0])


def _packs(
    sequences: Sequence[TokenSequence], trained: Sequence[int], most_tokens: int, padded: bool
) -> Iterator[Pack]:
    """Yield the packs of the sequences with these indices."""
    if any(min(sequences[index].targets) == 0 for index in trained):
        raise ArtifactError(
            "an episode begins with a sampled token, which no prompt precedes, so it has no probability to train; "
            "expected token_ids that begin with the prompt"
        )
    # The last target is predicted and is no input.
    prefixes = {index: list(sequences[index].token_ids[: max(sequences[index].targets)]) for index in trained}
    order = sorted(trained, key=lambda index: (prefixes[index], index))
    shared = [0, *(shared_length(prefixes[index], prefixes[following]) for index, following in pairwise(order))]
    lengths = [len(prefixes[index]) for index in order]
    if padded:
        bins = _fill_rows(lengths, shared, most_tokens)
    else:
        bins = _fill(_subtrees(lengths, shared, most_tokens), shared, most_tokens)
    for ranges in bins:
        together = [order[place] for first, last, _ in sorted(ranges) for place in range(first, last)]
        yield _lay_out(sequences, prefixes, together, padded)


def shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    length = min(len(first), len(second))
    different_L = np.not_equal(first[:length], second[:length])
    return int(different_L.argmax()) if different_L.any() else length


Range = tuple[int, int, int]
"""Range of sorted sequences (first, end), and the number of nodes of their trie."""


def _subtrees(lengths: Sequence[int], shared: Sequence[int], most_tokens: int) -> list[Range]:
    """Return the largest subtrees that fit into a pack. shared: common prefix length of each sorted sequence with the
    previous one."""
    subtrees, pending = [], [(0, len(lengths))] if lengths else []
    while pending:
        first, last = pending.pop()
        nodes = lengths[first] + sum(lengths[place] - shared[place] for place in range(first + 1, last))
        if nodes <= most_tokens or last == first + 1:
            subtrees.append((first, last, nodes))
            continue
        trunk = min(shared[first + 1 : last])
        cuts = [first, *(place for place in range(first + 1, last) if shared[place] == trunk), last]
        pending += pairwise(cuts)
    return subtrees


def _fill(parts: list[Range], shared: Sequence[int], most_tokens: int) -> list[list[Range]]:
    """Assign subtrees to packs by best fit decreasing: the largest first, each to the pack where it adds the fewest
    nodes."""
    prefix_minimum = _RangeMinimum(shared)
    bins: list[list[Range]] = []  # each sorted by sequence, because a part shares the longest prefix with a neighbour
    sizes: list[int] = []
    for part in sorted(parts, key=lambda range_: (-range_[2], range_[0])):
        best: tuple[int, int, int] | None = None
        for index, parts_in_bin in enumerate(bins):
            position = bisect(parts_in_bin, part)
            shares = [
                prefix_minimum.between(*sorted((part, other)))
                for other in parts_in_bin[max(position - 1, 0) : position + 1]
            ]
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
    """Assign rows to packs, longest first; rows are padded to the longest of a pack. A row is a sequence and the
    preceding sequences that are prefixes of it."""
    ends = [
        place for place in range(1, len(lengths) + 1) if place == len(lengths) or shared[place] < lengths[place - 1]
    ]
    rows = [(first, last, lengths[last - 1]) for first, last in pairwise([0, *ends])]
    bins: list[list[Range]] = []
    for row in sorted(rows, key=lambda range_: (-range_[2], range_[0])):
        if bins and (len(bins[-1]) + 1) * bins[-1][0][2] <= most_tokens:
            bins[-1].append(row)
        else:
            bins.append([row])
    return bins


class _RangeMinimum:
    """Minimum over any range of numbers in constant time (sparse table)."""

    def __init__(self, numbers: Sequence[int]):
        self._minima = [np.asarray(numbers)]  # [k][i]: minimum of the 2^k numbers from i on
        while len(self._minima[-1]) > (half := 2 ** (len(self._minima) - 1)):
            self._minima.append(np.minimum(self._minima[-1][:-half], self._minima[-1][half:]))

    def between(self, first: Range, second: Range) -> int:
        """Return the number of nodes that a subtree shares with a later one: the minimum of the prefix lengths that
        neighbours share, from the end of the first to the start of the second."""
        start, stop = first[1], second[0] + 1
        k = (stop - start).bit_length() - 1
        return int(min(self._minima[k][start], self._minima[k][stop - 2**k]))


def _lay_out(
    sequences: Sequence[TokenSequence], read: dict[int, list[int]], ordered: Sequence[int], padded: bool
) -> Pack:
    """Return the pack of some sequences. read: their input tokens. ordered: their indices, sorted by these tokens."""
    tokens: list[int] = []
    depths: list[int] = []
    ends: list[int] = []
    paths: dict[int, list[int]] = {}
    path: list[int] = []
    previous: list[int] = []
    for index in ordered:
        common = shared_length(previous, read[index])
        for node in path[common:]:
            ends[node] = len(tokens)
        new = range(len(tokens), len(tokens) + len(read[index]) - common)
        tokens += read[index][common:]
        depths += range(common, len(read[index]))
        ends += [0] * len(new)
        path, previous = [*path[:common], *new], read[index]
        paths[index] = path
    for node in path:
        ends[node] = len(tokens)
    leaves = sum(end == node + 1 for node, end in enumerate(ends))
    computed = leaves * (max(depths) + 1) if padded else len(tokens)
    return _with_targets(sequences, paths, tokens, depths, ends, computed)


def _with_targets(
    sequences: Sequence[TokenSequence],
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
    roles = {sequences[index].role for index in members}
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
        roles.pop() if len(roles) == 1 else "",
    )


@dataclass(frozen=True)
class Layout:
    """Arguments of a model's forward pass, and the positions of the nodes in its output."""

    inputs: dict[str, Any]
    row_U: torch.Tensor
    place_U: torch.Tensor

    def states(self, output_BTX: torch.Tensor) -> torch.Tensor:
        """Return the (U, X) outputs of the nodes."""
        return output_BTX[self.row_U, self.place_U]


LayoutFunction = Callable[[Pack], Layout]


def trie_layout(pack: Pack) -> Layout:
    """Return a layout with one row that contains each node once."""
    inputs = {
        "input_ids": pack.token_ids_N[None],
        "position_ids": pack.positions_N[None],
        "attention_mask": trie_attention.trie_paths(pack.ends_N, pack.positions_N),
        "use_cache": False,
    }
    return Layout(inputs, torch.zeros_like(pack.predicting_U), pack.predicting_U)


def padded_layout(pack: Pack) -> Layout:
    """Return a layout with one row per leaf: the tokens of its path, padded at the end. Shared nodes are computed in
    each row and read in the first."""
    nodes_N = torch.arange(len(pack.ends_N), device=pack.ends_N.device)
    leaf_B = nodes_N[pack.ends_N == nodes_N + 1]
    rows, nodes = ((nodes_N <= leaf_B[:, None]) & (leaf_B[:, None] < pack.ends_N)).nonzero().unbind(1)
    places = pack.positions_N[nodes]
    token_ids_BT = pack.token_ids_N.new_zeros(len(leaf_B), int(places.max()) + 1)
    token_ids_BT[rows, places] = pack.token_ids_N[nodes]
    mask_BT = torch.zeros_like(token_ids_BT)
    mask_BT[rows, places] = 1
    inputs = {"input_ids": token_ids_BT, "attention_mask": mask_BT, "use_cache": False}
    return Layout(inputs, torch.searchsorted(leaf_B, pack.predicting_U), pack.positions_N[pack.predicting_U])
