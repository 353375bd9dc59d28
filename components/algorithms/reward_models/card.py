"""Card of a reward model: reward_model.json, read without heavy imports.

The card contains the digests of the model's files, so the digest of the card identifies the reward model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from components.artifacts.keys import file_digest
from components.errors import ArtifactDamaged, ArtifactError
from components.json_text import read_json
from components.models.spec import ModelSpec
from components.models.trained_weights import ADAPTER, FILE, WEIGHTS

HEADS, CARD = "heads.safetensors", "reward_model.json"
FORMAT = 1

Kind = Literal["reward_model", "process_reward_model"]


@dataclass(frozen=True)
class RewardHead:
    """One score of a reward model."""

    weight: float
    """Weight of the score in the reward."""
    mean: float
    """Mean of its scores on the training data."""
    std: float
    """Population standard deviation of its scores on the training data."""


@dataclass(frozen=True)
class Card:
    """Description of a reward model."""

    kind: Kind
    """`reward_model` scores whole episodes, `process_reward_model` each turn."""
    model: dict[str, Any]
    """Name, source, revision and quantization of the base model, and LoRA (null: full fine-tuning)."""
    vocabulary: str
    """Digest of the tokenizer's vocabulary."""
    heads: dict[str, RewardHead]


def write_card(folder: Path, kind: Kind, model: ModelSpec, vocabulary: str, heads: Mapping[str, RewardHead]) -> None:
    """Write reward_model.json beside the files of `RewardModel.save`."""
    data = {
        "format": FORMAT,
        **asdict(Card(kind, _identity(model), vocabulary, dict(heads))),
        "files": {name: file_digest(folder / name) for name in _files(folder)},
    }
    (folder / CARD).write_text(json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n")


def read_card(folder: Path) -> Card:
    """Return the card of the reward model in a folder. Raises ArtifactError if there is none or its format differs,
    ArtifactDamaged if the card is unreadable or the files do not match its digests."""
    try:
        data = read_json(folder / CARD)
    except FileNotFoundError:
        raise ArtifactError(f"{folder} contains no reward model: {CARD} is missing") from None
    except ValueError as error:
        raise ArtifactDamaged(f"{folder / CARD} cannot be read: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        actual_format = data.get("format") if isinstance(data, dict) else data
        raise ArtifactError(
            f"{folder / CARD} has format {actual_format!r}, expected {FORMAT}: train the reward model again"
        )
    try:
        heads = {name: RewardHead(**values) for name, values in data["heads"].items()}
        card, files = Card(data["kind"], data["model"], data["vocabulary"], heads), dict(data["files"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ArtifactDamaged(f"{folder / CARD} is incomplete: {error!r}") from error
    for name in _files(folder):
        if not (folder / name).is_file() or file_digest(folder / name) != files.get(name):
            raise ArtifactDamaged(f"{folder / name} is missing or was changed: it does not match {CARD}")
    return card


def content_digest(folder: Path) -> str:
    """Return the sha256 of the card, which covers all files of the reward model. Raises as read_card."""
    read_card(folder)
    return file_digest(folder / CARD)


def check_base(folder: Path, card: Card, model: ModelSpec) -> None:
    """Raise ArtifactError if the base of the reward model differs from `model`, because token ids would have another
    meaning."""
    expected = _identity(model)
    if differences := [
        f"{name}={card.model.get(name)}"
        for name in ("name", "source", "revision", "quantization", "content")
        if card.model.get(name) != expected.get(name)
    ]:
        raise ArtifactError(
            f"the reward model in {folder} was trained on another base, {', '.join(differences)}, than model.name="
            f"{model.name}, so token ids differ. Train a reward model on this base, or set model.name to its base"
        )


def _identity(model: ModelSpec) -> dict[str, Any]:
    """Return the properties of a model that its reward models depend on. For a local folder, the name without the
    path."""
    name = Path(model.name).name if Path(model.name).is_dir() else model.name
    return {
        "name": name,
        "source": model.source,
        "revision": model.revision,
        "quantization": model.quantization,
        "lora": model.lora.model_dump(mode="json") if model.lora else None,
        **model.content(),
    }


def _files(folder: Path) -> list[str]:
    """Return the files of a reward model that scoring reads."""
    if (folder / WEIGHTS).is_dir():
        return [HEADS, f"{WEIGHTS}/{FILE}"]
    return [f"{ADAPTER}/adapter_config.json", f"{ADAPTER}/adapter_model.safetensors", HEADS]
