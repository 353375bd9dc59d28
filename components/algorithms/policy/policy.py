"""The policy in training: a base model, of which a LoRA adapter learns (`adapter`), or all weights do (`whole`).

It computes the log-probabilities of the sampled tokens of a pack, as it stands and as the reference would.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from components.algorithms.loop.loss_scale import LossScale
from components.algorithms.policy import exactness
from components.algorithms.policy import pack_layout as layouts
from components.algorithms.policy.adapter import LEARNING, Adapter
from components.algorithms.policy.full_finetuning import Whole
from components.algorithms.policy.logits import Head, nothing
from components.algorithms.policy.packing import Pack
from components.errors import ResourceError
from components.models import distribution
from components.models.distribution import Cut
from components.models.spec import ModelSpec
from components.models.weights import load_model, pick_device

if TYPE_CHECKING:
    from components.algorithms.continual.ewc import Penalty

LOGIT_ROWS = 512
"""Positions for which logits are in memory at a time, where there are more than that."""


class Policy:
    """base_dir: local model folder. It begins as the model there: the adapter changes nothing yet, its first numbers
    are drawn from `seed`.

    Models that packs do not compute exactly, such as those with sliding windows, compute padded rows in their place.
    """

    def __init__(self, base_dir: Path, spec: ModelSpec, seed: int):
        self.spec = spec
        self._again = False
        self.loss_scale = LossScale.of(spec.dtype)
        self.device = pick_device(spec.device)
        self.model = load_model(base_dir, dtype=spec.dtype, device=self.device, quantization=spec.quantization)
        self._lay, self._after = exactness.choose(self, spec.max_length)
        self._learned: Adapter | Whole = (
            Adapter(self.model, spec, seed) if spec.lora else Whole(self.model, spec, base_dir)
        )
        self.model = self._learned.model
        self._set_dropout()

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """What learns, by name."""
        return self._learned.parameters

    def folder(self, checkpoint_dir: Path) -> Path:
        """Where in a checkpoint that lies which learns."""
        return checkpoint_dir / self._learned.folder

    def load(self, folder: Path) -> None:
        """Takes what was saved. Raises ArtifactError where it does not fit."""
        self._learned.load(folder)

    def save(self, folder: Path, gathered: dict[str, torch.Tensor] | None = None) -> None:
        """Writes what learns. gathered: what `gather` gave."""
        if isinstance(self._learned, Whole):
            self._learned.save(folder, gathered)
        else:
            self._learned.save(folder)

    in_parts = False
    """Whether what learns lies in parts on several processes (`sharded`)."""

    def hold_in_parts(self, settle: Callable[..., None]) -> None:
        """From now on it does. settle: `sharded.settle` of this policy."""
        assert isinstance(self._learned, Whole), "an adapter is whole everywhere"
        self.in_parts = True
        self.settle = settle  # type: ignore[method-assign]
        self._learned.hold_in_parts(settle)

    def settle(self) -> None:
        """What learns has changed: nothing is kept that was made from it."""

    def gather(self) -> dict[str, torch.Tensor] | None:
        """What `save` writes, put together; all processes ask for it. None where each holds it whole."""
        return self._learned.tensors() if self.in_parts else None

    def use_reference(self, folder: Path | None) -> None:
        """Chooses the reference: what was saved in a folder, or the base model where it is None."""
        self._learned.use_reference(folder)
        self._set_dropout()

    @contextlib.contextmanager
    def as_reference(self) -> Iterator[None]:
        """Inside, the model computes what the reference would, without gradients."""
        with torch.no_grad(), self._learned.as_reference():
            yield

    @property
    def itself(self) -> bool:
        """False while the reference stands in the place of what learns."""
        return self._learned.itself

    def release(self) -> None:
        """Frees what is only needed while it is trained."""
        self.penalty = None
        self._learned.release()

    @property
    def adapter(self) -> Adapter | None:
        """The LoRA adapter that learns; None where all weights do."""
        return self._learned if isinstance(self._learned, Adapter) else None

    @property
    def padded(self) -> bool:
        """Whether packs are computed as padded rows, in which nothing is shared."""
        return self._lay is layouts.padded

    def logprobs(self, pack: Pack, cut: Cut, *, entropy_gradient: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """(S,) log-probabilities of the pack's sampled tokens under the distribution they were drawn from, and its (S,)
        entropies in nats, without gradient unless asked for.

        Logits are made for `LOGIT_ROWS` positions at a time, and again in the backward pass: memory does not grow with
        tokens times vocabulary, but for models that do to their logits what `logits` does not know. A token that the
        policy has moved out of a cut distribution counts as inside, so that its log-probability stays finite.
        """
        logprob_S, entropy_S, _ = self.logprobs_and_hidden(pack, cut, entropy_gradient=entropy_gradient)
        return logprob_S, entropy_S

    def logprobs_and_hidden(
        self, pack: Pack, cut: Cut, *, entropy_gradient: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What `logprobs` and `hidden` give, of one forward pass."""
        pack = pack.to(self.device)
        order_S = pack.row_S.argsort(stable=True)
        row_S, token_S = pack.row_S[order_S], pack.token_S[order_S]
        states_UX, head, hidden_UD = self._forward(pack)
        if self._after is None:
            logprob_S, entropy_S = _read(states_UX, row_S, token_S, cut, entropy_gradient)
        else:

            def read(part_UD: torch.Tensor, row_S: torch.Tensor, token_S: torch.Tensor) -> Any:
                return _read(head(part_UD), row_S, token_S, cut, entropy_gradient)

            parts = []
            for first in range(0, len(states_UX), LOGIT_ROWS):
                low, high = torch.searchsorted(row_S, torch.tensor([first, first + LOGIT_ROWS], device=self.device))
                given = states_UX[first : first + LOGIT_ROWS], row_S[low:high] - first, token_S[low:high]
                again = torch.is_grad_enabled() and len(states_UX) > LOGIT_ROWS
                parts.append(checkpoint(read, *given, use_reentrant=False) if again else read(*given))
            logprob_S, entropy_S = (torch.cat([part[side] for part in parts]) for side in (0, 1))
        back_S = order_S.argsort()
        return logprob_S[back_S], entropy_S[back_S], hidden_UD

    def hidden(self, pack: Pack) -> torch.Tensor:
        """(U, D) last hidden states, after the final norm, of the nodes from which a sampled token is predicted."""
        layout = self._lay(pack.to(self.device))
        return layout.states(self.base.base_model(**layout.inputs).last_hidden_state)

    def add_adapter(self, name: str) -> None:
        """A further adapter on the same base, a copy of the one that learns, but without dropout. There may be one of
        this name already."""
        assert self.adapter is not None, "all weights learn"
        self.adapter.copy_as(name)
        self._set_dropout()

    @contextlib.contextmanager
    def using(self, name: str) -> Iterator[dict[str, torch.nn.Parameter]]:
        """Inside, a further adapter is the one that computes and the one that learns (`Adapter.using`)."""
        assert self.adapter is not None, "all weights learn"
        with self.adapter.using(name) as parameters:
            yield parameters

    def rows(self, pack: Pack) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        """(U, X) numbers for each node from which a sampled token is predicted, and the function that makes (·, V)
        logits of some of them: hidden states and the head; for models that do to their logits what is not known,
        the logits themselves."""
        states_UX, head, _ = self._forward(pack)
        return states_UX, head

    def _forward(self, pack: Pack) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor], torch.Tensor]:
        """What `rows` and `hidden` give, of one forward pass."""
        if self._after is not None:
            hidden_UD = self.hidden(pack)
            return hidden_UD, Head(self.base.get_output_embeddings(), self._after), hidden_UD
        layout = self._lay(pack.to(self.device))
        kept, at_U = layout.place_U.unique(return_inverse=True)
        seen: list[torch.Tensor] = []
        hook = self.base.base_model.register_forward_hook(lambda *given: seen.append(given[-1].last_hidden_state))
        try:
            logits_BKV = self.model(**layout.inputs, logits_to_keep=kept).logits
        finally:
            hook.remove()
        return replace(layout, place_U=at_U).states(logits_BKV), nothing, layout.states(seen[0])

    penalty: Penalty | None = None
    """On the parameters, beside the loss."""

    def add_penalty(self) -> float:
        """Adds the penalty's gradient to that of the loss, once a gradient step; returns the penalty, 0 for none."""
        return self.penalty.add_gradient(self.parameters) if self.penalty is not None else 0.0

    @property
    def base(self) -> Any:
        """The model of transformers, its layers with their adapters where there are any."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @contextlib.contextmanager
    def without_dropout(self) -> Iterator[None]:
        """Inside nothing drops out, not even from the adapter's input: a measurement is no draw, and leaves the random
        state as it is."""
        dropping = [one for name, one in self.model.named_modules() if ".lora_dropout." in name and one.training]
        for module in dropping:
            module.training = False
        try:
            yield
        finally:
            for module in dropping:
                module.training = True

    def checkpoint_layers(self, on: bool) -> None:
        """Whether layers keep only what goes into them, and are computed again in the backward pass. Raises
        ResourceError for a model that cannot."""
        if on and not self.base.supports_gradient_checkpointing:
            raise ResourceError(
                f"algorithm.gradient_checkpointing: {type(self.base).__name__} does not support it; expected false"
            )
        if on:
            self.base.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            self.base.gradient_checkpointing_disable()
        self._again = on
        self._set_dropout()

    def _set_dropout(self) -> None:
        """Nothing drops out but what `model.lora.dropout` says: the sampler has no dropout, nor has the reference."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        self.model.eval()
        for module in self.model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = self._again  # of the layer alone: it asks for it, and its parts stay as they are
        for name, module in self.model.named_modules():
            if name.endswith(f".lora_dropout.{LEARNING}"):
                module.train()


def _read(
    logits_UV: torch.Tensor, row_S: torch.Tensor, token_S: torch.Tensor, cut: Cut, entropy_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(S,) log-probabilities of tokens and (S,) entropies of the rows that predict them.

    A token outside of the cut is added to the distribution that it is measured under, so that its log-probability is
    finite. This concerns that token alone, not others that are predicted from the same row.
    """
    logps_UV = torch.log_softmax(logits_UV.float() / cut.temperature, dim=-1)
    logprob_S = logps_UV[row_S, token_S]
    if not cut.whole:
        with torch.no_grad():
            keep_UV = distribution.kept(logps_UV, cut)
        cut_UV = logps_UV.masked_fill(~keep_UV, -torch.inf)
        mass_S = cut_UV.logsumexp(-1)[row_S]
        inside_S = keep_UV[row_S, token_S]
        logprob_S = logprob_S - torch.where(inside_S, mass_S, torch.logaddexp(mass_S, logprob_S))
        logps_UV = torch.log_softmax(cut_UV, dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy_U = -(logps_UV.exp() * logps_UV.clamp(min=torch.finfo(logps_UV.dtype).min)).sum(-1)
    return logprob_S, entropy_U[row_S]
