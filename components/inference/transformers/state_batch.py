"""The sequences that the embedded engine computes together, for models with a state (`row_caches`).

Prompts are computed one by one. A sequence starts from a slot only if the slot's tokens are all at the start of its
prompt: a state cannot be taken back. Latent attention has no state, so it starts from any shared prefix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from components.inference.transformers.batch import Batch, Row, missing
from components.inference.transformers.row_caches import RowCaches
from components.models.shared_attention import Sharing


class StateBatch(Batch):
    """Active sequences of a model with a state. continues: result of `row_caches.check`."""

    def __init__(self, model: Any, *, continues: bool, **arguments: Any):
        self._continues = continues
        super().__init__(model, **arguments)
        self.shared_tokens = math.inf

    def _new_cache(self) -> RowCaches:
        return RowCaches(self.model, self.slots, continues=self._continues)

    def _longest_prefix(self, prompt: list[int]) -> tuple[int, int]:
        if self.cache.sliceable:
            return super()._longest_prefix(prompt)
        whole = [
            (len(held), -slot)
            for slot, held in enumerate(self._held)
            if len(held) < len(prompt) and prompt[: len(held)] == held
        ]
        length, slot = max(whole, default=(0, 0))
        return -slot, length

    def _parts(self, rows: list[Row]) -> Iterator[list[Row]]:
        yield from ([row] for row in rows if missing(row) > 0)

    def _compute(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        rows: slice | torch.Tensor,
        logits: int | None,
        sharing: Sharing | None,
    ) -> torch.Tensor:
        slots = range(rows.start, rows.stop) if isinstance(rows, slice) else rows.tolist()
        result: torch.Tensor = self.cache.compute(tokens, slots, logits)
        return result
