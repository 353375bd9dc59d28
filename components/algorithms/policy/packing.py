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

Legend: N nodes of a pack, U nodes from which a sampled token is predicted, S sampled tokens, P distinct pairs of such a
node and the token that follows it; B rows and T positions of padded rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Generic, TypeVar, overload

import numpy as np
import torch
from torch.nn import functional

from components.algorithms.policy.pack_bins import fill, fill_rows, subtrees
from components.errors import ArtifactError
from components.models import trie_attention

Place = TypeVar("Place")


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
    labels: Sequence[int] = ()
    """Token whose log-probability is computed at each target; empty means the token of the sequence. With labels,
    targets may repeat, and the place after the last token is one."""


class ReadSequences(Sequence[TokenSequence], Generic[Place]):
    """Sequences that are read when they are asked for, each from its place."""

    def __init__(self, places: Sequence[Place], read: Callable[[Place], TokenSequence]):
        self._places = places
        self._read = read

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> TokenSequence: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenSequence]: ...
    def __getitem__(self, index: int | slice) -> TokenSequence | list[TokenSequence]:
        if isinstance(index, int):
            return self._read(self._places[index])
        return list(map(self._read, self._places[index]))


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
    row_P: torch.Tensor
    """Index in `predicting_U`, in ascending order, of each distinct pair: sequences that share a node and sample the
    same token from it share a pair."""
    token_P: torch.Tensor
    pair_S: torch.Tensor
    """Index of the pair of each sampled token."""
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
    tokens: int
    """Number of tokens without prefix sharing."""
    computed: int
    """Number of tokens that a model computes: the nodes, or all positions of padded rows."""
    pairs_before: list[int]
    """Number of pairs of earlier nodes, for each of `predicting_U`, and of all: on the host, where loops over parts of
    the nodes need it without waiting for the device."""
    role: str = ""
    """Role of all sequences; empty if they have different ones."""

    @property
    def sampled(self) -> int:
        """Number of sampled tokens."""
        return len(self.token_S)

    def to(self, device: torch.device | str) -> Pack:
        """Return the pack with its tensors on a device. Copies to a GPU start from pinned memory, so that the host does
        not wait for them."""
        tensors = {
            field.name: value for field in fields(self) if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        if torch.device(device).type == "cuda" and not self.token_ids_N.is_cuda:
            tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        return replace(self, **{name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()})


@dataclass(frozen=True)
class PackPlan:
    """Sequences of a pack that is not laid out yet, and its size. All processes plan all packs of a step, and lay out
    only those that they compute."""

    sequences: Sequence[TokenSequence]
    """All sequences that were planned."""
    ordered: list[int]
    """Indices of the pack's own, sorted by their input tokens."""
    sampled: int
    """Number of sampled tokens."""
    tokens: int
    """Number of tokens without prefix sharing."""
    computed: int
    """Number of tokens that a model computes."""

    def lay_out(self) -> Pack:
        """Return the pack. Reads its sequences."""
        members = {index: self.sequences[index] for index in self.ordered}
        prefixes = {index: _prefix(sequence) for index, sequence in members.items()}
        return _lay_out(members, prefixes, self.ordered, self.computed)


def pack(
    sequences: Sequence[TokenSequence], most_tokens: int, *, padded: bool = False, by_role: bool = False
) -> list[Pack]:
    """Return the packs that `plan` distributes sequences over."""
    return [planned.lay_out() for planned in plan(sequences, most_tokens, padded=padded, by_role=by_role)]


def plan(
    sequences: Sequence[TokenSequence], most_tokens: int, *, padded: bool = False, by_role: bool = False
) -> list[PackPlan]:
    """Distribute sequences over packs that compute at most `most_tokens` tokens each (a longer sequence gets its own
    pack). A pack combines the sequences that share the longest prefixes or, as padded rows, those of similar length;
    with `by_role`, only sequences of one role. Sequences without targets are dropped. Tokens after the last target are
    cut off, because nothing depends on them. Each sequence is read once; 4 bytes per token are in memory meanwhile."""
    roles: dict[str, list[int]] = defaultdict(list)
    keys: dict[int, bytes] = {}  # input tokens, sorted like them
    sizes: dict[int, tuple[int, int]] = {}  # sampled tokens, tokens
    for index, sequence in enumerate(sequences):
        if len(sequence.targets):
            roles[sequence.role if by_role else ""].append(index)
            keys[index] = _prefix(sequence).astype(_KEY).tobytes()
            sizes[index] = len(sequence.targets), len(sequence.token_ids)
    plans: list[PackPlan] = []
    for together in roles.values():
        order = sorted(together, key=lambda index: (keys[index], index))
        prefixes = (np.frombuffer(keys[index], _KEY) for index in order)
        shared = [0, *(shared_length(prefix, following) for prefix, following in pairwise(prefixes))]
        lengths = [len(keys[index]) // _KEY.itemsize for index in order]
        if padded:
            bins = fill_rows(lengths, shared, most_tokens)
        else:
            bins = fill(subtrees(lengths, shared, most_tokens), shared, most_tokens)
        for computed, ranges in bins:
            members = [order[place] for first, last, _ in sorted(ranges) for place in range(first, last)]
            sampled, tokens = (sum(column) for column in zip(*(sizes[index] for index in members), strict=True))
            plans.append(PackPlan(sequences, members, sampled, tokens, computed))
    return sorted(plans, key=lambda planned: min(planned.ordered))


_KEY = np.dtype(">u4")
"""Type of the tokens of a key: keys of bytes sort like their tokens."""


def _prefix(sequence: TokenSequence) -> np.ndarray:
    """Return the input tokens: those before the last target, which is predicted and is no input."""
    if min(sequence.targets) == 0:
        raise ArtifactError(
            "an episode begins with a sampled token, which no prompt precedes, so it has no probability to train; "
            "expected token_ids that begin with the prompt"
        )
    return np.asarray(sequence.token_ids[: max(sequence.targets)], dtype=np.int64)


def shared_length(first: Sequence[int] | np.ndarray, second: Sequence[int] | np.ndarray) -> int:
    """Return the length of the common prefix of two sequences."""
    length = min(len(first), len(second))
    different_L = np.not_equal(first[:length], second[:length])
    return int(different_L.argmax()) if different_L.any() else length


def _lay_out(
    sequences: Mapping[int, TokenSequence], read: Mapping[int, np.ndarray], ordered: Sequence[int], computed: int
) -> Pack:
    """Return the pack of some sequences. read: their input tokens. ordered: their indices, sorted by these tokens."""
    tokens: list[np.ndarray] = []
    depths: list[np.ndarray] = []
    paths: dict[int, np.ndarray] = {}
    path = previous = np.empty(0, dtype=np.int64)
    ends_N = np.empty(sum(len(read[index]) for index in ordered), dtype=np.int64)
    count = 0
    for index in ordered:
        common, length = shared_length(previous, read[index]), len(read[index])
        ends_N[path[common:]] = count
        path = np.concatenate([path[:common], np.arange(count, count + length - common)])
        tokens.append(read[index][common:])
        depths.append(np.arange(common, length))
        count += length - common
        paths[index], previous = path, read[index]
    ends_N[path] = count
    ends_N = ends_N[:count]
    nodes_of = {index: paths[index][np.asarray(sequences[index].targets) - 1] for index in sorted(paths)}
    nodes = torch.from_numpy(np.concatenate(tokens)), torch.from_numpy(np.concatenate(depths)), torch.from_numpy(ends_N)
    return _with_targets(sequences, nodes_of, nodes, computed)


def _with_targets(
    sequences: Mapping[int, TokenSequence],
    nodes_of: dict[int, np.ndarray],
    nodes: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    computed: int,
) -> Pack:
    """Return the pack of nodes (token ids, depths, ends) with the targets of its sequences. nodes_of: nodes that
    predict the targets of each sequence, by index in ascending order."""
    members = [sequences[index] for index in nodes_of]
    count_Q = np.array([len(sequence.targets) for sequence in members])
    tokens = [
        np.asarray(sequence.labels, np.int64)
        if sequence.labels
        else np.asarray(sequence.token_ids, np.int64)[np.asarray(sequence.targets)]
        for sequence in members
    ]
    numbers = [np.arange(sequence.first, sequence.first + len(sequence.targets)) for sequence in members]
    columns = [
        np.array([value for sequence in members for value in _column(sequence, name)], dtype=np.float32)
        for name in ("logprobs", "advantages", "old")
    ]
    assert all(len(column) == count_Q.sum() for column in columns), "one value for each target"
    weight_S, episode_tokens_S = (
        np.array(values, dtype=np.float32).repeat(count_Q)
        for values in (
            [sequence.weight for sequence in members],
            [sequence.episode_tokens or len(sequence.targets) for sequence in members],
        )
    )
    predicting_U, row_S = np.unique(np.concatenate(list(nodes_of.values())), return_inverse=True)
    token_S = np.concatenate(tokens)
    key_P, pair_S = np.unique(row_S << 32 | token_S, return_inverse=True)  # a token id takes 32 bits
    roles = {sequence.role for sequence in members}
    logprob_S, advantage_S, old_S = columns
    arrays = {
        "predicting_U": predicting_U,
        "row_S": row_S,
        "token_S": token_S,
        "row_P": key_P >> 32,
        "token_P": key_P & 0xFFFFFFFF,
        "pair_S": pair_S,
        "logprob_S": logprob_S,
        "advantage_S": advantage_S,
        "weight_S": weight_S,
        "old_S": old_S,
        "number_S": np.concatenate(numbers),
        "sequence_S": np.arange(len(members)).repeat(count_Q),
        "episode_tokens_S": episode_tokens_S,
    }
    tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return Pack(
        *nodes,
        **tensors,
        members=list(nodes_of),
        tokens=sum(len(sequence.token_ids) for sequence in members),
        computed=computed,
        pairs_before=np.searchsorted(key_P >> 32, np.arange(len(predicting_U) + 1)).tolist(),
        role=roles.pop() if len(roles) == 1 else "",
    )


def _column(sequence: TokenSequence, name: str) -> Sequence[float]:
    """Return the values of a column for each target: NaN, or 0 for advantages, if it has none."""
    values: Sequence[float] = getattr(sequence, name)
    return values or [0.0 if name == "advantages" else float("nan")] * len(sequence.targets)


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
    inputs = trie_inputs(pack.token_ids_N, pack.positions_N, pack.ends_N)
    return Layout(inputs, torch.zeros_like(pack.predicting_U), pack.predicting_U)


def trie_inputs(token_ids_N: torch.Tensor, positions_N: torch.Tensor, ends_N: torch.Tensor) -> dict[str, Any]:
    """Return the arguments of a model's forward pass on the nodes of a trie."""
    return {
        "input_ids": token_ids_N[None],
        "position_ids": positions_N[None],
        "attention_mask": trie_attention.trie_paths(ends_N, positions_N),
        "use_cache": False,
    }


def padded_nodes(pack: Pack, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return token ids, positions and ends of `size` nodes: those of the pack, and roots without descendants."""
    count = len(pack.token_ids_N)
    token_ids_N, positions_N = (functional.pad(x_N, (0, size - count)) for x_N in (pack.token_ids_N, pack.positions_N))
    ends_N = torch.arange(1, size + 1, device=pack.ends_N.device)
    ends_N[:count] = pack.ends_N
    return token_ids_N, positions_N, ends_N


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
