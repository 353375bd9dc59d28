"""Which models packs compute exactly. The others are trained on padded rows, and the log says so.

A pack says by its mask which token sees which, and by its positions how far apart they are. A model that looks at
anything else (windows, recurrent states, biases by distance, capped attention scores) would silently compute another
distribution than the one that was sampled. Windows are read from the config; everything else shows in a probe: two
short sequences of likely tokens, alone with the attention of transformers and together in a pack. In half precision
the two differ by rounding even where both are right; how much that may be is measured by the same weights in float32.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from components.algorithms.policy import pack_layout
from components.algorithms.policy.logits import After, guesses
from components.algorithms.policy.pack_layout import Lay
from components.algorithms.policy.packing import Pack, Sequence_, pack
from components.errors import ResourceError
from components.models import attention
from components.models.distribution import Cut

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from components.algorithms.policy.policy import Policy

log = logging.getLogger(__name__)

COMMON, OWN = 6, 4
"""Tokens of the probe's sequences after the first: those that they share, and after the next one those of each."""

TOLERANCE = 1e-3
"""Largest mean difference of a model in float32, nats a token; rounding stays far below."""
ROUNDINGS = 3.0
"""Largest mean difference of a model in half precision, as a multiple of its own mean difference to float32: two
independent roundings differ by about 1.4 times one."""
UNKNOWN_ROUNDING = 0.05
"""Its mean difference to float32 where that cannot be computed, nats a token."""


def choose(policy: Policy, max_length: int) -> tuple[Lay, After | None]:
    """How packs are laid out for a policy's model, which has no adapter yet, and what it does to its head's logits;
    None where no guess is what it computes. Raises ResourceError where not even padded rows are."""
    model = policy.model
    _refuse_changing_positions(model, max_length)
    own, sequences = model.config._attn_implementation, likely_sequences(model)
    alone_S = logprobs_alone(model, sequences)
    tolerance = _tolerance(model, sequences, alone_S)
    why = _window(model, max_length)
    if why is None:
        model.set_attn_implementation(attention.register())
        policy._lay = pack_layout.trie
        why = _difference(policy, sequences, alone_S, tolerance)
    if why is not None:
        model.set_attn_implementation(own)
        policy._lay = pack_layout.padded
        log.warning(
            "%s (%s) is trained on padded batches, in which nothing is shared: %s",
            *(_name(model), type(model).__name__, why),
        )
        if (still := _difference(policy, sequences, alone_S, tolerance)) is not None:
            raise ResourceError(f"{_name(model)} ({type(model).__name__}) cannot be trained exactly: {still}")
    return policy._lay, _after(policy, sequences)


def _after(policy: Policy, sequences: Sequence[Sequence_]) -> After | None:
    """The first guess that makes the model's logits of its head's, each within one rounding; None where there is none,
    or where the head reads something else than the last hidden states."""
    model, states, made = policy.model, [], []
    hooks = [
        model.base_model.register_forward_hook(lambda *given: states.append(given[-1].last_hidden_state)),
        model.get_output_embeddings().register_forward_hook(lambda _, given, logits: made.append((*given, logits))),
    ]
    try:
        with torch.no_grad():
            whole_BTV = model(**policy._lay(_packed(sequences).to(policy.device)).inputs).logits
    finally:
        for hook in hooks:
            hook.remove()
    if len(made) != 1 or not torch.equal(made[0][0], states[0]):
        return None
    for guess in guesses(model.config):
        found_BTV, rounding = guess(made[0][1]), torch.finfo(model.dtype).eps
        if torch.allclose(found_BTV.float(), whole_BTV.float(), rtol=rounding, atol=0):
            return guess
    return None


def _name(model: PreTrainedModel) -> str:
    return str(model.config.name_or_path)


