"""Export: a trained policy as a model folder that anything can load.

What was learned is put into the base weights by the same function that the sampling engine uses, so both compute with
the same bits. The folder holds safetensors, config, tokenizer and README.md, the model card; anything else that lay
beside the base model (pickled weights, code) is left behind.
"""

from __future__ import annotations

import logging
from pathlib import Path

from components.errors import ArtifactError
from components.models.learned import merge

logger = logging.getLogger(__name__)

_KEPT = (".safetensors", ".safetensors.index.json", ".json", ".jinja", ".model", ".txt")
_DROPPED = (".bin.index.json", ".h5.index.json", ".msgpack.index.json")
_LEGAL = ("LICENSE", "LICENCE", "NOTICE")


def export(base_dir: Path, folder: Path | None, out: Path, card: str) -> int:
    """Writes the merged model with its card to the folder `out`; returns its size in bytes.

    folder: what the policy has learned (`models.learned`); None exports the base model. Raises ArtifactError where it
    does not fit the base model, or where the result would hold no safetensors or no tokenizer.
    """
    base_dir, out = Path(base_dir), Path(out)
    merge(base_dir, Path(folder) if folder else None, out)
    for path in sorted(base_dir.iterdir()):
        if path.is_file() and not _belongs(path.name):
            logger.info("%s of the base model is not exported", path.name)
            (out / path.name).unlink(missing_ok=True)
    if not list(out.glob("*.safetensors")):
        raise ArtifactError(f"{base_dir} has no safetensors weights; pickled weights are not exported")
    if not (out / "tokenizer_config.json").is_file():
        raise ArtifactError(f"{base_dir} has no tokenizer_config.json: save its tokenizer with the model first")
    (out / "README.md").write_text(card, encoding="utf-8")
    return sum(path.stat().st_size for path in out.iterdir() if path.is_file())


def _belongs(name: str) -> bool:
    return name.startswith(_LEGAL) or (name.endswith(_KEPT) and not name.endswith(_DROPPED))
