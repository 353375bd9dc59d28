"""Transformers' own caches, one for each sequence, for models whose layers keep more than keys and values of one shape:
states of recurrent layers, and latent attention, whose keys and values have different sizes.

A sequence is computed by itself, without padding, because a state would remember it. A decoding step computes one token
of several sequences: their caches are joined, states as they are, keys and values aligned at the end, where padding at
the front is masked. They are separated again when other sequences are decoded. Both happen layer by layer: a layer is
either joined or separate, so that only one of them is in memory twice, and a failure loses none.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from components.errors import ResourceError
from components.models.widening import widened

_KINDS = frozenset(
    {
        DynamicLayer,
        DynamicSlidingWindowLayer,
        LinearAttentionAndFullAttentionLayer,
        LinearAttentionAndSlidingWindowAttentionLayer,
        LinearAttentionLayer,
    }
)
"""Layers of a cache that can be joined and separated."""
_STATES = ("conv_states", "recurrent_states")
_ARGUMENTS = ("past_key_values", "cache_params")
"""Names of the argument of a model's forward pass that takes the cache."""
TOLERANCE = 1e-3
"""Largest difference of log-probabilities in float32 with and without a cache, nats."""


def check(model: Any) -> bool:
    """Return True if a model reads its cache when it computes several tokens at once, False if only for single tokens
    (Mamba 1). Raises ResourceError unless it computes the same with the cache as without."""
    if unknown := {type(layer) for layer in DynamicCache(config=model.config).layers} - _KINDS:
        names = ", ".join(sorted(layer.__name__ for layer in unknown))
        raise ResourceError(f"its layers need a cache ({names}) that cannot be joined with others")
    try:
        differences = {continues: _difference(model, continues) for continues in (True, False)}
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ResourceError(f"it does not compute with transformers' cache ({error!s:.200})") from error
    for continues, difference in differences.items():
        if difference <= TOLERANCE:
            return continues
    raise ResourceError(f"with a cache, its log-probabilities are off by {min(differences.values()):.2g} nats")


