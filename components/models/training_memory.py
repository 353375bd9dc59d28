"""Estimate of the memory that a training takes on each device, from the shapes of the model's weights.

State follows from the numbers of parameters: P weights, of which T are trained, on n processes, with b bytes a weight.

                 replicated                      sharded (fsdp, zero2)
    weights      b P                             b P / n, or 4 P / n if all are trained: float32 master weights
    gradients    4 T                             4 T / n if all weights are trained
    optimizer    8 T, + 4 T for master weights   8 T / n if all weights are trained
    gathered     0                               fsdp: two layers and the weights outside of layers; zero2: all

fsdp_offload has these shards on the host (with LoRA that of the base), and on the device what fsdp gathers and the
float32 gradients of one layer and of the weights outside of layers.

Activations are those of one pack: a layer keeps its outputs and those of its linear modules until the backward pass;
with gradient checkpointing, one layer does, and the others keep their input. Adapters in half precision keep their
inputs in float32 as well. Attention is counted without its mask. A replicated model is loaded as a whole, a sharded one
a layer at a time (`models.streamed`), and the probe of the model computes in float32 (`loading`). Kernels, the
allocator's fragments and communication take more: `USABLE`.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from components.models.spec import ModelSpec

USABLE = 0.8
"""Share of a device's memory that an estimate may fill."""
LOADABLE = 0.95
"""Share of a device's memory that may be filled while the weights are read."""
LOGIT_ROWS = 512
"""Positions whose logits are in memory at a time (`policy.LOGIT_ROWS`)."""
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
Shape = tuple[int, ...]
Sharding = Literal["ddp", "zero2", "fsdp", "fsdp_offload"]


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters of a language model, and of the values that it computes for a token."""

    parameters: int
    layers: int
    layer: int
    """Parameters of the largest layer."""
    hidden: int
    vocabulary: int
    layer_values: int
    """Values per token that the linear modules of the largest layer and the functions between them compute."""
    layer_inputs: int
    """Values per token that the linear modules of the largest layer read."""
    adapter_inputs: int
    """Sum of inputs and outputs of all linear modules in layers: parameters of an adapter of rank 1."""

    @classmethod
    def of(cls, shapes: Mapping[str, Shape]) -> ModelSize:
        """Return the size of a model. shapes: of its weights, by the names in its files."""
        layers: dict[str, list[Shape]] = defaultdict(list)
        for name, shape in shapes.items():
            if match := _LAYER.search(name):
                layers[match[1]].append(shape)
        largest = max(layers.values(), key=_count, default=[])
        vocabulary, hidden = max(
            (shape for name, shape in shapes.items() if len(shape) == 2 and not _LAYER.search(name)), key=math.prod
        )
        matrices = [shape for shape in largest if len(shape) == 2]
        # Norms and residual sums compute 6 hidden values; the gate and its product, two of the widest outputs.
        values = sum(shape[0] for shape in matrices) + 6 * hidden + 2 * max((shape[0] for shape in matrices), default=0)
        adapted = [shape for shapes_of_layer in layers.values() for shape in shapes_of_layer if len(shape) == 2]
        return cls(
            parameters=_count(shapes.values()),
            layers=len(layers),
            layer=_count(largest),
            hidden=hidden,
            vocabulary=vocabulary,
            layer_values=values,
            layer_inputs=sum(shape[1] for shape in matrices),
            adapter_inputs=sum(map(sum, adapted)),
        )


@dataclass(frozen=True)
class TrainingMemory:
    """Memory of a training for each process, in bytes: on its device, but for `host`."""

    loading: float
    """Weights while they are read, with those that the probe of the model has in float32."""
    weights: float
    gradients: float
    optimizer: float
    """Moments, and master weights of replicated weights in half precision."""
    reference: float
    """Second copy of the weights, for the reference of full fine-tuning."""
    gathered: float
    activations: float
    host: float
    """Memory of the host, beside the device: weights while they are read, or the copy of trained weights and optimizer
    state that is written while the training goes on; with `fsdp_offload` also the shards."""

    @property
    def total(self) -> float:
        """Peak."""
        state = self.weights + self.gradients + self.optimizer + self.reference
        return max(self.loading, state + self.gathered + self.activations)

    def fits(self, device: float) -> bool:
        """Return True if a device with this many bytes can hold it."""
        return self.total <= USABLE * device or (self.total == self.loading <= LOADABLE * device)


def training_memory(
    size: ModelSize,
    model: ModelSpec,
    *,
    processes: int,
    strategy: Sharding,
    pack_tokens: int,
    checkpointing: bool,
    reference: bool,
) -> TrainingMemory:
    """Return the estimate of a training with AdamW. reference: the algorithm reads a reference policy."""
    offloaded = strategy == "fsdp_offload"
    bytes_, sharded = _BYTES[model.dtype], offloaded or (strategy != "ddp" and processes > 1)
    stored = 0.5 if model.quantization != "none" else bytes_
    n = processes if sharded else 1
    outside = size.parameters - size.layers * size.layer
    gathered = (size.parameters if strategy == "zero2" else outside + 2 * size.layer) if sharded else 0
    base, layer = stored * size.parameters / n, bytes_ * size.layer_values
    if model.lora is None:
        trained, trained_shards = size.parameters, n
        weights, masters = (4 if sharded else bytes_) * trained / n, 0 if sharded or bytes_ == 4 else 4 * trained
    else:
        trained, trained_shards = model.lora.rank * size.adapter_inputs, 1
        weights, masters = base + 4 * trained, 0
        layer += 4 * size.layer_inputs if bytes_ < 4 else 0
    stored_values = layer + bytes_ * size.layers * size.hidden if checkpointing else size.layers * layer
    logits = 4 * 4 * min(LOGIT_ROWS, pack_tokens) * size.vocabulary
    probe = 4 * (outside + size.layer)
    loading = stored * size.parameters + (probe if bytes_ < 4 else 0)
    read = stored * size.parameters
    if sharded:
        loading = max(probe, weights + (4 if model.lora is None else bytes_) * outside)
        read = 2 * bytes_ * max(outside, size.layer)
    host = max(read, (14 if masters else 12) * trained / trained_shards)
    gradients, optimizer = 4 * trained / trained_shards, 8 * trained / trained_shards + masters
    second = weights if reference and model.lora is None else 0
    if offloaded:
        loading = max(probe, (4 if model.lora is None else bytes_) * outside)
        if model.lora is None:
            host += weights + gradients + optimizer + second
            weights, gradients, optimizer, second = 0, 4 * (outside + size.layer), 0, 0
        else:
            host, weights = host + base, weights - base
    return TrainingMemory(
        loading=loading,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        reference=second,
        gathered=bytes_ * gathered,
        activations=pack_tokens * stored_values + logits,
        host=host,
    )


def smallest(
    size: ModelSize,
    model: ModelSpec,
    device: float,
    *,
    pack_tokens: int,
    reference: bool,
    strategy: Sharding = "fsdp",
) -> tuple[int, bool, TrainingMemory] | None:
    """Return the smallest number of sharded processes that a training fits on, whether it needs gradient checkpointing
    there, and its estimate; None if 64 devices of this many bytes cannot hold it."""
    for processes in (1, 2, 4, 8, 16, 32, 64):
        for checkpointing in (False, True):
            memory = training_memory(
                *(size, model),
                processes=processes,
                strategy=strategy,
                pack_tokens=pack_tokens,
                checkpointing=checkpointing,
                reference=reference,
            )
            if memory.fits(device):
                return processes, checkpointing, memory
    return None


def longest_history(size: ModelSize, model: ModelSpec, device: float, *, reference: bool) -> int:
    """Return the number of tokens of the longest history that 64 devices can train, a multiple of 1,024. One process
    computes it, so sharding makes room for it only by what it takes from the rest; 0 if they hold no history."""

    def too_long(blocks: int) -> bool:
        return smallest(size, model, device, pack_tokens=1024 * blocks, reference=reference) is None

    return 1024 * bisect_left(range(1, 2**11), True, key=too_long)


def _count(shapes: Iterable[Shape]) -> int:
    return sum(map(math.prod, shapes))