def _refuse_changing_positions(model: PreTrainedModel, max_length: int) -> None:
    """Raises ResourceError where the angles of positions depend on the longest sequence beside them."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = rope.values() if all(isinstance(one, dict) for one in rope.values()) else [rope]
    for one in kinds:
        longest = one.get("original_max_position_embeddings") or model.config.get_text_config().max_position_embeddings
        if one.get("rope_type") in ("longrope", "dynamic") and longest < max_length:
            raise ResourceError(
                f"{_name(model)} ({type(model).__name__}) cannot be trained exactly on sequences of more than "
                f"{longest} tokens: its positions change with the longest. Set model.max_length to {longest} or less"
            )


def _window(model: PreTrainedModel, max_length: int) -> str | None:
    """What is in the way where a layer of the model sees fewer than `max_length` tokens back."""
    config = model.config.get_text_config()
    sizes = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    shortest = min((size for size in sizes if size), default=max_length)
    if shortest >= max_length:
        return None
    return f"it has layers that see only {shortest} tokens back, and model.max_length is {max_length}"


def likely_sequences(model: PreTrainedModel) -> list[Sequence_]:
    """Return two sequences with a common beginning, made of tokens that the model itself finds likely.

    Each token is one of the three most likely ones, in turn: log-probabilities of unlikely tokens are dominated by
    rounding, and those of the most likely ones alone may all be near 0. The first token after the common beginning
    differs. All further tokens are targets.
    """
    beginning = _continued(model, [model.config.get_text_config().bos_token_id or 0], COMMON)
    logits_V = _logits(model, beginning)[-1]
    first, second = logits_V.topk(2).indices.tolist()
    ends = [_continued(model, [*beginning, token], OWN) for token in (first, second)]
    return [Sequence_(token_ids, list(range(1, len(token_ids)))) for token_ids in ends]


def _continued(model: PreTrainedModel, token_ids: list[int], count: int) -> list[int]:
    """Return the tokens followed by so many more, in turn the most likely one, the second and the third."""
    for index in range(count):
        token_ids = [*token_ids, int(_logits(model, token_ids)[-1].topk(3).indices[index % 3])]
    return token_ids


def _logits(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Return the (T, V) logits of one sequence by itself, as the model computes it now."""
    with torch.no_grad():
        logits_TV: torch.Tensor = model(input_ids=torch.tensor([list(token_ids)], device=model.device)).logits[0]
    return logits_TV.float()


def logprobs_alone(model: PreTrainedModel, sequences: Sequence[Sequence_]) -> torch.Tensor:
    """Return the (S,) log-probabilities of the targets, each sequence by itself."""
    logprobs = []
    for sequence in sequences:
        logps_TV = _logits(model, sequence.token_ids).log_softmax(-1)
        logprobs += [logps_TV[target - 1, sequence.token_ids[target]] for target in sequence.targets]
    return torch.stack(logprobs)


def _tolerance(model: PreTrainedModel, sequences: Sequence[Sequence_], alone_S: torch.Tensor) -> float:
    """Return the largest mean difference that is rounding, nats a token."""
    return TOLERANCE if model.dtype == torch.float32 else ROUNDINGS * rounding(model, sequences, alone_S)


def rounding(model: PreTrainedModel, sequences: Sequence[Sequence_], alone_S: torch.Tensor) -> float:
    """Return by how many nats the model's own log-probabilities `alone_S` differ from those of the same weights in
    float32, in the mean."""
    with _widened(model):
        try:
            exact_S = logprobs_alone(model, sequences)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001  layers that compute in one type only, such as quantized ones
            log.debug("the rounding of %s is not known: %s", _name(model), error)
            return UNKNOWN_ROUNDING
    return (exact_S - alone_S).abs().mean().item()


@contextmanager
def _widened(model: PreTrainedModel) -> Iterator[None]:
    """While it lasts, every module computes in float32: its parameters are widened before its forward pass and restored
    after it, so that only those of one module are in memory twice."""
    hooks: list[RemovableHandle] = []
    narrow: dict[torch.nn.Parameter, torch.Tensor] = {}

    def widen(module: torch.nn.Module, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter.dtype in (torch.bfloat16, torch.float16):
                narrow.setdefault(parameter, parameter.data)
                parameter.data = parameter.data.float()

    def restore(module: torch.nn.Module, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter in narrow:
                parameter.data = narrow.pop(parameter)

    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            hooks += [module.register_forward_pre_hook(widen), module.register_forward_hook(restore)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, data in narrow.items():
            parameter.data = data


def _packed(sequences: Sequence[Sequence_]) -> Pack:
    """Return the same targets in the same order, in one pack."""
    (packed,) = pack(sequences, most_tokens=64)
    return packed


def _difference(policy: Policy, sequences: Sequence[Sequence_], alone_S: torch.Tensor, tolerance: float) -> str | None:
    """Return what is in the way where the two ways to compute the probe differ by more than rounding."""
    policy._after = None
    try:
        with torch.no_grad():
            packed_S, _ = policy.logprobs(_packed(sequences), Cut())
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  what a model makes of a mask that it does not know
        return f"{type(error).__name__}: {error}"
    mean = (packed_S - alone_S).abs().mean().item()
    if mean <= tolerance:
        return None
    return (
        f"its attention follows rules of its own, log-probabilities would be off by {mean:.2g} nats a token, of which "
        f"rounding explains {tolerance:.2g}"
    )
