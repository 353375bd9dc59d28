"""Resolution of `algorithm.pack_tokens: auto` by the free memory of a GPU.

Larger packs share more prefixes and fill a GPU better; the activations of one pack are what a step adds to the memory.
The size is the largest of a few for which the estimate of the training (`models.training_memory`) fits on every
process. A loss is a sum over the tokens of all packs, so their boundaries change the order of summation and nothing
else: two machines with different memory take the same step up to rounding, like two kinds of GPU. So a stage key has
the size of a CPU in place of `auto`, and a checkpoint's metrics have the one that was used. Dropout draws its masks for
each pack: with it, `auto` is that size everywhere. Several processes divide the packs among them, so they use no larger
ones.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from components.algorithms.loop import distributed
from components.algorithms.spec import CPU_PACK_TOKENS
from components.models.trained_weights import shapes
from components.models.training_memory import USABLE, ModelSize, training_memory

if TYPE_CHECKING:
    from components.algorithms.policy.policy import Policy
    from components.algorithms.spec import AlgorithmSpec
    from components.algorithms.trainer import PolicyTrainingRequest

logger = logging.getLogger(__name__)

SIZES = (1024, 2048, 4096, 8192, 16384)
"""Powers of two, so that small differences in free memory change nothing."""


def resolve(algorithm: AlgorithmSpec, policy: Policy, request: PolicyTrainingRequest) -> AlgorithmSpec:
    """Return the algorithm with a size in place of `pack_tokens: auto`. policy: with its reference, before its first
    step. All processes must call this."""
    if algorithm.pack_tokens != "auto":
        return algorithm
    size = CPU_PACK_TOKENS
    if policy.device.startswith("cuda") and not (request.model.lora and request.model.lora.dropout):
        free = distributed.smallest(free_bytes(policy.device))
        size = largest(algorithm, request, free, distributed.size())
        logger.info("algorithm.pack_tokens=auto is %d: %.1f GB are free on the GPU", size, free / 1e9)
    return algorithm.model_copy(update={"pack_tokens": size})


def largest(algorithm: AlgorithmSpec, request: PolicyTrainingRequest, free: float, processes: int) -> int:
    """Return the largest size with which a training fits into the memory that weights and reference have left, in
    bytes; the smallest size if none does."""
    model = ModelSize.of(shapes(request.base_dir))

    def fits(size: int) -> bool:
        memory = training_memory(
            *(model, request.model),
            processes=processes,
            strategy=request.strategy,
            pack_tokens=size,
            checkpointing=algorithm.gradient_checkpointing,
            reference=False,
        )
        return memory.gradients + memory.optimizer + memory.gathered + memory.activations <= USABLE * free

    sizes = [size for size in SIZES if processes == 1 or size <= CPU_PACK_TOKENS]
    return max(filter(fits, sizes), default=SIZES[0])


def free_bytes(device: str) -> float:
    """Return the memory of a GPU that this process can still allocate."""
    import torch

    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
