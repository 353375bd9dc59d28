"""The policy in training: a base model with a LoRA adapter that learns.

It computes the log-probabilities of the sampled tokens of a pack. The reference is the same model with its adapter
off, or with a second, frozen adapter in its place, so no second copy of the base is held.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from components.algorithms import exactness
from components.algorithms import layout as layouts
from components.algorithms.logits import Head, nothing
from components.algorithms.packing import Pack
from components.errors import ArtifactError, ResourceError
from components.models import distribution
from components.models.distribution import Cut
from components.models.lora import refuse_other_formulas
from components.models.spec import LoraSpec, ModelSpec
from components.models.weights import load_model, pick_device

if TYPE_CHECKING:
    from components.algorithms.ewc import Penalty

LEARNING, REFERENCE = "default", "reference"
LOGIT_ROWS = 512
"""Positions for which logits are in memory at a time, where there are more than that."""


class Policy:
    """base_dir: local model folder. The adapter starts as LoRA does: A random from `seed`, B zero, no change.

    Models that packs do not compute exactly, such as those with sliding windows, compute padded rows in their place.
    """

    def __init__(self, base_dir: Path, spec: ModelSpec, seed: int):
        from peft import LoraConfig, get_peft_model

        self.spec = spec
        self._again = False
        self.device = pick_device(spec.device)
        self.model = load_model(base_dir, dtype=spec.dtype, device=self.device)
        self._lay, self._after = exactness.choose(self, spec.max_length)
        torch.manual_seed(seed)
        self.model = get_peft_model(self.model, LoraConfig(**_peft_arguments(spec.lora)), adapter_name=LEARNING)
        self._set_dropout()
        self._reference: Path | None = None

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """What learns, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def adapter(self, name: str = LEARNING) -> dict[str, torch.Tensor]:
        """The adapter's tensors under PEFT's names."""
        from peft import get_peft_model_state_dict

        return get_peft_model_state_dict(self.model, adapter_name=name)

    def load(self, adapter_dir: Path, name: str = LEARNING) -> None:
        """Takes the tensors of a saved adapter. Raises ArtifactError where they do not fit."""
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        lora = self.spec.lora
        saved = json.loads((adapter_dir / "adapter_config.json").read_text())
        refuse_other_formulas(saved, adapter_dir)
        if saved["r"] != lora.rank or saved["lora_alpha"] != lora.alpha:
            raise ArtifactError(
                f"the adapter in {adapter_dir} has rank {saved['r']} and alpha {saved['lora_alpha']:g}, model.lora has "
                f"rank {lora.rank} and alpha {lora.alpha:g}. Give model.lora the adapter's values, or start without it"
            )
        tensors = load_file(adapter_dir / "adapter_model.safetensors")
        own = self.adapter(name)
        if set(own) != set(tensors) or any(own[key].shape != tensors[key].shape for key in own):
            raise ArtifactError(
                f"the adapter in {adapter_dir} is for another model or for other layers than model.lora.target_modules="
                f"{lora.target_modules}. Start from an adapter of this model, or without one"
            )
        set_peft_model_state_dict(self.model, tensors, adapter_name=name)

    def save(self, adapter_dir: Path) -> None:
        """Writes a PEFT folder. It names the base and the layers; a path would tie it to one machine."""
        from peft import LoraConfig
        from safetensors.torch import save_file

        adapter_dir.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.adapter().items()}
        save_file(tensors, adapter_dir / "adapter_model.safetensors", metadata={"format": "pt"})
        base = Path(self.spec.name)
        resolved = self.model.peft_config[LEARNING].target_modules  # `all-linear` by now stands as names of layers
        arguments = _peft_arguments(self.spec.lora) | {
            "base_model_name_or_path": base.name if base.is_dir() else self.spec.name,
            "target_modules": sorted({module.rpartition(".")[2] for module in resolved}),
        }
        text = json.dumps(LoraConfig(**arguments).to_dict(), indent=2, sort_keys=True, default=sorted)
        (adapter_dir / "adapter_config.json").write_text(text + "\n")

    def use_reference(self, adapter_dir: Path | None) -> None:
        """Chooses the reference: a saved adapter, or the base model where it is None."""
        from peft import LoraConfig

        if adapter_dir is not None:
            if REFERENCE not in self.model.peft_config:
                self.model.add_adapter(REFERENCE, LoraConfig(**_peft_arguments(self.spec.lora), inference_mode=True))
                self.model.set_adapter(LEARNING)
                self._set_dropout()
            self.load(adapter_dir, REFERENCE)
        self._reference = adapter_dir

    @contextlib.contextmanager
    def as_reference(self) -> Iterator[None]:
        """Inside, the model computes what the reference would, without gradients."""
        with torch.no_grad():
            if self._reference is None:
                with self.model.disable_adapter():
                    yield
            else:
                self.model.set_adapter(REFERENCE)
                try:
                    yield
                finally:
                    self.model.set_adapter(LEARNING)

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
        return layout.states(self._base.base_model(**layout.inputs).last_hidden_state)

    def add_adapter(self, name: str) -> None:
        """A further adapter on the same base, a copy of the one that learns, but without dropout. There may be one of
        this name already."""
        from peft import LoraConfig, set_peft_model_state_dict

        if name not in self.model.peft_config:
            self.model.add_adapter(name, LoraConfig(**_peft_arguments(self.spec.lora)))
            self.model.set_adapter(LEARNING)
            self._set_dropout()
        set_peft_model_state_dict(self.model, self.adapter(), adapter_name=name)

    @contextlib.contextmanager
    def using(self, name: str) -> Iterator[dict[str, torch.nn.Parameter]]:
        """Inside, a further adapter is the one that computes and the one that learns. Gives its parameters by name.
        PEFT takes gradients of the adapter in use only: whoever needs them calls backward inside."""
        self.model.set_adapter(name)
        try:
            yield self.parameters
        finally:
            self.model.set_adapter(LEARNING)

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
            return hidden_UD, Head(self._base.get_output_embeddings(), self._after), hidden_UD
        layout = self._lay(pack.to(self.device))
        kept, at_U = layout.place_U.unique(return_inverse=True)
        seen: list[torch.Tensor] = []
        hook = self._base.base_model.register_forward_hook(lambda *given: seen.append(given[-1].last_hidden_state))
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
    def _base(self) -> Any:
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
        if on and not self._base.supports_gradient_checkpointing:
            raise ResourceError(
                f"algorithm.gradient_checkpointing: {type(self._base).__name__} does not support it; expected false"
            )
        if on:
            self._base.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            self._base.gradient_checkpointing_disable()
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
    """(S,) log-probabilities of tokens and (S,) entropies of the rows that predict them."""
    logps_UV = torch.log_softmax(logits_UV.float() / cut.temperature, dim=-1)
    if not cut.whole:
        with torch.no_grad():
            keep_UV = distribution.kept(logps_UV, cut)
            keep_UV[row_S, token_S] = True
        logps_UV = torch.log_softmax(logps_UV.masked_fill(~keep_UV, -torch.inf), dim=-1)
    logprob_S = logps_UV[row_S, token_S]
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy_U = -(logps_UV.exp() * logps_UV.clamp(min=torch.finfo(logps_UV.dtype).min)).sum(-1)
    return logprob_S, entropy_U[row_S]


def _peft_arguments(lora: LoraSpec) -> dict:
    return {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": lora.target_modules,
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
