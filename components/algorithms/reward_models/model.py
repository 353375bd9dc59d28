"""Reward model: a model that is trained like a policy, with heads on the hidden state of each reading.

Its checkpoint is a folder:

    adapter/ or weights/     trained weights (`models.trained_weights`)
    heads.safetensors        weight (H, M) and bias (H,); with a hidden layer its hidden.weight (M, D), hidden.bias (M,)
    reward_model.json        kind, base model, heads with their weights, mean and standard deviation of their scores in
                             training, digest of the vocabulary and of each file
    scenarios.json           training and held-out scenarios (`reward_models.examples`)
    optimizer.safetensors, trainer.json, rng.safetensors, log.jsonl     as in any checkpoint (`checkpoint`)

H counts heads, R readings (`reward_models.data`), D the hidden size, M the units of the hidden layer, or D.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from components.algorithms.loop import distributed
from components.algorithms.policy.packing import Pack
from components.algorithms.policy.policy import Policy
from components.algorithms.reward_models.card import HEADS, Card, check_base, read_card
from components.algorithms.reward_models.data import RewardEpisode, packs
from components.compute.spec import Strategy
from components.errors import ArtifactError
from components.models.spec import LoraSpec, ModelSpec
from components.models.trained_weights import folder_of


class RewardModel(Policy):
    """Reward model on the model in the local folder `base_dir`, with heads of the given names. It starts as a policy
    does; the heads' weights are drawn from N(0, 1 / (M + 1)) (arXiv:2009.01325, appendix B.1), their biases are 0.
    hidden_units: units of a layer with ReLU before the heads, drawn as by `torch.nn.Linear`; None: linear heads.

    Raises as Policy does.
    """

    def __init__(
        self,
        base_dir: Path,
        spec: ModelSpec,
        heads: Sequence[str],
        seed: int,
        strategy: Strategy = "ddp",
        hidden_units: int | None = None,
    ):
        super().__init__(base_dir, spec, seed, strategy)
        self.heads = tuple(heads)
        size = self.model.config.get_text_config().hidden_size
        self.hidden_layer = None
        if hidden_units is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                self.hidden_layer = torch.nn.Linear(size, hidden_units).to(self.device)
            size = hidden_units
        drawn = torch.randn(len(heads), size, generator=torch.Generator().manual_seed(seed)) / math.sqrt(size + 1)
        self.weight_HM = torch.nn.Parameter(drawn.to(self.device))
        self.bias_H = torch.nn.Parameter(torch.zeros(len(heads), device=self.device))

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the trained parameters by name."""
        return {**super().parameters, **{f"heads.{name}": tensor for name, tensor in self._head_tensors().items()}}

    def read(self, pack: Pack) -> torch.Tensor:
        """Return the (S, H) scores at the nodes that predict the pack's targets, in float32."""
        hidden = self.hidden(pack).float()
        if self.hidden_layer is not None:
            hidden = torch.relu(self.hidden_layer(hidden))
        score_UH = hidden @ self.weight_HM.T + self.bias_H
        return score_UH[pack.row_S.to(self.device)]

    def scores(
        self, episodes: Sequence[RewardEpisode], most_tokens: int, share: distributed.Share | None = None
    ) -> torch.Tensor:
        """Return the (R, H) scores of all readings, in order, without gradient. share: distribution of the packs over
        processes; None if a single process calls this."""
        score_RH = torch.zeros(sum(episode.readings for episode in episodes), len(self.heads), device=self.device)
        numbered_packs = packs(episodes, most_tokens, padded=self.padded)
        with torch.no_grad():
            for (number_S, packed), real in (
                share(numbered_packs) if share else ((item, True) for item in numbered_packs)
            ):
                score_SH = self.read(packed)
                if real:
                    score_RH[number_S.to(self.device)] = score_SH
        return distributed.all_reduce_sum(score_RH) if share else score_RH

    @contextlib.contextmanager
    def without_any_dropout(self) -> Iterator[None]:
        """Disable dropout within the context."""
        self.model.eval()
        try:
            yield
        finally:
            self._set_dropout()

    def load_policy_weights(self, folder: Path) -> None:
        """Load a policy's trained weights; the heads stay unchanged. Raises ArtifactError if they do not fit."""
        super().load(folder)

    def load(self, folder: Path) -> None:
        """Load saved weights, and the heads beside them. Raises ArtifactError if they do not fit."""
        from safetensors.torch import load_file

        super().load(folder)
        tensors, heads = load_file(folder.parent / HEADS), self._head_tensors()
        if {key: value.shape for key, value in tensors.items()} != {key: value.shape for key, value in heads.items()}:
            raise ArtifactError(
                f"{folder.parent / HEADS} does not contain the heads {', '.join(self.heads)} with these hidden_units"
            )
        with torch.no_grad():
            for key, value in heads.items():
                value.copy_(tensors[key])

    def save(self, folder: Path) -> None:
        """Write the trained weights, and the heads beside them."""
        from safetensors.torch import save_file

        super().save(folder)
        tensors = {key: value.detach().cpu().contiguous() for key, value in self._head_tensors().items()}
        save_file(tensors, folder.parent / HEADS)

    def _head_tensors(self) -> dict[str, torch.nn.Parameter]:
        layer = dict(self.hidden_layer.named_parameters(prefix="hidden")) if self.hidden_layer is not None else {}
        return {"weight": self.weight_HM, "bias": self.bias_H, **layer}


def load(folder: Path, base_dir: Path, model: ModelSpec) -> tuple[RewardModel, Card]:
    """Return the reward model in a folder, ready to score, and its card. model: spec of the base whose weights are in
    `base_dir`.

    Raises as read_card, and ArtifactError if the reward model has another base or another vocabulary.
    """
    from safetensors import safe_open

    card = read_card(folder)
    check_base(folder, card, model)
    if (vocabulary := vocabulary_digest(base_dir)) != card.vocabulary:
        raise ArtifactError(
            f"the reward model in {folder} was trained with another vocabulary than that of {base_dir}: digest "
            f"{card.vocabulary[:12]} is not {vocabulary[:12]}. Train it again on this model"
        )
    lora = LoraSpec(**{**card.model["lora"], "dropout": 0.0}) if card.model["lora"] else None
    base = model.model_copy(update={"lora": lora})
    with safe_open(folder / HEADS, "pt") as tensors:
        layered = "hidden.bias" in tensors.keys()  # noqa: SIM118  no iterable
        hidden_units = tensors.get_slice("hidden.bias").get_shape()[0] if layered else None
    reward_model = RewardModel(base_dir, base, list(card.heads), seed=0, hidden_units=hidden_units)
    reward_model.load(folder_of(folder))
    return reward_model, card


def vocabulary_digest(base_dir: Path) -> str:
    """Return the sha256 over the tokens of a tokenizer and their ids."""
    from components.models.weights import load_tokenizer

    tokens = sorted(load_tokenizer(base_dir).get_vocab().items())
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
