"""Selection of models that packs compute exactly. Other models are trained on padded rows, with a warning in the log.

A pack states by its mask which token attends to which, and by its positions how far apart they are. A model that
depends on anything else (recurrent states, distance biases) would silently compute another distribution than the one
that was sampled. Layers with a state are known by their kind. Everything else is detected by a probe: two sequences,
computed separately with the eager attention of transformers and together in a pack. The probe computes in float32,
whatever the model's dtype: in half precision, the rounding of a correct result is as large as the error of a wrong one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch

from components.algorithms.policy.logits import LogitTransform, candidate_transforms
from components.algorithms.policy.packing import (
    LayoutFunction,
    Pack,
    TokenSequence,
    pack,
    padded_layout,
    shared_length,
    trie_layout,
)
from components.errors import ResourceError
from components.models import attention
from components.models.distribution import Cut
from components.models.layer_kinds import decoder, stateful_layers
from components.models.widening import widened

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from components.models.streamed import StreamedModel

log = logging.getLogger(__name__)

COMMON, OWN = 48, (24, 16)
"""Number of tokens of the probe's sequences: those of the shared prefix, and those of each sequence after it. They are
more than a chunk of 64 tokens of linear attention."""
MOST_TOKENS = 1000
"""Bound of the probe's token ids: of published vocabularies, the first ones are in use."""
TOLERANCE = 1e-4
"""Largest mean difference in float32, nats per token. Rounding stays far below it, and the distance biases of a BLOOM
with small random weights make 5e-4."""


class PackedPolicy(Protocol):
    """Policy whose layout of packs is chosen here."""

    model: Any
    device: torch.device
    _layout: LayoutFunction
    _logit_transform: LogitTransform | None

    def logprobs(self, pack: Pack, cut: Cut) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probabilities of the sampled tokens of a pack, and the entropies."""
        ...


def choose(
    policy: PackedPolicy, max_length: int, streamed: StreamedModel | None = None
) -> tuple[LayoutFunction, LogitTransform | None]:
    """Return the layout of packs for a policy's model, which has no adapter yet, and the transform of the head's
    logits; None if no known transform reproduces the model's logits. streamed: the model, if it has no weights. Raises
    ResourceError if not even padded rows are exact."""
    model = policy.model
    attention.refuse_by_length(model.config.get_text_config(), max_length, _name(model))
    original_attention, sequences = model.config._attn_implementation, probe_sequences(model, max_length)
    with widened(model) if streamed is None else streamed.computing(torch.float32):
        model.set_attn_implementation("eager")  # the formula of the model's authors
        alone_S = separate_logprobs(model, sequences)
        _refuse_two_directions(model, sequences, alone_S)
        problem = _state(model) or _counted_places(model)
        if problem is None:
            model.set_attn_implementation(attention.register())
            policy._layout = trie_layout
            problem = _difference(policy, sequences, alone_S)
        if problem is not None:
            model.set_attn_implementation(original_attention)
            policy._layout = padded_layout
            log.warning(
                "%s (%s) is trained on padded batches, without prefix sharing: %s",
                *(_name(model), type(model).__name__, problem),
            )
            if (padded_problem := _difference(policy, sequences, alone_S)) is not None:
                raise ResourceError(
                    f"{_name(model)} ({type(model).__name__}) cannot be trained exactly: {padded_problem}"
                )
    with nullcontext() if streamed is None else streamed.computing():
        return policy._layout, _logit_transform(policy, sequences)


def _logit_transform(policy: PackedPolicy, sequences: Sequence[TokenSequence]) -> LogitTransform | None:
    """Return the first candidate transform that reproduces the model's logits from the head's, each within one
    rounding. Return None if no candidate does, or if the head reads something other than the last hidden states."""
    model, states, head_calls = policy.model, [], []
    hooks = [
        decoder(model).register_forward_hook(lambda *call: states.append(call[-1].last_hidden_state)),
        model.get_output_embeddings().register_forward_hook(
            lambda _, inputs, logits: head_calls.append((*inputs, logits))
        ),
    ]
    try:
        with torch.no_grad(), _refusing(model):
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


def _refuse_two_directions(model: PreTrainedModel, sequences: Sequence[TokenSequence], alone_S: torch.Tensor) -> None:
    """Raise ResourceError if the probabilities of a shared prefix depend on the tokens after it, as in an encoder."""
    first, second = alone_S.split([len(sequence.targets) for sequence in sequences])
    shared = shared_length(*(sequence.token_ids for sequence in sequences))
    common = sum(target < shared for target in sequences[0].targets)
    if (first[:common] - second[:common]).abs().median() > TOLERANCE:
        raise ResourceError(
            f"{_name(model)} ({type(model).__name__}) cannot be trained: its tokens attend to later tokens; expected a "
            "causal language model"
        )


def _state(model: PreTrainedModel) -> str | None:
    """Return the problem if layers of the model read more than the tokens that a mask allows, else None."""
    if not (names := stateful_layers(model)):
        return None
    return f"its layers {', '.join(names)} read all preceding tokens of a row, whatever the mask says"


def _counted_places(model: PreTrainedModel) -> str | None:
    """Return the problem if a layer depends on the place of a token in its row, which is not its position in a pack,
    else None. Short sequences do not show it."""
    if not getattr(model.config.get_text_config(), "attn_temperature_tuning", None):
        return None
    return "it has layers whose temperature depends on the place of a token in its row (attn_temperature_tuning)"


def probe_sequences(model: PreTrainedModel, max_length: int) -> list[TokenSequence]:
    """Return two sequences of random tokens with a shared prefix and different lengths, of at most `max_length` tokens.
    Every second token is a target, so that logits are needed at some places of a row only."""
    config = model.config.get_text_config()
    first, second = OWN
    longest = COMMON + first
    limit = getattr(config, "max_position_embeddings", None) or 0  # XLNet says -1
    length = min(longest, max_length, limit if limit > 0 else longest)
    common = length * COMMON // longest
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(min(config.vocab_size, MOST_TOKENS), (2, length), generator=generator).tolist()
    tokens[1][:common] = tokens[0][:common]
    tokens[1][common] = (tokens[0][common] + 1) % config.vocab_size
    lengths = (length, common + max(1, (length - common) * second // first))
    return [
        TokenSequence(token_ids[:end], list(range(min(2, end - 1), end, 2)))
        for token_ids, end in zip(tokens, lengths, strict=True)
    ]


def _logits(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Return the (T, V) logits of one sequence by itself, in float32."""
    with torch.no_grad():
        tokens_1T = torch.tensor([list(token_ids)], device=model.device)
        logits_TV: torch.Tensor = model(input_ids=tokens_1T, use_cache=False).logits[0]
    return logits_TV.float()


