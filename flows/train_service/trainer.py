"""Training of the clients' models: adapters on one base, each with an optimizer of its own.

The state of a model after an optimizer step is content-addressed: its key is the digest of the state before, of the
batches since, and of the optimizer's parameters. It is written before the step counts, so after a crash the model goes
on from it; gradients of batches since then are computed again when they are needed.

    states/KEY/adapter/   PEFT folder      states/KEY/optimizer.safetensors, trainer.json   AdamW's moments
    states/KEY/state.json   metrics of the step
"""

from __future__ import annotations

import math
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from components.algorithms.client_losses import LOSSES
from components.algorithms.loop.adamw import AdamW
from components.algorithms.loop.checkpoint import load_state, save_state
from components.algorithms.policy.adapter import Adapter
from components.algorithms.policy.packing import pack
from components.algorithms.policy.policy import Policy
from components.algorithms.spec import CPU_PACK_TOKENS
from components.artifacts.keys import json_digest
from components.errors import ArtifactError, SpecError
from components.json_text import read_json, write_json
from components.models.digests import folder_digest
from components.models.distribution import Cut
from components.models.spec import LoraSpec, ModelSpec
from components.models.stored_names import skeleton
from components.models.targets import resolve
from flows.train_service.batch import BatchLimits, ClientBatch
from flows.train_service.bodies import AdamParams, LoraConfig

VERSION = 1
"""Raised when an optimizer step computes other numbers."""
ALPHA = 32.0
"""Scale of the adapters: updates are multiplied by ALPHA / rank, as those of the service whose API this is."""
ALGORITHM = "train_service"
"""Algorithm of the saved states."""


@dataclass
class Model:
    """Model of a client."""

    config: LoraConfig
    lora: LoraSpec
    name: str
    """PEFT's name of its adapter."""
    adapter: Adapter
    optimizer: AdamW
    state: str
    """Key of its last state."""
    batches: list[ClientBatch] = field(default_factory=list)
    """Batches whose gradients the next step applies."""
    computed: int = 0
    """Number of them whose gradients are in memory."""
    loss: float = 0.0
    """Sum of their losses."""


