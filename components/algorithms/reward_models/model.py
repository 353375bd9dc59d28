"""A reward model: a model that learns as a policy does, and linear heads on the hidden state of what is read.

Its checkpoint is a folder:

    adapter/ or weights/     what was learned (`models.learned`)
    heads.safetensors        weight (H, D) and bias (H,)
    reward_model.json        kind, base model, heads with their weights, mean and spread of their scores in training,
                             digest of the vocabulary and of each file
    scenarios.json           which scenarios it learned from, and which were held out (`reward_examples`)
    optimizer.safetensors, trainer.json, rng.safetensors, log.jsonl     as of any checkpoint (`checkpoint`)

H counts heads, R readings (`reward_data`), D the hidden size.
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
from components.algorithms.reward_models.data import Episode, packs
from components.errors import ArtifactError
from components.models.spec import LoraSpec, ModelSpec
from components.models.trained_weights import folder_of


class RewardModel(Policy):
    """base_dir: local model folder. heads: their names. It starts as a policy does; heads with weights
    drawn from N(0, 1 / (D + 1)) (arXiv:2009.01325, appendix B.1), biases 0.

    Raises as Policy does.
    """

    def __init__(self, base_dir: Path, spec: ModelSpec, heads: Sequence[str], seed: int):
        super().__init__(base_dir, spec, seed)
        self.heads = tuple(heads)
        size = self.model.config.get_text_config().hidden_size
        drawn = torch.randn(len(heads), size, generator=torch.Generator().manual_seed(seed)) / math.sqrt(size + 1)
        self.weight_HD = torch.nn.Parameter(drawn.to(self.device))
        self.bias_H = torch.nn.Parameter(torch.zeros(len(heads), device=self.device))

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """What learns, by name."""
        return {**super().parameters, "heads.weight": self.weight_HD, "heads.bias": self.bias_H}

    def read(self, pack: Pack) -> torch.Tensor:
        """(S, H) scores at the nodes that predict the pack's targets, in float32."""
        score_UH = self.hidden(pack).float() @ self.weight_HD.T + self.bias_H
        return score_UH[pack.row_S.to(self.device)]

    def scores(
        self, episodes: Sequence[Episode], most_tokens: int, share: distributed.Share | None = None
    ) -> torch.Tensor:
        """(R, H) scores of all readings, in order; without gradient. share: of the packs, by process; None where one
        process asks by itself."""
        score_RH = torch.zeros(sum(one.readings for one in episodes), len(self.heads), device=self.device)
        found = packs(episodes, most_tokens, padded=self.padded)
        with torch.no_grad():
            for (number_S, one), real in share(found) if share else ((each, True) for each in found):
                score_SH = self.read(one)
                if real:
                    score_RH[number_S.to(self.device)] = score_SH
        return distributed.add_up(score_RH) if share else score_RH

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Inside, nothing drops out."""
        self.model.eval()
        try:
            yield
        finally:
            self._set_dropout()

    def begin(self, folder: Path) -> None:
        """Takes what a policy has learned; heads stay as they are. Raises ArtifactError where it does not fit."""
        super().load(folder)

    def load(self, folder: Path) -> None:
        """Takes what was saved, and the heads beside it. Raises ArtifactError where they do not fit."""
        from safetensors.torch import load_file

        super().load(folder)
        tensors = load_file(folder.parent / HEADS)
        own = {"weight": self.weight_HD, "bias": self.bias_H}
        if {key: value.shape for key, value in tensors.items()} != {key: value.shape for key, value in own.items()}:
            raise ArtifactError(f"{folder.parent / HEADS} holds other heads than {', '.join(self.heads)}")
        with torch.no_grad():
            for key, value in own.items():
                value.copy_(tensors[key])

    def save(self, folder: Path, gathered: dict[str, torch.Tensor] | None = None) -> None:
        """Writes what learns, and the heads beside it."""
        from safetensors.torch import save_file

        super().save(folder, gathered)
        own = {"weight": self.weight_HD, "bias": self.bias_H}
        save_file({key: value.detach().cpu().contiguous() for key, value in own.items()}, folder.parent / HEADS)


def load(folder: Path, base_dir: Path, model: ModelSpec) -> tuple[RewardModel, Card]:
    """The reward model in a folder, ready to score. model: the base whose weights are in `base_dir`.

    Raises as read_card, and ArtifactError where the reward model has another base or another vocabulary.
    """
    card = read_card(folder)
    check_base(folder, card, model)
    if (found := vocabulary_digest(base_dir)) != card.vocabulary:
        raise ArtifactError(
            f"the reward model in {folder} reads tokens of another vocabulary than that of {base_dir}: {found[:12]} is "
            f"not {card.vocabulary[:12]}. Train it again on this model"
        )
    lora = LoraSpec(**{**card.model["lora"], "dropout": 0.0}) if card.model["lora"] else None
    found_model = RewardModel(base_dir, model.model_copy(update={"lora": lora}), list(card.heads), seed=0)
    found_model.load(folder_of(folder))
    return found_model, card


def vocabulary_digest(base_dir: Path) -> str:
    """sha256 over the tokens of a tokenizer and their ids."""
    from components.models.weights import load_tokenizer

    listed = sorted(load_tokenizer(base_dir).get_vocab().items())
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()
