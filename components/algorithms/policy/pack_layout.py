"""Layouts of a pack as model inputs: as a trie, or as padded rows for models that depend on more than mask and
positions (`exactness`). Both read the same outputs: those of the node that predicts each sampled token.

Legend: N nodes of a pack, U nodes that are read, B rows, T positions in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from components.algorithms.policy.packing import Pack
from components.models import trie_attention


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


def trie(pack: Pack) -> Layout:
    """Return a layout with one row that contains each node once."""
    inputs = {
        "input_ids": pack.token_ids_N[None],
        "position_ids": pack.positions_N[None],
        "attention_mask": trie_attention.mask(pack.ends_N),
        "use_cache": False,
    }
    return Layout(inputs, torch.zeros_like(pack.predicting_U), pack.predicting_U)


def padded(pack: Pack) -> Layout:
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
