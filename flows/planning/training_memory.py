"""Message of a plan on the memory of its trainings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from components.compute.training_group import TrainingGroup
from components.errors import EspalierError
from components.models.trained_weights import shapes
from components.models.training_memory import ModelSize, longest_history, smallest, training_memory
from components.models.weights import folder
from flows.experiment.spec import ExperimentSpec

NOTEWORTHY = 16e9
"""Bytes on a device from which a training is noted: smaller ones fit on common GPUs."""
DEVICE = 80e9
"""Bytes of the device for which a placement is recommended, such as an H100."""


def memory_notes(spec: ExperimentSpec, cache: Path) -> Iterator[str]:
    """Yield a message if a training takes much memory, as far as the weights are on this machine. cache: folder of
    prepared weights."""
    model, algorithm = spec.resolve_dtypes(spec.model, "train"), spec.algorithm
    try:
        size = ModelSize.of(shapes(folder(model, cache)))
    except (EspalierError, ValueError):  # damaged, or not a language model: the training says so
        return
    place, reference = spec.compute.place("train"), algorithm.reads_reference
    group = place.group or TrainingGroup(1, "ddp", 0.0)
    tokens = max(algorithm.pack_size, model.max_length)  # a history is never divided
    memory = training_memory(
        *(size, model),
        processes=group.size,
        strategy=group.strategy,
        pack_tokens=tokens,
        checkpointing=algorithm.gradient_checkpointing,
        reference=reference,
    )
    if memory.total < NOTEWORTHY:
        return
    sizes = {name: value for name, value in vars(memory).items() if name != "host"}
    parts = ", ".join(f"{name} {value / 1e9:.0f}" for name, value in sizes.items() if value >= 5e8)
    devices = f" on each of {group.size} processes ({group.strategy})" if group.size > 1 else ""
    text = f"train takes about {memory.total / 1e9:.0f} GB{devices}: {parts} GB"
    if not memory.fits(DEVICE):
        text += f"; more than a device of {DEVICE / 1e9:.0f} GB holds"
        fitting = smallest(size, model, DEVICE, pack_tokens=tokens, reference=reference)
        offloaded = smallest(*(size, model, DEVICE), pack_tokens=tokens, reference=reference, strategy="fsdp_offload")
        if fitting is None and model.max_length > algorithm.pack_size:
            longest = longest_history(size, model, DEVICE, reference=reference)
            text += (
                f". One process computes a history (no context parallelism), and model.max_length={model.max_length} "
                f"is more than the {longest} tokens that fit beside the rest: lower model.max_length, or set "
                "model.lora with a rank"
            )
        elif fitting is None:
            text += ". Lower algorithm.pack_tokens, or set model.lora with a rank"
        else:
            count, checkpointing, needed = fitting
            placed = f"compute=fsdp with processes={count}" if count > 1 else "a single process"
            option = " and algorithm.gradient_checkpointing=true" if checkpointing else ""
            text += f". Expected at least {placed}{option}, which takes {needed.total / 1e9:.0f} GB on each"
            if offloaded is not None and offloaded[0] < count:
                text += (
                    f", or compute=fsdp_offload with processes={offloaded[0]}, which takes "
                    f"{offloaded[2].total / 1e9:.0f} GB and {offloaded[2].host / 1e9:.0f} GB on the host"
                )
    yield f"{text}. On the host, {memory.host / 1e9:.0f} GB in the process that takes most"
