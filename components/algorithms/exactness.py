"""Which models packs compute exactly. The others are refused by name before any training.

A pack says by its mask which token sees which, and by its positions how far apart they are. A model that looks at
anything else (windows, recurrent states, biases by distance, capped attention scores) would silently compute another
distribution than the one that was sampled. Windows are read from the config; everything else shows in a probe: two
short sequences, alone with the attention of transformers and together in a pack.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from components.algorithms.packing import Pack, Sequence_, pack
from components.errors import ResourceError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Most nats by which the two may differ; rounding stays far below."""

_START, _ENDS = (5, 6, 7, 8), ((9, 10, 11, 12), (13, 9, 10, 14))


def refuse_windows(model: PreTrainedModel, max_length: int) -> None:
    """Raises ResourceError where a layer of the model sees fewer than `max_length` tokens back."""
    config = model.config.get_text_config()
    sizes = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    shortest = min((size for size in sizes if size), default=max_length)
    if shortest < max_length:
        raise ResourceError(
            f"{model.config.name_or_path} ({type(model).__name__}) has layers that see only {shortest} tokens back, "
            f"which training does not compute. Set model.max_length to {shortest} or less, or choose another model"
        )


def probe_alone(model: PreTrainedModel) -> torch.Tensor:
    """(S,) log-probabilities of the probe's targets, each sequence by itself, as the model computes it now."""
    logprobs = []
    with torch.no_grad():
        for sequence in _probe(model):
            token_ids_T = torch.tensor(sequence.token_ids, device=model.device)
            logps_TV = model(input_ids=token_ids_T[None]).logits[0].float().log_softmax(-1)
            logprobs += [logps_TV[target - 1, token_ids_T[target]] for target in sequence.targets]
    return torch.stack(logprobs)


def probe_pack(model: PreTrainedModel) -> Pack:
    """The same targets in the same order, in one pack."""
    (packed,) = pack(_probe(model), most_tokens=64)
    return packed


def refuse_difference(model: PreTrainedModel, alone_S: torch.Tensor, packed_S: torch.Tensor) -> None:
    """Raises ResourceError where the two ways to compute the probe differ by more than rounding."""
    worst = (packed_S.detach() - alone_S).abs().max().item()
    if not worst <= TOLERANCE[model.dtype]:
        raise ResourceError(
            f"{model.config.name_or_path} ({type(model).__name__}) cannot be trained exactly: its attention follows "
            f"rules of its own, log-probabilities would be off by {worst:.2g} nats. Choose a model with plain full "
            "attention, such as those of the Llama and Qwen families"
        )


def _probe(model: PreTrainedModel) -> list[Sequence_]:
    last = model.config.get_text_config().vocab_size - 1
    return [Sequence_([min(token, last) for token in (*_START, *end)], [5, 6, 7]) for end in _ENDS]
