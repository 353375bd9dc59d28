"""Selection of models that packs compute exactly. Other models are trained on padded rows, with a warning in the log.

A pack states by its mask which token attends to which, and by its positions how far apart they are. A model that
depends on anything else (sliding windows, recurrent states, distance biases, capped attention scores) would silently
compute another distribution than the one that was sampled. Windows are read from the config. Everything else is
detected by a probe: two short sequences of likely tokens, computed separately with the attention of transformers and
together in a pack. In half precision the results differ by rounding even if both are correct; the tolerance is measured
with the same weights in float32.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from components.algorithms.policy.logits import LogitTransform, candidate_transforms
from components.algorithms.policy.packing import LayoutFunction, Pack, TokenSequence, pack, padded_layout, trie_layout
from components.errors import ResourceError
from components.models import attention
from components.models.distribution import Cut

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

COMMON, OWN = 6, 4
"""Number of tokens of the probe's sequences after the first token: those of the shared prefix, and those of each
sequence after the first different token."""

TOLERANCE = 1e-3
"""Largest mean difference of a float32 model, nats per token; rounding stays far below it."""
ROUNDINGS = 3.0
"""Largest mean difference of a half-precision model, as a multiple of its own mean difference from float32: two
independent roundings differ by about 1.4 times one rounding."""
UNKNOWN_ROUNDING = 0.05
"""Assumed mean difference from float32 where it cannot be computed, nats per token."""


class PackedPolicy(Protocol):
    """Policy whose layout of packs is chosen here."""

    model: Any
    device: torch.device
    _layout: LayoutFunction
    _logit_transform: LogitTransform | None

    def logprobs(self, pack: Pack, cut: Cut) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probabilities of the sampled tokens of a pack, and the entropies."""
        ...


def choose(policy: PackedPolicy, max_length: int) -> tuple[LayoutFunction, LogitTransform | None]:
    """Return the layout of packs for a policy's model, which has no adapter yet, and the transform of the head's
    logits; None if no known transform reproduces the model's logits. Raises ResourceError if not even padded rows are
    exact."""
    model = policy.model
    _refuse_changing_positions(model, max_length)
    original_attention, sequences = model.config._attn_implementation, probe_sequences(model)
    alone_S = separate_logprobs(model, sequences)
    tolerance = _tolerance(model, sequences, alone_S)
    problem = _window(model, max_length)
    if problem is None:
        model.set_attn_implementation(attention.register())
        policy._layout = trie_layout
        problem = _difference(policy, sequences, alone_S, tolerance)
    if problem is not None:
        model.set_attn_implementation(original_attention)
        policy._layout = padded_layout
        log.warning(
            "%s (%s) is trained on padded batches, without prefix sharing: %s",
            *(_name(model), type(model).__name__, problem),
        )
        if (padded_problem := _difference(policy, sequences, alone_S, tolerance)) is not None:
            raise ResourceError(f"{_name(model)} ({type(model).__name__}) cannot be trained exactly: {padded_problem}")
    return policy._layout, _logit_transform(policy, sequences)


def _logit_transform(policy: PackedPolicy, sequences: Sequence[TokenSequence]) -> LogitTransform | None:
    """Return the first candidate transform that reproduces the model's logits from the head's, each within one
    rounding. Return None if no candidate does, or if the head reads something other than the last hidden states."""
    model, states, head_calls = policy.model, [], []
    hooks = [
        model.base_model.register_forward_hook(lambda *call: states.append(call[-1].last_hidden_state)),
        model.get_output_embeddings().register_forward_hook(
            lambda _, inputs, logits: head_calls.append((*inputs, logits))
        ),
    ]
    try:
        with torch.no_grad():
            logits_BTV = model(**policy._layout(_packed(sequences).to(policy.device)).inputs).logits
    finally:
        for hook in hooks:
            hook.remove()
    if len(head_calls) != 1 or not torch.equal(head_calls[0][0], states[0]):
        return None
    for transform in candidate_transforms(model.config):
        transformed_BTV, rounding = transform(head_calls[0][1]), torch.finfo(model.dtype).eps
        if torch.allclose(transformed_BTV.float(), logits_BTV.float(), rtol=rounding, atol=0):
            return transform
    return None


def _name(model: PreTrainedModel) -> str:
    return str(model.config.name_or_path)


