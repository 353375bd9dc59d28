"""Which models packs compute exactly. The others are trained on padded rows, and the log says so.

A pack says by its mask which token sees which, and by its positions how far apart they are. A model that looks at
anything else (windows, recurrent states, biases by distance, capped attention scores) would silently compute another
distribution than the one that was sampled. Windows are read from the config; everything else shows in a probe: two
short sequences, alone with the attention of transformers and together in a pack.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from components.algorithms import layout
from components.algorithms.layout import Lay
from components.algorithms.logits import After, guesses
from components.algorithms.packing import Pack, Sequence_, pack
from components.errors import ResourceError
from components.models import attention
from components.models.distribution import Cut

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from components.algorithms.policy import Policy

log = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Most nats by which the two may differ; rounding stays far below."""

_START, _ENDS = (5, 6, 7, 8), ((9, 10, 11, 12), (13, 9, 10, 14))


def choose(policy: Policy, max_length: int) -> tuple[Lay, After | None]:
    """How packs are laid out for a policy's model, which has no adapter yet, and what it does to its head's logits;
    None where no guess is what it computes. Raises ResourceError where not even padded rows are."""
    model = policy.model
    _refuse_changing_positions(model, max_length)
    own, alone_S = model.config._attn_implementation, probe_alone(model)
    why = _window(model, max_length)
    if why is None:
        model.set_attn_implementation(attention.register())
        policy._lay = layout.trie
        why = _difference(policy, alone_S)
    if why is not None:
        model.set_attn_implementation(own)
        policy._lay = layout.padded
        log.warning(
            "%s (%s) is trained on padded batches, in which nothing is shared: %s",
            *(_name(model), type(model).__name__, why),
        )
        if (still := _difference(policy, alone_S)) is not None:
            raise ResourceError(f"{_name(model)} ({type(model).__name__}) cannot be trained exactly: {still}")
    return policy._lay, _after(policy)


def _after(policy: Policy) -> After | None:
    """The first guess that makes the model's logits of its head's, each within one rounding; None where there is none,
    or where the head reads something else than the last hidden states."""
    model, states, made = policy.model, [], []
    hooks = [
        model.base_model.register_forward_hook(lambda *given: states.append(given[-1].last_hidden_state)),
        model.get_output_embeddings().register_forward_hook(lambda _, given, logits: made.append((*given, logits))),
    ]
    try:
        with torch.no_grad():
            whole_BTV = model(**policy._lay(probe_pack(model).to(policy.device)).inputs).logits
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


def _difference(policy: Policy, alone_S: torch.Tensor) -> str | None:
    """What is in the way where the two ways to compute the probe differ by more than rounding."""
    policy._after = None
    try:
        with torch.no_grad():
            packed_S, _ = policy.logprobs(probe_pack(policy.model), Cut())
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  what a model makes of a mask that it does not know
        return f"{type(error).__name__}: {error}"
    worst = (packed_S - alone_S).abs().max().item()
    if worst <= TOLERANCE[policy.model.dtype]:
        return None
    return f"its attention follows rules of its own, log-probabilities would be off by {worst:.2g} nats"


def _probe(model: PreTrainedModel) -> list[Sequence_]:
    last = model.config.get_text_config().vocab_size - 1
    return [Sequence_([min(token, last) for token in (*_START, *end)], [5, 6, 7]) for end in _ENDS]
