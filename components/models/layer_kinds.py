"""The decoder of a model, and its layers that depend on more than the keys and values that a mask allows.

A recurrent layer (Mamba, linear attention, short convolution) reads a state that all preceding tokens of a row wrote,
whatever the mask says. A layer with sparse attention chooses its keys among all preceding tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEY_VALUE_LAYERS = frozenset(
    {"full_attention", "sliding_attention", "chunked_attention", "attention", "dense", "sparse", "mlp", "moe"}
)
"""Layer types of transformers that attend to keys and values, or compute each token by itself."""


def decoder(model: PreTrainedModel) -> Any:
    """Return the part of a causal language model that computes its hidden states."""
    from transformers import PreTrainedModel

    # Llama 4's decoder is the whole model, ModernBERT's is the head.
    parts = (model.get_decoder(), model.base_model, getattr(model, "model", None))
    return next(part for part in parts if part is not model and isinstance(part, PreTrainedModel))


def stateful_layers(model: PreTrainedModel) -> list[str]:
    """Return the names of a model's layers that read a state or choose their keys, sorted: the classes of modules with
    a convolution over the tokens or, without any, the layer types of the config that are not in `KEY_VALUE_LAYERS`."""
    import torch

    convolving = {
        type(module).__name__
        for module in decoder(model).modules()
        for child in module.children()
        if isinstance(child, torch.nn.Conv1d)
    }
    declared = set(getattr(model.config.get_text_config(), "layer_types", None) or [])
    names = sorted(convolving) or sorted(declared - KEY_VALUE_LAYERS)
    return names or (["recurrent layers"] if model._is_stateful else [])