def separate_logprobs(model: PreTrainedModel, sequences: Sequence[TokenSequence]) -> torch.Tensor:
    """Return the (S,) log-probabilities of the targets, each sequence by itself. Raises ResourceError for models that
    transformers fails to compute."""
    logprobs = []
    for sequence in sequences:
        with _refusing(model):
            logps_TV = _logits(model, sequence.token_ids).log_softmax(-1)
        logprobs += [logps_TV[target - 1, sequence.token_ids[target]] for target in sequence.targets]
    return torch.stack(logprobs)


@contextmanager
def _refusing(model: PreTrainedModel) -> Iterator[None]:
    """Turn any failure of transformers within the context into a ResourceError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        text = f"{_name(model)} ({type(model).__name__}) cannot be computed: {type(error).__name__}: {error}"
        raise ResourceError(text) from error


def _packed(sequences: Sequence[TokenSequence]) -> Pack:
    """Return one pack with the same targets in the same order."""
    (packed,) = pack(sequences, most_tokens=sum(len(sequence.token_ids) for sequence in sequences))
    return packed


def _difference(policy: PackedPolicy, sequences: Sequence[TokenSequence], alone_S: torch.Tensor) -> str | None:
    """Return the problem if packed and separate log-probabilities of the probe differ by more than rounding, else
    None."""
    policy._logit_transform = None
    try:
        with torch.no_grad():
            packed_S, _ = policy.logprobs(_packed(sequences), Cut())
    except torch.OutOfMemoryError:
        raise
    except ResourceError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  a model may fail in any way on an unknown mask
        return f"{type(error).__name__}: {error}"
    mean_difference = (packed_S - alone_S).abs().mean().item()
    if mean_difference <= TOLERANCE:
        return None
    return (
        f"its attention does not depend on mask and positions alone; log-probabilities would be off by "
        f"{mean_difference:.2g} nats per token, of which rounding explains {TOLERANCE:.2g}"
    )
