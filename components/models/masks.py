"""Masks of the layers of a model: each layer gets the mask that the model's own code asks for.

A model of transformers asks a mask function for one mask of each kind of layer: full, sliding or chunked attention. The
function registered here (`layer_mask`) reads from the request how far back the layer attends, as a bound on positions
(`AttentionRange`), and returns the mask of the pass, which `Paths` makes: over a prefix trie, where the position of a
node is its depth, or over the slots of a cache. So windows are exact in both, whichever layers have them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from components.errors import ResourceError


@dataclass(frozen=True)
class AttentionRange:
    """Tokens that a layer attends to: all earlier ones, the last `size` ones including the token itself, or those since
    the last multiple of `size` (chunked attention, as in Llama 4)."""

    size: int | None = None
    chunked: bool = False

    def first(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the first position that each position attends to."""
        if self.size is None:
            return torch.zeros_like(positions)
        if self.chunked:
            return positions // self.size * self.size
        return (positions - self.size + 1).clamp(min=0)


FULL = AttentionRange()


@dataclass(frozen=True, eq=False)
class Paths:
    """Attention of a pass of (rows, tokens), which a model takes for a mask of ones and hands to its mask function. A
    model that computes anything else from it gets a ResourceError: places in a row are no positions."""

    mask: Callable[[AttentionRange], Any]
    """Returns the mask of the layers with an attention range."""
    shape: tuple[int, int]
    ndim: int = 2

    def to(self, *_: Any, **__: Any) -> Paths:
        return self

    def view(self, *_: Any) -> Paths:
        return self

    def cumsum(self, dim: int) -> _Counts:
        return _Counts(self.shape)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if function is torch.zeros_like else _refuse()

    def __getitem__(self, place: Any) -> Any:
        _refuse()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse()


def _refuse() -> NoReturn:
    raise ResourceError("it computes with its attention mask in a way of its own")


class _Counts:
    """Numbers of tokens up to each place of a row, which are compared with 0 to find padding at the front."""

    def __init__(self, shape: tuple[int, int]):
        self.shape = shape

    def __eq__(self, other: object) -> Any:
        return torch.zeros(self.shape, dtype=torch.bool)

    __hash__ = None  # type: ignore[assignment]


def paths(mask: Callable[[AttentionRange], Any], rows: int, tokens: int) -> Paths:
    """Return the attention of a pass of (rows, tokens), whose masks `mask` makes once for each range."""
    return Paths(functools.cache(mask), (rows, tokens))


def layer_mask(
    *, mask_function: Callable[..., Any], attention_mask: Any, local_size: int | None = None, **request: Any
) -> Any:
    """Return the mask of a kind of layers: a mask function of transformers. Raises ResourceError for attention that is
    no `AttentionRange`."""
    if not isinstance(attention_mask, Paths):  # an ordinary pass
        from transformers.masking_utils import sdpa_mask

        request |= {"allow_is_causal_skip": False, "mask_function": mask_function, "attention_mask": attention_mask}
        return sdpa_mask(**request)
    if request.get("use_vmap"):
        _refuse()
    return attention_mask.mask(_range_of(mask_function, local_size))


def _range_of(mask_function: Callable[..., Any], size: int | None) -> AttentionRange:
    """Return the attention range of a mask function of transformers, whose window or chunk has `size` tokens."""

    def attends(query: int, key: int) -> bool:
        return bool(mask_function(0, 0, torch.tensor(query), torch.tensor(key)))

    if attends(0, 1):
        raise ResourceError("its attention is not causal")
    if size is None:
        return FULL
    return AttentionRange(size, chunked=not attends(size, size - 1) and size > 1)
