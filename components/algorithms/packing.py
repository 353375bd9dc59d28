"""Packing of token sequences as a prefix trie: every distinct token is computed once.

The episodes of a group share their prompt and, as far as they agree, their answers and observations. Laid out one
after another, each would compute them again. In a pack, a token is a node of a trie; sequences that begin alike share
nodes, at every depth. Attention lets a node see its ancestors, and positions count depth, so each node computes what
it would have computed in its own sequence.

Legend: N nodes of a pack, U nodes from which a sampled token is predicted, S sampled tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise

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


@dataclass
class Pack:
    """Sequences in one forward pass."""

    token_ids_N: torch.Tensor
    positions_N: torch.Tensor
    mask_NN: torch.Tensor
    """True where the row's node may see the column's node."""
    predicting_U: torch.Tensor
    """Nodes whose logits are needed."""
    row_S: torch.Tensor
    """For each sampled token, the index in `predicting_U` of the node that predicts it."""
    token_S: torch.Tensor
    logprob_S: torch.Tensor
    advantage_S: torch.Tensor
    weight_S: torch.Tensor
    old_S: torch.Tensor
    sequence_S: torch.Tensor
    """Which sequence of the pack the token belongs to."""
    lengths: list[int] = field(default_factory=list)
    """Tokens of each sequence, as they would count without sharing."""

    def to(self, device: torch.device | str) -> Pack:
        """The same with its tensors on a device."""
        moved = {
            one.name: value.to(device)
            for one in fields(self)
            if isinstance(value := getattr(self, one.name), torch.Tensor)
        }
        return replace(self, **moved)


class _Trie:
    """Nodes in order of insertion; a parent always comes before its children."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.children: dict[tuple[int, int], int] = {}

    def insert(self, token_ids: Sequence[int]) -> list[int]:
        """The nodes of a sequence; those that it shares are found, the rest made."""
        node, depth, path = -1, 0, []
        for token in token_ids:
            child = self.children.get((node, token))
            if child is None:
                child = len(self.tokens)
                self.children[(node, token)] = child
                self.tokens.append(token)
                self.parents.append(node)
                self.depths.append(depth)
            path.append(child)
            node, depth = child, depth + 1
        return path

    def growth(self, token_ids: Sequence[int]) -> int:
        """How many nodes `insert` would add."""
        node = -1
        for shared, token in enumerate(token_ids):
            child = self.children.get((node, token))
            if child is None:
                return len(token_ids) - shared
            node = child
        return 0


def pack(sequences: Sequence[Sequence_], most_tokens: int) -> list[Pack]:
    """Distributes sequences, in their order, over packs of at most `most_tokens` nodes each (a single longer sequence
    has a pack of its own). Tokens after the last target are cut off: nothing depends on them."""
    packs: list[Pack] = []
    trie = _Trie()
    held: list[tuple[Sequence_, list[int]]] = []
    for sequence in sequences:
        if not len(sequence.targets):
            continue
        assert min(sequence.targets) > 0, "nothing comes before the first token to predict it from"
        used = list(sequence.token_ids[: max(sequence.targets)])  # the last target is predicted, not read
        if held and len(trie.tokens) + trie.growth(used) > most_tokens:
            packs.append(_finish(trie, held))
            trie, held = _Trie(), []
        held.append((sequence, trie.insert(used)))
    if held:
        packs.append(_finish(trie, held))
    return packs


def _finish(trie: _Trie, held: list[tuple[Sequence_, list[int]]]) -> Pack:
    nodes, tokens, owners = [], [], []
    columns: dict[str, list[float]] = {name: [] for name in ("logprobs", "advantages", "weight", "old")}
    for index, (sequence, path) in enumerate(held):
        count = len(sequence.targets)
        nodes += [path[target - 1] for target in sequence.targets]
        tokens += [sequence.token_ids[target] for target in sequence.targets]
        owners += [index] * count
        unknown = [float("nan")] * count
        columns["logprobs"] += sequence.logprobs or unknown
        columns["advantages"] += sequence.advantages or [0.0] * count
        columns["weight"] += [sequence.weight] * count
        columns["old"] += sequence.old or unknown
    assert all(len(column) == len(tokens) for column in columns.values()), "one value for each target"
    predicting, rows = torch.unique(torch.tensor(nodes), return_inverse=True)
    logprob_S, advantage_S, weight_S, old_S = (torch.tensor(column, dtype=torch.float32) for column in columns.values())
    return Pack(
        torch.tensor(trie.tokens),
        torch.tensor(trie.depths),
        _ancestors(trie.parents),
        predicting,
        rows,
        torch.tensor(tokens),
        logprob_S,
        advantage_S,
        weight_S,
        old_S,
        torch.tensor(owners),
        [len(sequence.token_ids) for sequence, _ in held],
    )


def _ancestors(parents: Sequence[int]) -> torch.Tensor:
    """(N, N) True where the column's node is the row's node or one of its ancestors. Filled run by run: in a run, each
    node is the child of the one before."""
    mask_NN = torch.ones(len(parents), len(parents), dtype=torch.bool).tril_()
    starts = [node for node, parent in enumerate(parents) if node == 0 or parent != node - 1]
    for start, end in pairwise([*starts, len(parents)]):
        above = parents[start] + 1
        mask_NN[start:end, :start] = False
        if above:
            mask_NN[start:end, :above] = mask_NN[above - 1, :above]
    return mask_NN