class AdapterTrainer:
    """Trains models on the base in `base_dir`. folder: of the states. spec: of the base, with its limit of tokens.

    A model for which a method raised is to be forgotten, and restored from its last state."""

    def __init__(self, base_dir: Path, spec: ModelSpec, folder: Path):
        self._base_dir, self._folder = base_dir, folder
        self.policy = Policy(base_dir, spec.model_copy(update={"lora": LoraSpec(rank=1)}), seed=0)
        assert self.policy.adapter is not None
        self._root: Adapter = self.policy.adapter
        embeddings = self.policy.base.get_input_embeddings()
        self.limits = BatchLimits(spec.max_length, int(embeddings.num_embeddings))
        self._identity = [VERSION, folder_digest(base_dir), spec.dtype]
        self._created = 0

    def create(self, config: LoraConfig) -> Model:
        """Return a new model, whose outputs are those of the base, and write its state. Raises SpecError for layers
        that the base does not have."""
        model = self._new(config, "")
        key = json_digest([*self._identity, config.model_dump()])
        self._write(model, key, {})
        return model

    def restore(self, config: LoraConfig, state: str) -> Model:
        """Return a model in a saved state."""
        model = self._new(config, state)
        self._read(model, state, optimizer=True)
        return model

    def forget(self, model: Model) -> None:
        """Free the memory of a model; `restore` brings it back."""
        self._root.model.delete_adapter(model.name)

    def forward(self, model: Model, batch: ClientBatch) -> tuple[np.ndarray, np.ndarray]:
        """Return the (S,) log-probabilities of the batch's targets, and their losses."""
        with torch.no_grad(), self.policy.activate(model.name):
            return self._pass(batch)

    def forward_backward(self, model: Model, batch: ClientBatch) -> tuple[np.ndarray, np.ndarray]:
        """Add the gradient of a batch's loss to those that the next step applies. Return the (S,) log-probabilities and
        losses. Raises SpecError for a loss that is not finite."""
        self._catch_up(model)
        result = self._backward(model, batch)
        model.batches.append(batch)
        model.computed += 1
        return result

    def optimizer_step(self, model: Model, params: AdamParams) -> dict[str, float]:
        """Apply the gradients since the last step, and write the state after it. Return the metrics of the step. Raises
        SpecError without gradients, and for gradients that are not finite."""
        if not model.batches:
            text = "no gradients since the last step; expected a forward_backward of this model before optim_step"
            raise SpecError.at("optim_step", text)
        digests = [batch.digest for batch in model.batches]
        key = json_digest([model.state, digests, params.model_dump()])
        if (self.state(key) / "state.json").is_file():
            self._read(model, key, optimizer=True)
        else:
            self._catch_up(model)
            metrics = self._step(model, params)
            self._write(model, key, metrics)
        self._drop(model)
        metrics = read_json(self.state(key) / "state.json")["metrics"]
        return dict(metrics)

    def load(self, model: Model, state: str, *, optimizer: bool) -> None:
        """Load a saved state; without its optimizer, that one begins anew. Gradients since the last step are dropped.
        Raises ArtifactError for a state of other layers or of another rank."""
        self._read(model, state, optimizer=optimizer)
        self._drop(model)
        if not optimizer:
            self._write(model, json_digest(["weights", state]), {})

    def state(self, key: str) -> Path:
        """Return the folder of a state."""
        return self._folder / key

    def _new(self, config: LoraConfig, state: str) -> Model:
        self._created += 1
        name, lora = f"model_{self._created}", self._lora(config)
        adapter = self._root.beside(lora, config.seed or 0, name, self._base_dir)
        with self.policy.activate(name) as parameters:
            return Model(config, lora, name, adapter, AdamW(list(parameters.values()), lr=0.0), state)

    def _lora(self, config: LoraConfig) -> LoraSpec:
        """Return the adapter of a client's model. Raises SpecError for layers that the base does not have."""
        model = skeleton(self._base_dir)
        layers = {name.removesuffix(".weight") for name in resolve(model, LoraSpec()).weights}
        mlp = {layer for layer in layers if any(part in layer for part in ("mlp", "experts", "feed_forward", "ffn"))}
        head = [name for name, module in model.named_modules() if module is model.get_output_embeddings()]
        parts = {"train_mlp": mlp, "train_attn": layers - mlp, "train_unembed": head}
        chosen = [layer for part, names in parts.items() if getattr(config, part) for layer in names]
        if not chosen:
            raise SpecError.at("lora_config", f"no layer to train; expected one of {', '.join(parts)} = true")
        ends = {layer.rpartition(".")[2] for layer in chosen}
        others = {layer.rpartition(".")[2] for layer in layers - set(chosen)}
        targets = sorted(ends) if not ends & others else sorted(chosen)
        return LoraSpec(rank=config.rank, alpha=ALPHA, target_modules=targets)

    def _catch_up(self, model: Model) -> None:
        """Compute the gradients of the batches that a restart lost."""
        while model.computed < len(model.batches):
            self._backward(model, model.batches[model.computed])
            model.computed += 1

    def _backward(self, model: Model, batch: ClientBatch) -> tuple[np.ndarray, np.ndarray]:
        with self.policy.activate(model.name):
            result = self._pass(batch)
        loss = float(result[1].sum(dtype=np.float64))
        if not math.isfinite(loss):
            raise SpecError.at("loss:sum", "not finite; this batch is left out of the next step")
        model.loss += loss
        return result

    def _pass(self, batch: ClientBatch) -> tuple[np.ndarray, np.ndarray]:
        """Compute a batch, with gradients where they are enabled. Return the (S,) log-probabilities and losses."""
        inputs = {name: torch.from_numpy(values.copy()) for name, values in batch.inputs.items()}
        size = len(next(iter(inputs.values())))
        logprob_S, loss_S = np.empty(size, np.float32), np.empty(size, np.float32)
        for packed in pack(batch.sequences, CPU_PACK_TOKENS, padded=self.policy.padded):
            logprob, _ = self.policy.logprobs(packed, Cut())
            of_pack = {name: values[packed.number_S].to(logprob.device) for name, values in inputs.items()}
            loss = LOSSES[batch.loss].compute(logprob, of_pack)
            if loss.requires_grad:
                loss.sum().backward()
            numbers = packed.number_S.numpy()
            logprob_S[numbers], loss_S[numbers] = (value.detach().float().cpu().numpy() for value in (logprob, loss))
        return logprob_S, loss_S

    def _step(self, model: Model, params: AdamParams) -> dict[str, float]:
        group = model.optimizer.param_groups[0]
        limit = params.grad_clip_norm or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(group["params"], limit))
        if not math.isfinite(norm):
            raise SpecError.at("optim_step", "the gradient is not finite; it is dropped, and the weights are unchanged")
        group |= {
            "lr": params.learning_rate,
            "betas": (params.beta1, params.beta2),
            "eps": params.eps,
            "weight_decay": params.weight_decay,
        }
        model.optimizer.step()
        return {"grad_norm": norm, "loss:sum": model.loss}

    def _drop(self, model: Model) -> None:
        """Drop the batches of the next step, and their gradients."""
        model.optimizer.zero_grad()
        model.batches, model.computed, model.loss = [], 0, 0.0

    def _names(self, model: Model) -> list[str]:
        with self.policy.activate(model.name) as parameters:
            return [name.replace(f".{model.name}.", ".") for name in parameters]

    def _write(self, model: Model, key: str, metrics: dict[str, Any]) -> None:
        """Write the state of a model under a key, all at once, and take it for the model's."""
        target = self.state(key)
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._folder, prefix=".draft-") as temporary:
            draft = Path(temporary) / "state"
            model.adapter.save(draft / "adapter", model.name)
            names = self._names(model)
            save_state(draft, algorithm=ALGORITHM, step=0, optimizer=model.optimizer, names=names, loss_scale={})
            write_json(draft / "state.json", {"metrics": metrics, "config": model.config.model_dump()})
            if not target.is_dir():  # equal keys have equal contents
                os.rename(draft, target)
        model.state = key

    def _read(self, model: Model, key: str, *, optimizer: bool) -> None:
        folder = self.state(key)
        if not (folder / "state.json").is_file():
            raise ArtifactError(f"the state {key[:12]} was deleted; expected that of a saved checkpoint")
        model.adapter.load(folder / "adapter", model.name)
        model.optimizer.state.clear()
        if optimizer:
            names, scale = self._names(model), self.policy.loss_scale
            load_state(folder, algorithm=ALGORITHM, optimizer=model.optimizer, names=names, loss_scale=scale)
        model.state = key
