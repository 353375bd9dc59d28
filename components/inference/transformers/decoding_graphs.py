"""Decoding passes of the embedded engine as CUDA graphs.

A graph computes a number of rows at the front of the slots, and reads a number of tokens of each slot. Both are rounded
up to a few sizes, and the graph of a size is recorded at its first pass. Rows behind the active ones are computed
along: they write to the last position of their slot, which no sequence reads (`kv_slots`). Log-probabilities are those
of a pass without graphs, except that kernels of other sizes round differently.

Legend: R rows of a graph, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from components.inference.transformers.kv_slots import KVSlots
from components.models.cuda_graphs import GraphRecorder, padded_size

log = logging.getLogger(__name__)

ROWS, WIDTH = (8, 1), (256, 2)
"""Smallest number of rows, and of tokens that are read of each slot, with the number of sizes from each power of two to
the next."""


class DecodingGraphs:
    """Graphs of a model over the slots of a cache, by number of rows and of tokens that are read."""

    def __init__(self, model: Any, cache: KVSlots, recorder: GraphRecorder):
        self._model, self._cache, self._recorder = model, cache, recorder
        _, _, self._slots, _, self._capacity, _ = cache.kv.shape
        device = cache.kv.device
        self._tokens_R1 = torch.zeros(self._slots, 1, dtype=torch.long, device=device)
        self._positions_R1 = torch.zeros_like(self._tokens_R1)
        self._logits_R1V: torch.Tensor | None = None
        self._replays: dict[tuple[int, int], Callable[[], None]] = {}
        self._usable = True

    def logits(self, tokens_B1: torch.Tensor, positions_B1: torch.Tensor) -> torch.Tensor | None:
        """Return the (B, 1, V) logits after one token of each of the first B slots, at its position; both are on the
        host. They are valid until the next pass. None if the pass cannot be recorded."""
        count = len(tokens_B1)
        rows = min(padded_size(count, *ROWS), self._slots)
        width = min(padded_size(int(positions_B1.max()) + 1, *WIDTH), self._capacity)
        values = (self._tokens_R1, tokens_B1, 0), (self._positions_R1, positions_B1, self._capacity - 1)
        for static_R1, values_B1, padding in values:
            static_R1[:rows].copy_(functional.pad(values_B1, (0, 0, 0, rows - count), value=padding))
        if self._usable and (rows, width) not in self._replays:
            self._record(rows, width)
        if not self._usable:
            return None
        self._replays[rows, width]()
        assert self._logits_R1V is not None
        return self._logits_R1V[:count]

    def _record(self, rows: int, width: int) -> None:
        def compute() -> None:
            positions_R1 = self._positions_R1[:rows]
            mask = self._cache.aim(slice(0, rows), positions_R1, width=width)
            logits_R1V = self._model(
                input_ids=self._tokens_R1[:rows],
                position_ids=positions_R1,
                attention_mask=mask,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits
            if self._logits_R1V is None:
                self._logits_R1V = logits_R1V.new_empty(self._slots, *logits_R1V.shape[1:])
            self._logits_R1V[:rows] = logits_R1V

        try:
            self._recorder.warm_up(compute)  # writes the keys and values that the pass writes
            _, self._replays[rows, width] = self._recorder.record(compute)
        except RuntimeError as error:
            self._usable = False
            self._replays.clear()
            log.warning("model.cuda_graphs: decoding goes on without graphs, which cannot be recorded: %s", error)
