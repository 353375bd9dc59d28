"""Kinds of layers that depend on more than the keys and values of the tokens that a mask allows.

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


def other_layers(config: Any) -> list[str]:
    """Return the layer types of a text config that are not in `KEY_VALUE_LAYERS`, sorted."""
    return sorted(set(getattr(config, "layer_types", None) or []) - KEY_VALUE_LAYERS)


def stateful_layers(model: PreTrainedModel) -> list[str]:
    """Return the names of a model's layers that read a state or choose their keys, sorted: the layer types that its
    config declares, and the classes of modules with a convolution over the tokens."""
    import torch

    convolving = {
        type(module).__name__
        for module in model.get_decoder().modules()
        for child in module.children()
        if isinstance(child, torch.nn.Conv1d)
    }
    names = sorted(convolving) or other_layers(model.config.get_text_config())
    return names or (["recurrent layers"] if model._is_stateful else [])
