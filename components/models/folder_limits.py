"""Limits of an untrusted model folder, checked before transformers builds anything from it.

transformers creates the layers of a config and the added tokens of a tokenizer one by one: a million layers or two
million tokens take hours and all memory. So the sizes of the config must be possible with the tensors in the headers of
the safetensors files, and the number of added tokens is limited.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.errors import ResourceError
from components.json_text import read_json
from components.models.files import Weights

MAX_ADDED_TOKENS = 100_000
"""Maximum number of added tokens; published tokenizers have 7,000 at most."""
MAX_FILE = 128 << 20
"""Maximum size of a JSON file of a tokenizer or of a config, in bytes; published ones have 35 MB at most."""
_ADDED_TOKENS = {
    "tokenizer.json": "added_tokens",
    "tokenizer_config.json": "added_tokens_decoder",
    "added_tokens.json": None,
}
"""Key of the added tokens in each file of a tokenizer; None: the whole file."""
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")


def check_config(folder: Path) -> None:
    """Raise ResourceError if the config demands more than the weights have; ArtifactError if a file is damaged."""
    path = folder / "config.json"
    config = _object(path)
    if isinstance(config.get("text_config"), Mapping):
        config = config["text_config"]
    sizes = {name: config[name] for name in _SIZES if config.get(name) is not None}
    for name, size in sizes.items():
        parts = size if isinstance(size, list) and size else [size]  # some models have a size for each layer
        if any(not isinstance(part, int) or isinstance(part, bool) or part < 1 for part in parts):
            raise ResourceError(f"{path}: {name} = {size!r:.100}: expected a positive integer; repair or replace it")
        sizes[name] = max(parts)
    with Weights(folder) as weights:
        tensors = len(weights.where)
    size_in_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if not tensors:
        return
    limits = dict.fromkeys(sizes, 8 * size_in_bytes) | {"num_hidden_layers": tensors}
    for name, size in sizes.items():
        if size > limits[name]:
            raise ResourceError(
                f"{path}: {name} = {size:.6g}: its safetensors files have {tensors} tensors of {size_in_bytes} bytes, "
                "too few for it; use the config that belongs to the weights"
            )


def check_tokenizer(folder: Path) -> None:
    """Raise ResourceError if the tokenizer has too many added tokens or too large files; ArtifactError if a file is
    damaged."""
    for name, key in _ADDED_TOKENS.items():
        path = folder / name
        if not path.is_file():
            continue
        content = _object(path)
        added = content if key is None else content.get(key) or ()
        if not isinstance(added, list | dict | tuple):
            raise ResourceError(f"{path}: {key} = {added!r:.100}: expected a list of tokens; repair or replace it")
        if len(added) > MAX_ADDED_TOKENS:
            raise ResourceError(
                f"{path} adds {len(added)} tokens; expected {MAX_ADDED_TOKENS} at most: use the tokenizer of the model"
            )


def _object(path: Path) -> dict[str, Any]:
    if (size := path.stat().st_size) > MAX_FILE:
        raise ResourceError(f"{path} has {size} bytes; expected {MAX_FILE} at most: use the file of the model")
    content = read_json(path)
    if not isinstance(content, dict):
        raise ResourceError(f"{path}: expected a JSON object; repair or replace it")
    return content
