"""What a reward model says of itself: reward_model.json, read without loading anything heavy.

The card covers the files that are read by their digests, so its own digest says what the reward model is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from components.errors import ArtifactDamaged, ArtifactError
from components.json_text import read_json
from components.models.spec import ModelSpec
from components.models.trained_weights import ADAPTER, FILE, WEIGHTS

HEADS, CARD = "heads.safetensors", "reward_model.json"
FORMAT = 1

Kind = Literal["reward_model", "process_reward_model"]


@dataclass(frozen=True)
class Head:
    """One score."""

    weight: float
    """In the reward."""
    mean: float
    """Of its scores on the data it was trained on."""
    std: float
    """Their standard deviation (of the population)."""


@dataclass(frozen=True)
class Card:
    """What a reward model says of itself."""

    kind: Kind
    """Whether it scores whole episodes or each turn."""
    model: dict[str, Any]
    """Name, source, revision and quantization of its base, and LoRA (null: all weights were trained)."""
    vocabulary: str
    """Digest of the tokenizer's vocabulary."""
    heads: dict[str, Head]


def write_card(folder: Path, kind: Kind, model: ModelSpec, vocabulary: str, heads: Mapping[str, Head]) -> None:
    """Writes reward_model.json beside what `RewardModel.save` wrote. Raises nothing of its own."""
    data = {
        "format": FORMAT,
        **asdict(Card(kind, _identity(model), vocabulary, dict(heads))),
        "files": {name: _digest(folder / name) for name in _files(folder)},
    }
    (folder / CARD).write_text(json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n")


def read_card(folder: Path) -> Card:
    """What the reward model in a folder says of itself. Raises ArtifactError where there is none, ArtifactDamaged where
    its files do not match what it says."""
    try:
        data = read_json(folder / CARD)
    except FileNotFoundError:
        raise ArtifactError(f"{folder} holds no reward model: there is no {CARD} in it") from None
    except ValueError as error:
        raise ArtifactDamaged(f"{folder / CARD} cannot be read: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else data
        raise ArtifactError(f"{folder / CARD} has format {found!r}, expected {FORMAT}: train the reward model again")
    try:
        heads = {name: Head(**one) for name, one in data["heads"].items()}
        card, files = Card(data["kind"], data["model"], data["vocabulary"], heads), dict(data["files"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ArtifactDamaged(f"{folder / CARD} is incomplete: {error!r}") from error
    for name in _files(folder):
        if not (folder / name).is_file() or _digest(folder / name) != files.get(name):
            raise ArtifactDamaged(f"{folder / name} is missing or was changed: it does not match {CARD}")
    return card


def content_digest(folder: Path) -> str:
    """sha256 of what a reward model is: its card covers all the files that are read. Raises as read_card."""
    read_card(folder)
    return _digest(folder / CARD)


def check_base(folder: Path, card: Card, model: ModelSpec) -> None:
    """Raises ArtifactError where the reward model has another base than `model`: it would read its tokens wrongly."""
    own = _identity(model)
    if other := [
        f"{name}={card.model.get(name)}"
        for name in ("name", "source", "revision", "quantization", "content")
        if card.model.get(name) != own.get(name)
    ]:
        raise ArtifactError(
            f"the reward model in {folder} was trained on another base, {', '.join(other)}, than model.name="
            f"{model.name}: tokens of the one mean nothing to the other. Train one on this base, or choose its base"
        )


def _identity(model: ModelSpec) -> dict[str, Any]:
    """What of a model its reward models depend on. Of a local folder the name, not the place."""
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
    """Those that are read."""
    if (folder / WEIGHTS).is_dir():
        return [HEADS, f"{WEIGHTS}/{FILE}"]
    return [f"{ADAPTER}/adapter_config.json", f"{ADAPTER}/adapter_model.safetensors", HEADS]


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