def _difference(model: Any, continues: bool) -> float:
    """Return the largest difference in float32 between log-probabilities with and without a cache, nats: after a
    prompt, its continuation, and a decoding step of two sequences of different lengths."""
    size = min(model.config.get_text_config().vocab_size, 1000)
    tokens_BT = torch.randint(size, (2, 20), generator=torch.Generator().manual_seed(0)).to(model.device)
    lengths, caches = (20, 9), RowCaches(model, 2, continues=continues)
    with torch.no_grad(), widened(model):
        expected = [
            model(input_ids=row_T[None, :length], use_cache=False).logits[:, -1]
            for row_T, length in zip(tokens_BT, lengths, strict=True)
        ]
        for row, length in enumerate(lengths):
            for first, last in ((0, length // 2), (length // 2, length - 1)):
                caches.compute(tokens_BT[row : row + 1, first:last], [row])
        last_B1 = torch.stack([tokens_BT[row, length - 1 : length] for row, length in enumerate(lengths)])
        logps_BV = caches.compute(last_B1, [0, 1])[:, -1].log_softmax(-1)
    return (logps_BV - torch.cat(expected).log_softmax(-1)).abs().max().item()


class RowCaches:
    """Caches of `slots` sequences of a model. continues: result of `check`.

    Legend: B rows, Q new tokens of a row, T cached tokens, V vocabulary.
    """

    def __init__(self, model: Any, slots: int, *, continues: bool):
        self._model = model
        self._continues = continues
        parameters = inspect.signature(model.forward).parameters
        self._argument = next((name for name in _ARGUMENTS if name in parameters), _ARGUMENTS[0])
        self._takes_positions = "position_ids" in parameters
        self._caches: list[_Row] = [_Row() for _ in range(slots)]
        self._joined: tuple[list[_Row], Any] | None = None
        """Rows whose caches are joined, and the joined cache."""

    @property
    def sliceable(self) -> bool:
        """Return True if any prefix of a cached sequence can be continued, not only all of it."""
        return all(type(layer) is DynamicLayer for layer in self._empty().layers)

    def bytes_of(self, tokens: int) -> int:
        """Return the memory of a sequence: its cache, and its largest layer again, of which there is a copy when caches
        are joined, separated or extended."""
        sizes = []
        for length in (1, 2):
            measured = RowCaches(self._model, 1, continues=self._continues)
            with torch.no_grad():
                measured.compute(torch.zeros(1, length, dtype=torch.long, device=self._model.device), [0])
            layers = measured._caches[0].cache.layers
            sizes.append([sum(tensor.nbytes for tensor in _tensors(layer)) for layer in layers])
        of_layers = [first + (second - first) * tokens for first, second in zip(*sizes, strict=True)]
        return sum(of_layers) + max(of_layers)

    # Slots, as in `KVSlots`.

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a slot to another, or to itself without the rest: all of them, unless the
        caches are sliceable."""
        self._separate()
        row = self._caches[source] if length else _Row()
        if source != target:
            row = copy.deepcopy(row)
        if length < row.length:
            for layer in row.cache.layers:
                layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]
            row.length = length
        assert row.length == length, "only a whole state can be copied"
        self._caches[target] = row

    def swap(self, a: int, b: int, length: int) -> None:
        """Swap two slots."""
        self._caches[a], self._caches[b] = self._caches[b], self._caches[a]

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        self._separate()
        self._caches[slot] = _Row()

    # Computation

    def compute(self, tokens_BQ: torch.Tensor, slots: Sequence[int], logits: int | None = 1) -> torch.Tensor:
        """Return the logits (B, ·, V) after the last `logits` new tokens of each slot (0: all, None: none), and add the
        tokens to the slots. Rows of several slots have one token each."""
        rows = [self._caches[slot] for slot in slots]
        if tokens_BQ.shape[1] > 1 and rows[0].length and not self._continues:
            steps = [self.compute(token_B[:, None], slots, logits and 1) for token_B in tokens_BQ.unbind(1)]
            return torch.cat(steps[-logits:] if logits else steps, dim=1)
        if len(rows) > 1 and not all(row.length for row in rows):
            return torch.cat([self.compute(tokens_BQ[[index]], [slot], logits) for index, slot in enumerate(slots)])
        cache, mask_BT = self._cache(rows)
        width = tokens_BQ.shape[1]
        arguments: dict[str, Any] = {self._argument: cache, "attention_mask": mask_BT, "use_cache": True}
        if self._takes_positions:
            start_B = torch.tensor([row.length for row in rows], device=tokens_BQ.device)
            arguments["position_ids"] = start_B[:, None] + torch.arange(width, device=tokens_BQ.device)
        arguments["logits_to_keep"] = torch.empty(0, dtype=torch.long) if logits is None else logits
        logits_BQV: torch.Tensor = self._model(input_ids=tokens_BQ, **arguments).logits
        for row in rows:
            row.length += width
        return logits_BQV

    def _cache(self, rows: list[_Row]) -> tuple[Any, torch.Tensor | None]:
        """Return the cache of rows, and the mask (B, T) of their cached tokens and the next one; None where nothing is
        padded: of a single row, and of layers without keys."""
        if len(rows) == 1:
            self._separate()
            if rows[0].cache is None:
                rows[0].cache = self._empty()
            return rows[0].cache, None
        if self._joined is None or self._joined[0] != rows:
            self._separate()
            cache = copy.copy(rows[0].cache)
            cache.layers = [None] * len(cache.layers)
            self._joined = rows, cache
        cache = self._joined[1]
        self._join(rows, cache.layers)
        if not any(isinstance(layer, DynamicLayer) for layer in cache.layers):
            return cache, None
        lengths_B = torch.tensor([row.length for row in rows], device=self._model.device)
        longest = int(lengths_B.max()) + 1
        places_T = torch.arange(longest, device=self._model.device)
        return cache, (places_T >= longest - 1 - lengths_B[:, None]).long()

    @staticmethod
    def _join(rows: list[_Row], joined: list[Any]) -> None:
        """Move the layers that are still separate from the caches of rows to the joined one."""
        for place, layer in enumerate(joined):
            if layer is None:
                joined[place] = _joined_layer([row.cache.layers[place] for row in rows])
                for row in rows:
                    row.cache.layers[place] = None

    def _separate(self) -> None:
        """Give each of the joined rows its own cache."""
        if self._joined is None:
            return
        rows, cache = self._joined
        for place, layer in enumerate(cache.layers):
            if layer is not None:
                own = [_select(layer, index, row.length) for index, row in enumerate(rows)]
                for row, selected in zip(rows, own, strict=True):
                    row.cache.layers[place] = selected
                cache.layers[place] = None
        self._joined = None

    def _empty(self) -> Any:
        return DynamicCache(config=self._model.config)


class _Row:
    """Cache of one sequence: None while it is empty; its layers are None while they are joined with others."""

    def __init__(self) -> None:
        self.cache: Any = None
        self.length = 0
        """Number of cached tokens."""


def _joined_layer(layers: Sequence[Any]) -> Any:
    """Return one layer of several sequences, keys and values padded at the front."""
    joined = copy.copy(layers[0])
    for name in _STATES:
        if hasattr(joined, name):
            states = [getattr(layer, name) for layer in layers]
            setattr(joined, name, {key: _concatenated([state[key] for state in states]) for key in states[0]})
    if getattr(joined, "keys", None) is not None:
        longest = max(layer.keys.shape[2] for layer in layers)
        for name in ("keys", "values"):
            tensors = [getattr(layer, name) for layer in layers]
            padded = tensors[0].new_zeros(len(tensors), tensors[0].shape[1], longest, tensors[0].shape[3])
            for row, tensor in zip(padded, tensors, strict=True):
                row[:, longest - tensor.shape[2] :] = tensor[0]
            setattr(joined, name, padded)
    if hasattr(joined, "cumulative_length"):
        joined.cumulative_length = max(layer.cumulative_length for layer in layers)
    return joined


def _concatenated(states: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    present = [state for state in states if state is not None]
    return torch.cat(present) if present else None


def _select(layer: Any, index: int, length: int) -> Any:
    """Return the layer of one of several sequences, which has `length` tokens."""
    own = copy.copy(layer)
    for name in _STATES:
        if hasattr(own, name):
            states = getattr(layer, name).items()
            setattr(own, name, {key: None if s is None else s[index : index + 1].clone() for key, s in states})
    if getattr(own, "keys", None) is not None:
        for name in ("keys", "values"):
            setattr(own, name, getattr(layer, name)[index : index + 1, :, -length:].clone())
    if hasattr(own, "cumulative_length"):
        own.cumulative_length = length
    return own


def _tensors(layer: Any) -> list[torch.Tensor]:
    """Return the tensors of a layer of a cache."""
    states = [state for name in _STATES for state in getattr(layer, name, {}).values()]
    return [t for t in (*states, getattr(layer, "keys", None), getattr(layer, "values", None)) if t is not None]
