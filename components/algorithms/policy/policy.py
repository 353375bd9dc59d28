"""The policy in training: a base model with a trained LoRA adapter (`adapter`), with one for each role of the episodes
(`role_adapters`), or with all weights trained (`full_finetuning`).

It computes the log-probabilities of the sampled tokens of a pack, as the policy or as the reference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.checkpoint import checkpoint

from components.algorithms.loop.loss_scale import LossScale
from components.algorithms.policy import exactness, head_logprobs, sharded
from components.algorithms.policy.adapter import Adapter
from components.algorithms.policy.full_finetuning import FullFinetuning
from components.algorithms.policy.graphed import GraphedDecoder
from components.algorithms.policy.logits import LogitHead, identity
from components.algorithms.policy.packing import Layout, Pack, padded_layout
from components.algorithms.policy.role_adapters import RoleAdapters
from components.compute.spec import Strategy
from components.errors import ResourceError
from components.models import distribution
from components.models.cuda_graphs import GraphRecorder, require_gpu
from components.models.distribution import Cut
from components.models.layer_kinds import decoder
from components.models.spec import ModelSpec
from components.models.stored_names import skeleton
from components.models.streamed import StreamedModel
from components.models.weights import load_model, pick_device

LOGIT_ROWS = 512
"""Largest number of positions whose logits are in memory at a time."""


class Penalty(Protocol):
    """Penalty on the parameters that is added to the loss."""

    def add_gradient(self, parameters: dict[str, torch.nn.Parameter]) -> float:
        """Add the penalty's gradient to that of the parameters. Return the penalty."""
        ...


