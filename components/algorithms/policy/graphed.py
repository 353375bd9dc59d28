"""Forward and backward pass of a policy's decoder as CUDA graphs.

Packs are padded with nodes that nothing attends to, to one of a few sizes (`packing.padded_nodes`). Each size has a
graph for the forward and one for the backward pass, recorded when a second pack of the size comes, and used as long as
the policy is in memory. What changes is copied: the nodes of a pack, and the gradient of its hidden states. Adapters
are rounded to the dtype of the base inside the graph, so each replay reads their parameters.

The activations of a pack lie in the common memory until its backward pass is done. A pack that comes before, and all
passes without gradients, are computed without a graph. The gradients are copies, because autograd may keep the tensor
that it gets as a parameter's gradient, and the next replay would overwrite it.

Legend: N nodes of a pack, padding included, D hidden size, P elements of all trained parameters.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from components.algorithms.policy.packing import Pack, padded_nodes, trie_inputs
from components.models import fused_lora
from components.models.cuda_graphs import GraphRecorder, addresses, padded_size

log = logging.getLogger(__name__)

Tensors = Sequence[torch.Tensor]
LEAST, PARTS = 512, 4
"""Smallest size of a pack, and number of sizes up to twice a power of two: at most a quarter of larger packs is
padding."""
RECORDED_AT = 2
"""Number of the pack of a size at which its graphs are recorded: recording costs about as much as four passes."""


class GraphedDecoder:
    """Graphs of a decoder, by size of the pack, role, and trained parameters."""

    def __init__(self, decoder: Any, recorder: GraphRecorder):
        self._decoder, self._recorder = decoder, recorder
        self._recorded: dict[tuple[Any, ...], _Pass] = {}
        self._counts: Counter[tuple[Any, ...]] = Counter()
        self._addresses: tuple[int, ...] = ()
        self._pending: weakref.ref[_Pending] | None = None
        self._usable = True

    def hidden(self, pack: Pack, role: str = "") -> torch.Tensor | None:
        """Return the (1, N, D) last hidden states of a pack's nodes; None if the pack is to be computed without a
        graph. role: that of the active adapter, if each role has one."""
        if not self._usable or not torch.is_grad_enabled() or self._is_pending():
            return None
        recorded = self._pass(pack, role)
        if recorded is None:
            return None
        pending = _Pending()
        self._pending = weakref.ref(pending)
        nodes = padded_nodes(pack, recorded.size)
        hidden_1ND: torch.Tensor = _Replay.apply(self, recorded, pending, nodes, *recorded.trained)
        return hidden_1ND

    def finish(self, pending: _Pending) -> None:
        """End the use of the common memory. Raises RuntimeError if the activations are no longer there."""
        if self._pending is None or self._pending() is not pending:
            raise RuntimeError("the backward pass of a graphed pack can be computed only once")
        self._pending = None

    def _is_pending(self) -> bool:
        return self._pending is not None and self._pending() is not None

    def _pass(self, pack: Pack, role: str) -> _Pass | None:
        """Return the graphs for a pack; None if there are none yet, or they cannot be recorded."""
        if (current := addresses(self._decoder)) != self._addresses:
            self._recorded.clear()
            self._addresses = current
        trained = [parameter for parameter in self._decoder.parameters() if parameter.requires_grad]
        size = padded_size(len(pack.token_ids_N), LEAST, PARTS)
        key = (size, role, *(parameter.data_ptr() for parameter in trained))
        self._counts[key] += 1
        if key not in self._recorded and self._counts[key] >= RECORDED_AT:
            try:
                self._recorded[key] = _Pass(self._recorder, self._decoder, trained, padded_nodes(pack, size))
            except RuntimeError as error:
                self._usable = False
                self._recorded.clear()
                log.warning("model.cuda_graphs: training goes on without graphs, which cannot be recorded: %s", error)
        return self._recorded.get(key)


class _Pending:
    """Pack whose activations are in the common memory."""


class _Pass:
    """Recorded forward and backward pass of packs of one size. nodes: those of such a pack."""

    def __init__(self, recorder: GraphRecorder, decoder: Any, trained: Tensors, nodes: Tensors):
        self.size, self.trained = len(nodes[0]), trained
        self._nodes = [tensor.clone() for tensor in nodes]

        def forward() -> torch.Tensor:
            hidden_1ND: torch.Tensor = decoder(**trie_inputs(*self._nodes)).last_hidden_state
            return hidden_1ND

        def backward(hidden_1ND: torch.Tensor, grad_1ND: torch.Tensor) -> list[torch.Tensor | None]:
            return list(torch.autograd.grad(hidden_1ND, trained, grad_1ND, allow_unused=True))

        def both() -> None:
            hidden_1ND = forward()
            backward(hidden_1ND, torch.zeros_like(hidden_1ND))

        recorder.warm_up(both)
        fused_lora.forget(decoder)  # rounded adapters are part of the graph
        try:
            hidden_1ND, self._compute = recorder.record(forward)
            self._grad_1ND = torch.zeros_like(hidden_1ND)
            self._grads, self._differentiate = recorder.record(lambda: backward(hidden_1ND, self._grad_1ND))
        finally:
            fused_lora.forget(decoder)
        self._hidden_1ND = hidden_1ND.detach()

    def forward(self, nodes: Tensors) -> torch.Tensor:
        """Return the hidden states of other nodes."""
        for static, tensor in zip(self._nodes, nodes, strict=True):
            static.copy_(tensor)
        self._compute()
        return self._hidden_1ND.detach()

    def backward(self, grad_1ND: torch.Tensor) -> list[torch.Tensor | None]:
        """Return the gradients of the trained parameters, in new memory."""
        self._grad_1ND.copy_(grad_1ND)
        self._differentiate()
        present = [grad for grad in self._grads if grad is not None]
        copies = [torch.empty_like(grad) for grad in present]
        torch._foreach_copy_(copies, present)
        remaining = iter(copies)
        return [None if grad is None else next(remaining) for grad in self._grads]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        graphs: GraphedDecoder,
        recorded: _Pass,
        pending: _Pending,
        nodes: Tensors,
        *trained: torch.Tensor,
    ) -> torch.Tensor:
        """Return the hidden states. trained: parameters, which only get gradients here."""
        ctx.graphs, ctx.recorded, ctx.pending = graphs, recorded, pending
        return recorded.forward(nodes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.graphs.finish(ctx.pending)
        return None, None, None, None, *ctx.recorded.backward(grads[0])
