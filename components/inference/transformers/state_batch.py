"""The sequences that the embedded engine computes together, for models whose caches slots cannot hold (`row_caches`).

Prompts are computed one by one. A sequence starts from a slot only if the slot's tokens are all at the start of its
prompt: a state cannot be taken back. Latent attention has no state, so it starts from any shared prefix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch

from components.errors import ResourceError
from components.inference.transformers.batch import Batch, Row, missing
from components.inference.transformers.kv_slots import adopt, heads_and_dim
from components.inference.transformers.row_caches import RowCaches, check
from components.models import attention
from components.models.cuda_graphs import require_gpu
from components.models.shared_attention import Sharing


class StateBatch(Batch):
    """Active sequences of a model with a state. continues: result of `row_caches.check`."""

    def __init__(self, model: Any, *, continues: bool, **arguments: Any):
        self._continues = continues
        super().__init__(model, **arguments)
        self.shared_tokens = math.inf

    @cached_property
    def cache(self) -> RowCaches:
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
        result: torch.Tensor = self.cache.compute(tokens.to(self.device), slots, logits)
        return result


def fitting_batch(model: Any, name: str, slots: int, cache_bytes: int, *, max_length: int, **arguments: Any) -> Batch:
    """Return a batch of at most `slots` sequences whose cache fits `cache_bytes`. Raises ResourceError for a model
    whose cache cannot be used. name: of the model."""

    def fitting(per_sequence: int) -> dict[str, Any]:
        return {"slots": max(1, min(slots, cache_bytes // per_sequence)), "max_length": max_length, **arguments}

    if arguments.get("graphed"):
        require_gpu(arguments["device"])
    reasons = attention.beyond_slots(model)
    if not reasons and (problem := adopt(model)) is not None:
        reasons = [problem]
    if not reasons:
        config = model.config.get_text_config()
        heads, dim = heads_and_dim(config)
        return Batch(model, **fitting(2 * config.num_hidden_layers * heads * dim * model.dtype.itemsize * max_length))
    if arguments.get("graphed"):
        raise ResourceError(
            f"model.cuda_graphs = true: {name} ({', '.join(reasons)}) has no table of keys and values, which graphs "
            "need; set model.cuda_graphs=false, or inference=vllm"
        )
    try:
        continues = check(model)
    except ResourceError as error:
        raise ResourceError(
            f"{name} ({', '.join(reasons)}) cannot be run exactly here: {error}. Choose another model, or set "
            "inference=vllm"
        ) from error
    per_sequence = RowCaches(model, 1, continues=continues).bytes_of(max_length)
    return StateBatch(model, continues=continues, **fitting(per_sequence))


def default_cache_bytes(device: str) -> int:
    """Return the memory of the cache on a device: a trainer may need the rest."""
    if torch.device(device).type != "cuda":
        return 8_000_000_000
    return int(torch.cuda.get_device_properties(device).total_memory) // 4
