"""The key-value cache of the embedded engine: a table of slots, one sequence a slot.

A slot holds the keys and values of the first `length` tokens of its sequence, left-aligned. Slots in use are kept
at the front ([0, active)), so a decoding step reads them as one view without gathering; slots behind them are parked
with what they hold, because the next turn of an episode, or another episode with the same prompt, continues from
there. Padding needs no bookkeeping: a query at position p sees keys 0..p only, and what padding wrote beyond a
sequence's end is overwritten before it can be seen.

On a CPU the table is anonymous pages of the operating system: memory is taken when a token is written, so room for
the longest sequence costs nothing until there is one. (Not an array of numpy, which asks for pages of 2 MB.)
"""

from __future__ import annotations

import math
import mmap
from typing import Any

import torch


class KVSlots:
    """Legend: L layers, S slots, H key-value heads, T tokens of capacity, D head dimension."""

    def __init__(self, config: Any, slots: int, tokens: int, dtype: torch.dtype, device: str):
        heads, dim = heads_and_dim(config)
        shape = (config.num_hidden_layers, 2, slots, heads, tokens, dim)
        if device == "cpu":
            pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
            self.kv = torch.frombuffer(pages, dtype=dtype).view(shape)
        else:
            self.kv = torch.zeros(shape, dtype=dtype, device=device)
        """(L, 2, S, H, T, D)"""
        self._rows: slice | torch.Tensor = slice(0, 0)
        self._positions = torch.empty(0, 0, dtype=torch.long)
        self._width = 0

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` tokens of a slot to another."""
        self.kv[:, :, target, :, :length] = self.kv[:, :, source, :, :length]

    def swap(self, a: int, b: int, length: int) -> None:
        """Exchanges two slots; `length` is the longer of the two."""
        if a != b:
            kept = self.kv[:, :, a, :, :length].clone()
            self.copy(b, a, length)
            self.kv[:, :, b, :, :length] = kept

    def clear(self, slot: int) -> None:
        """Overwrites a slot that holds numbers which are not finite: masked ones would still spread."""
        self.kv[:, :, slot].zero_()

    def aim(self, rows: slice | torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Sets where the next forward pass writes: batch row i goes to slot rows[i] at positions[i] (B, Q).

        Padding may point beyond the capacity; it is written to the last place, where nothing sees it before the
        sequence's own token is there. Returns the boolean attention mask (B, 1, Q, K) over the K tokens that are read.
        """
        positions = positions.clamp(max=self.kv.shape[4] - 1)
        self._rows, self._positions = rows, positions
        self._width = int(positions.max()) + 1
        return (torch.arange(self._width, device=positions.device) <= positions[:, :, None])[:, None]

    # What transformers asks of a cache.

    is_compileable = False

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, ...]:
        """key, value (B, H, Q, D) are stored; returns all keys and values of the rows, (B, H, K, D)."""
        found = []
        for index, new in enumerate((key, value)):
            table = self.kv[layer_idx, index]
            rows = self._rows
            numbers = torch.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
            table[numbers[:, None], :, self._positions] = new.transpose(1, 2)
            found.append(table[rows, :, : self._width])
        return tuple(found)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._width, 0


def heads_and_dim(config: Any) -> tuple[int, int]:
    """Key-value heads of a model, and the dimension of each."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return heads, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