class Policy:
    """Policy on the model in the local folder `base_dir`. It starts as that model: a new adapter, drawn from `seed`,
    does not change the outputs. strategy: sharding over the processes, for which weights are read a layer at a time.
    Raises ResourceError for weights that cannot be sharded.

    Models that packs do not compute exactly, such as those with recurrent layers, compute padded rows instead.
    """

    def __init__(self, base_dir: Path, spec: ModelSpec, seed: int, strategy: Strategy = "ddp"):
        self.spec = spec
        self._base_dir = base_dir
        self._checkpointing = False
        self.loss_scale = LossScale.of(spec.dtype)
        self.device = pick_device(spec.device)
        streamed = None
        if strategy == "ddp":
            self.model = load_model(base_dir, dtype=spec.dtype, device=self.device, quantization=spec.quantization)
        else:
            sharded.check(skeleton(base_dir), spec, strategy)
            streamed = StreamedModel(base_dir, dtype=spec.dtype, device=self.device)
            self.model = streamed.model
        self._layout, self._logit_transform = exactness.choose(self, spec.max_length, streamed)
        self._learned: Adapter | FullFinetuning
        if spec.lora is None:
            self._learned = FullFinetuning(self.model, spec, base_dir)
        elif spec.lora.roles is None:
            self._learned = Adapter(self.model, spec, seed)
        else:
            self._learned = self._role_adapters = RoleAdapters(self.model, spec, seed)
        if isinstance(self._learned, Adapter):
            self._learned.check_base(base_dir)
        self.model = self._learned.model
        self._set_dropout()
        if streamed is not None:
            self._shard(strategy, streamed.fill)
        if spec.cuda_graphs:
            assert streamed is None, "CUDA graphs of sharded weights are refused by `TrainingGroup`"
            require_gpu(self.device)
            if self.padded:
                raise ResourceError(
                    f"model.cuda_graphs = true: {spec.name} is trained on padded rows, which have no graphs; set "
                    "model.cuda_graphs=false"
                )
            self.graphs = GraphedDecoder(decoder(self.base), GraphRecorder())

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the trained parameters by name."""
        return self._learned.parameters

    def folder(self, checkpoint_dir: Path) -> Path:
        """Return the folder of the trained weights in a checkpoint."""
        return checkpoint_dir / self._learned.folder

    def load(self, folder: Path) -> None:
        """Load saved weights. Raises ArtifactError if they do not fit."""
        self._learned.load(folder)

    def save(self, folder: Path) -> None:
        """Write the trained weights from the first process. All must call this if the weights are sharded, because they
        gather them."""
        self._learned.save(folder)

    def check_saved(self, folder: Path) -> None:
        """Load a saved adapter afresh. Raises ArtifactError if plain PEFT reads another one than was trained."""
        if isinstance(self._learned, Adapter):
            self._learned.check_saved(folder, self._base_dir)

    is_sharded = False
    """True if the trained weights are sharded over several processes (`sharded`)."""

    def _shard(self, strategy: Strategy, fill: Callable[[torch.nn.Module], None]) -> None:
        if not isinstance(self._learned, FullFinetuning):
            sharded.shard(self.base, self.spec, self.parameters.values(), strategy, fill)
            return
        sharded.shard(self.base, self.spec, None, strategy, fill)
        self.is_sharded = True
        self._learned.use_shards(partial(sharded.reshard, self.base))

    def reshard(self) -> None:
        """Discard what was computed from the trained weights, after these have changed."""
        if self.is_sharded:
            sharded.reshard(self.base)

    def use_reference(self, folder: Path | None) -> None:
        """Set the reference: saved weights in a folder, or the base model if `folder` is None."""
        self._learned.use_reference(folder)
        self._set_dropout()

    @contextlib.contextmanager
    def as_reference(self) -> Iterator[None]:
        """Compute as the reference within the context, without gradients."""
        with torch.no_grad(), self._learned.as_reference():
            yield

    @property
    def has_trained_weights(self) -> bool:
        """Return False while the reference takes the place of the trained weights."""
        return self._learned.has_trained_weights

    def release(self) -> None:
        """Free memory that only training needs."""
        self.penalty = None
        self._learned.release()

    @property
    def adapter(self) -> Adapter | None:
        """Return the trained LoRA adapter; None if all weights are trained."""
        return self._learned if isinstance(self._learned, Adapter) else None

    @property
    def padded(self) -> bool:
        """Return True if packs are computed as padded rows, without prefix sharing."""
        return self._layout is padded_layout

    _role_adapters: RoleAdapters | None = None

    @property
    def by_role(self) -> bool:
        """Return True if each role has an adapter of its own: packs then have the sequences of one role."""
        return self._role_adapters is not None

    def logprobs(self, pack: Pack, cut: Cut, *, entropy_gradient: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the (S,) log-probabilities of the pack's sampled tokens under the distribution that they were sampled
        from, and the (S,) entropies of that distribution in nats, without gradient unless `entropy_gradient` is True.

        Logits are computed for `LOGIT_ROWS` positions at a time and recomputed in the backward pass, so memory does not
        grow with tokens times vocabulary; on a GPU `head_logprobs` computes them once. A CPU recomputes them, because
        the other order of rounding would change the bytes of its checkpoints. The exception are models with an unknown
        logit transform (`logits`). A token that the policy has moved out of a truncated distribution counts as inside,
        so that its log-probability stays finite.
        """
        logprob_S, entropy_S, _ = self.logprobs_and_hidden(pack, cut, entropy_gradient=entropy_gradient)
        return logprob_S, entropy_S

    def logprobs_and_hidden(
        self, pack: Pack, cut: Cut, *, entropy_gradient: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the results of `logprobs` and `hidden` from one forward pass."""
        pack = pack.to(self.device)
        states_UX, head, hidden_UD = self._forward(pack)
        if self._logit_transform is None:
            logprob_P, entropy_U = _read(states_UX, pack.row_P, pack.token_P, cut, entropy_gradient)
        elif self.device != "cpu" and not entropy_gradient and head_logprobs.applies(head, cut):
            logprob_P, entropy_U = head_logprobs.logprobs(states_UX, head, pack, cut.temperature, LOGIT_ROWS)
        else:

            def read(part_UD: torch.Tensor, row_P: torch.Tensor, token_P: torch.Tensor) -> Any:
                return _read(head(part_UD), row_P, token_P, cut, entropy_gradient)

            parts = []
            for first in range(0, len(states_UX), LOGIT_ROWS):
                last = min(first + LOGIT_ROWS, len(states_UX))
                pairs = slice(pack.pairs_before[first], pack.pairs_before[last])
                arguments = states_UX[first:last], pack.row_P[pairs] - first, pack.token_P[pairs]
                recompute = torch.is_grad_enabled() and len(states_UX) > LOGIT_ROWS
                parts.append(checkpoint(read, *arguments, use_reentrant=False) if recompute else read(*arguments))
            logprob_P, entropy_U = (torch.cat([part[side] for part in parts]) for side in (0, 1))
        return logprob_P[pack.pair_S], entropy_U[pack.row_S], hidden_UD

    def hidden(self, pack: Pack) -> torch.Tensor:
        """Return the (U, D) last hidden states, after the final norm, of the nodes that predict a sampled token."""
        layout = self._prepared(pack)
        hidden = None
        if self.graphs is not None:
            hidden = self.graphs.hidden(pack.to(self.device), pack.role if self.by_role else "")
        return layout.states(decoder(self.base)(**layout.inputs).last_hidden_state if hidden is None else hidden)

    def add_adapter(self, name: str) -> None:
        """Add or overwrite another adapter on the same base, as a copy of the trained one without dropout."""
        assert self.adapter is not None, "the policy has no adapter: all weights are trained"
        self.adapter.copy_to(name)
        self._set_dropout()

    @contextlib.contextmanager
    def activate(self, name: str) -> Iterator[dict[str, torch.nn.Parameter]]:
        """Activate another adapter within the context, for the forward pass and for training (`Adapter.activate`)."""
        assert self.adapter is not None, "the policy has no adapter: all weights are trained"
        with self.adapter.activate(name) as parameters:
            yield parameters

    def rows(self, pack: Pack) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        """Return a (U, X) array with one row per predicting node, and the function that computes (·, V) logits from its
        rows: hidden states and the head or, for models with an unknown logit transform, the logits themselves."""
        states_UX, head, _ = self._forward(pack)
        return states_UX, head

    def _forward(self, pack: Pack) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor], torch.Tensor]:
        """Return the results of `rows` and `hidden` from one forward pass."""
        if self._logit_transform is not None:
            hidden_UD = self.hidden(pack)
            return hidden_UD, LogitHead(self.base.get_output_embeddings(), self._logit_transform), hidden_UD
        layout = self._prepared(pack)
        positions, index_U = layout.place_U.unique(return_inverse=True)
        hidden_states: list[torch.Tensor] = []
        hook = decoder(self.base).register_forward_hook(lambda *call: hidden_states.append(call[-1].last_hidden_state))
        try:
            logits_BKV = self.model(**layout.inputs, logits_to_keep=positions).logits
        finally:
            hook.remove()
        if logits_BKV.shape[1] != len(positions):  # the model ignores the argument
            logits_BKV = logits_BKV[:, positions]
        return replace(layout, place_U=index_U).states(logits_BKV), identity, layout.states(hidden_states[0])

    def _prepared(self, pack: Pack) -> Layout:
        """Return the layout of a pack, for a forward pass with the adapter of its role."""
        if self._role_adapters is not None:
            self._role_adapters.select(pack.role)
        return self._layout(pack.to(self.device))

    graphs: GraphedDecoder | None = None
    """CUDA graphs of the decoder; None without `model.cuda_graphs`."""

    penalty: Penalty | None = None
    """Penalty on the parameters that is added to the loss."""

    def add_penalty(self) -> float:
        """Add the penalty's gradient to that of the loss, once per gradient step. Return the penalty, 0 without one."""
        return self.penalty.add_gradient(self.parameters) if self.penalty is not None else 0.0

    @property
    def base(self) -> Any:
        """Return the transformers model, whose layers include their adapters if there are any."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @contextlib.contextmanager
    def without_dropout(self) -> Iterator[None]:
        """Disable dropout within the context, including that of the adapter's input: a measurement draws no random
        numbers and leaves the random state unchanged."""
        dropout_modules = [
            module for name, module in self.model.named_modules() if ".lora_dropout." in name and module.training
        ]
        for module in dropout_modules:
            module.training = False
        try:
            yield
        finally:
            for module in dropout_modules:
                module.training = True

    def checkpoint_layers(self, on: bool) -> None:
        """Enable or disable gradient checkpointing: layers store only their input and are recomputed in the backward
        pass. Raises ResourceError if the model does not support it."""
        assert not (on and self.graphs), "CUDA graphs of checkpointed layers are refused by `computing.training`"
        if on and not self.base.supports_gradient_checkpointing:
            raise ResourceError(
                f"algorithm.gradient_checkpointing = true: {type(self.base).__name__} does not support it; expected "
                "false"
            )
        if on:
            self.base.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            self.base.gradient_checkpointing_disable()
        self._checkpointing = on
        self._set_dropout()

    def _set_dropout(self) -> None:
        """Disable all dropout except `model.lora.dropout`, because neither the sampler nor the reference has
        dropout."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        self.model.eval()
        for module in self.model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                # Of this module only: checkpointing requires training mode; submodules stay in eval mode.
                module.training = self._checkpointing
        trained = self.adapter.names if self.adapter is not None else ()
        for name, module in self.model.named_modules():
            if name.rpartition(".lora_dropout.")[2] in trained:
                module.train()


def _read(
    logits_UV: torch.Tensor, row_P: torch.Tensor, token_P: torch.Tensor, cut: Cut, entropy_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the (P,) log-probabilities of tokens, and the (U,) entropies of the rows.

    A token outside the truncated distribution is added to the distribution that it is measured under, so that its
    log-probability is finite. This affects that token only, not the others predicted from the same row.
    """
    logps_UV = torch.log_softmax(logits_UV.float() / cut.temperature, dim=-1)
    logprob_P = logps_UV[row_P, token_P]
    if not cut.whole:
        with torch.no_grad():
            keep_UV = distribution.support_mask(logps_UV, cut)
        cut_UV = logps_UV.masked_fill(~keep_UV, -torch.inf)
        mass_P = cut_UV.logsumexp(-1)[row_P]
        inside_P = keep_UV[row_P, token_P]
        logprob_P = logprob_P - torch.where(inside_P, mass_P, torch.logaddexp(mass_P, logprob_P))
        logps_UV = torch.log_softmax(cut_UV, dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy_U = -(logps_UV.exp() * logps_UV.clamp(min=torch.finfo(logps_UV.dtype).min)).sum(-1)
    return logprob_P, entropy_U