def _refuse_changing_positions(model: PreTrainedModel, max_length: int) -> None:
    """Raise ResourceError if the rotary angles depend on the longest sequence of the batch."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = rope.values() if all(isinstance(options, dict) for options in rope.values()) else [rope]
    for options in kinds:
        longest = (
            options.get("original_max_position_embeddings") or model.config.get_text_config().max_position_embeddings
        )
        if options.get("rope_type") in ("longrope", "dynamic") and longest < max_length:
            raise ResourceError(
                f"{_name(model)} ({type(model).__name__}) cannot be trained exactly on sequences of more than "
                f"{longest} tokens: its rotary positions change with the longest sequence of a batch. Set "
                f"model.max_length to {longest} or less"
            )


def _window(model: PreTrainedModel, max_length: int) -> str | None:
    """Return the problem if a layer of the model attends to fewer than `max_length` tokens back, else None."""
    config = model.config.get_text_config()
    sizes = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    shortest = min((size for size in sizes if size), default=max_length)
    if shortest >= max_length:
        return None
    return f"it has layers that attend to only {shortest} tokens back, and model.max_length is {max_length}"


def probe_sequences(model: PreTrainedModel) -> list[TokenSequence]:
    """Return two sequences with a shared prefix, made of tokens that are likely under the model itself.

    Each token is the first, second or third most likely one, in turn: log-probabilities of unlikely tokens are
    dominated by rounding, and those of the most likely tokens alone may all be near 0. The first token after the prefix
    differs. All later tokens are targets.
    """
    prefix = _continued(model, [model.config.get_text_config().bos_token_id or 0], COMMON)
    logits_V = _logits(model, prefix)[-1]
    first, second = logits_V.topk(2).indices.tolist()
    ends = [_continued(model, [*prefix, token], OWN) for token in (first, second)]
    return [TokenSequence(token_ids, list(range(1, len(token_ids)))) for token_ids in ends]


def _continued(model: PreTrainedModel, token_ids: list[int], count: int) -> list[int]:
    """Return the tokens followed by `count` more: the most likely, the second and the third most likely one, in
    turn."""
    for index in range(count):
        token_ids = [*token_ids, int(_logits(model, token_ids)[-1].topk(3).indices[index % 3])]
    return token_ids


def _logits(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Return the (T, V) logits of one sequence by itself, in float32."""
    with torch.no_grad():
        logits_TV: torch.Tensor = model(input_ids=torch.tensor([list(token_ids)], device=model.device)).logits[0]
    return logits_TV.float()


def separate_logprobs(model: PreTrainedModel, sequences: Sequence[TokenSequence]) -> torch.Tensor:
    """Return the (S,) log-probabilities of the targets, each sequence by itself."""
    logprobs = []
    for sequence in sequences:
        logps_TV = _logits(model, sequence.token_ids).log_softmax(-1)
        logprobs += [logps_TV[target - 1, sequence.token_ids[target]] for target in sequence.targets]
    return torch.stack(logprobs)


def _tolerance(model: PreTrainedModel, sequences: Sequence[TokenSequence], alone_S: torch.Tensor) -> float:
    """Return the largest mean difference that rounding explains, nats per token."""
    return TOLERANCE if model.dtype == torch.float32 else ROUNDINGS * rounding(model, sequences, alone_S)


def rounding(model: PreTrainedModel, sequences: Sequence[TokenSequence], alone_S: torch.Tensor) -> float:
    """Return the mean difference (nats) between the model's own log-probabilities `alone_S` and those of the same
    weights in float32."""
    with _widened(model):
        try:
            exact_S = separate_logprobs(model, sequences)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001  layers that support one dtype only, such as quantized ones
            log.debug("the rounding of %s could not be measured: %s", _name(model), error)
            return UNKNOWN_ROUNDING
    return (exact_S - alone_S).abs().mean().item()


@contextmanager
def _widened(model: PreTrainedModel) -> Iterator[None]:
    """Compute every module in float32 within the context: its parameters are widened before its forward pass and
    restored after it, so that only one module's parameters are in memory twice."""
    hooks: list[RemovableHandle] = []
    original: dict[torch.nn.Parameter, torch.Tensor] = {}

    def widen(module: torch.nn.Module, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter.dtype in (torch.bfloat16, torch.float16):
                original.setdefault(parameter, parameter.data)
                parameter.data = parameter.data.float()

    def restore(module: torch.nn.Module, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter in original:
                parameter.data = original.pop(parameter)

    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            hooks += [module.register_forward_pre_hook(widen), module.register_forward_hook(restore)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, data in original.items():
            parameter.data = data


def _packed(sequences: Sequence[TokenSequence]) -> Pack:
    """Return one pack with the same targets in the same order."""
    (packed,) = pack(sequences, most_tokens=64)
    return packed


def _difference(
    policy: PackedPolicy, sequences: Sequence[TokenSequence], alone_S: torch.Tensor, tolerance: float
) -> str | None:
    """Return the problem if packed and separate log-probabilities of the probe differ by more than rounding, else
    None."""
    policy._logit_transform = None
    try:
        with torch.no_grad():
            packed_S, _ = policy.logprobs(_packed(sequences), Cut())
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  a model may fail in any way on an unknown mask
        return f"{type(error).__name__}: {error}"
    mean_difference = (packed_S - alone_S).abs().mean().item()
    if mean_difference <= tolerance:
        return None
    return (
        f"its attention does not depend on mask and positions alone; log-probabilities would be off by "
        f"{mean_difference:.2g} nats per token, of which rounding explains {tolerance:.2g}"
    )
