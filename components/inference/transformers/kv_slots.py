"""The key-value cache of the embedded engine: a table of slots with one sequence each.

A slot contains the keys and values of the first `length` tokens of its sequence, left-aligned. Active slots are at the
front ([0, active)), so a decoding step reads them as one view without gathering. The slots behind them are parked: they
keep their contents for the next turn of an episode, or another episode with the same prompt. Padding needs no
bookkeeping: a query at position p attends to keys up to p only, and entries that padding wrote beyond a sequence's end
are overwritten before they are read. Layers with a sliding window read only the tokens that the window of some row
reaches; the slots keep all tokens, so any prefix of them can be continued.

On a CPU the table is anonymous memory of the operating system, whose pages are allocated on first write, so capacity
for the longest sequence is free until it is used. (A numpy array would use pages of 2 MB.)
"""

from __future__ import annotations

import math
import mmap
from functools import partial
from typing import Any

import torch

from components.models import attention
from components.models.masks import FULL, AttentionRange, Paths, paths
from components.models.shared_attention import Sharing, SlotMask, shared_mask
from components.models.widening import widened

TOLERANCE = 1e-3
"""Largest difference of log-probabilities in float32 with and without a cache, nats."""


class KVSlots:
    """A key-value cache for transformers. Legend: L layers, S slots, H key-value heads, T tokens of capacity, D head
    dimension."""

    def __init__(self, config: Any, slots: int, tokens: int, dtype: torch.dtype, device: str):
        heads, dim = heads_and_dim(config)
        shape = (config.num_hidden_layers, 2, slots, heads, tokens, dim)
        if device == "cpu":
            pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
            self.kv = torch.frombuffer(pages, dtype=dtype).view(shape)
        else:
            self.kv = torch.zeros(shape, dtype=dtype, device=device)
        """(L, 2, S, H, T, D) keys and values."""
        self._rows: slice | torch.Tensor = slice(0, 0)
        self._numbers = torch.empty(0, dtype=torch.long)
        """Numbers of the slots of `_rows`, on the device: indices on the CPU would be copied in each layer."""
        self._positions = torch.empty(0, 0, dtype=torch.long)
        self._width = 0
        self._reads_all = False

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a slot to another."""
        if source != target:
            self.kv[:, :, target, :, :length] = self.kv[:, :, source, :, :length]

    def swap(self, a: int, b: int, length: int) -> None:
        """Swap two slots. length: length of the longer one."""
        if a != b:
            saved = self.kv[:, :, a, :, :length].clone()
            self.copy(b, a, length)
            self.kv[:, :, b, :, :length] = saved

    def clear(self, slot: int) -> None:
        """Zero a slot with values that are not finite: they would propagate even if masked."""
        self.kv[:, :, slot].zero_()

    def aim(
        self,
        rows: slice | torch.Tensor,
        positions: torch.Tensor,
        sharing: Sharing | None = None,
        width: int | None = None,
    ) -> Paths:
        """Set the target of the next forward pass: batch row i writes slot rows[i] at positions[i] (B, Q). Return its
        attention over the tokens that are read. sharing: what the rows share, for one token of each. width: number of
        tokens to read of each slot; None reads as many as the positions need, which waits for the device.

        Positions of padding beyond the capacity are clamped to the last one, which nothing reads before the sequence's
        own token is there.
        """
        positions = positions.clamp(max=self.kv.shape[4] - 1)
        self._rows, self._positions = rows, positions
        if isinstance(rows, slice):
            self._numbers = torch.arange(rows.start, rows.stop, device=positions.device)
        else:
            self._numbers = rows
        self._width = int(positions.max()) + 1 if width is None else width
        self._reads_all = width is not None
        return paths(partial(self._mask, sharing), *positions.shape)

    def _mask(self, sharing: Sharing | None, reach: AttentionRange) -> SlotMask:
        """Return the mask of the layers with a reach: a query attends to the positions from the first one of its reach
        to its own."""
        last_BQ1 = self._positions[..., None]
        if reach == FULL:
            mask_B1QK = (torch.arange(self._width, device=last_BQ1.device) <= last_BQ1)[:, None]
            return SlotMask(mask_B1QK) if sharing is None else shared_mask(mask_B1QK, sharing)
        first_BQ1 = reach.first(last_BQ1)
        start = 0 if self._reads_all else int(first_BQ1.min())
        tokens_K = torch.arange(start, self._width, device=last_BQ1.device)
        return SlotMask(((first_BQ1 <= tokens_K) & (tokens_K <= last_BQ1))[:, None], start)

    # Cache interface of transformers.

    is_compileable = False

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, ...]:
        """Store key and value, each (B, H, Q, D); return all keys and values of the rows, each (B, H, K, D)."""
        stored = []
        for index, new in enumerate((key, value)):
            table = self.kv[layer_idx, index]
            table[self._numbers[:, None], :, self._positions] = new.transpose(1, 2)
            stored.append(table[self._rows, :, : self._width])
        return tuple(stored)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._width, 0


def adopt(model: Any) -> str | None:
    """Set the attention of a model for slots. Return the reason if the model does not compute in slots what it computes
    without a cache, in float32, for a prompt of two sequences and a decoding step; it then keeps its own attention."""
    config, own_attention = model.config.get_text_config(), model.config._attn_implementation
    tokens_BT = torch.randint(min(config.vocab_size, 1000), (2, 8), generator=torch.Generator().manual_seed(0))
    tokens_BT = tokens_BT.to(model.device)
    positions_BT = torch.arange(8, device=model.device).expand(2, 8)
    try:
        with torch.no_grad(), widened(model):
            expected_BTV = model(input_ids=tokens_BT, use_cache=False).logits.log_softmax(-1)
            model.set_attn_implementation(attention.register())
            cache, logits = KVSlots(config, 2, 8, torch.float32, str(model.device)), []
            for part in (slice(0, 7), slice(7, 8)):
                logits.append(
                    model(
                        input_ids=tokens_BT[:, part],
                        position_ids=positions_BT[:, part],
                        attention_mask=cache.aim(slice(0, 2), positions_BT[:, part]),
                        past_key_values=cache,
                        use_cache=True,
                    ).logits
                )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  a model may fail in any way on a cache that is not its own
        problem = f"{type(error).__name__}: {error!s:.200}"
    else:
        difference = (torch.cat(logits, 1).log_softmax(-1) - expected_BTV).abs().max().item()
        if difference <= TOLERANCE:
            return None
        problem = f"log-probabilities are off by {difference:.2g} nats"
    model.set_attn_implementation(own_attention)
    return problem


def heads_and_dim(config: Any) -> tuple[int, int]:
    """Return a model's number of key-value heads, and the head dimension."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return heads, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
