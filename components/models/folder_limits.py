"""Limits of an untrusted model folder, checked before transformers builds anything from it.

transformers creates the layers of a config and the added tokens of a tokenizer one by one: a million layers or two
million tokens take hours and all memory. So the sizes of the config must be possible with the tensors in the headers of
the safetensors files, and the number of added tokens is limited. After loading, no weight may be missing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from components.errors import EspalierError, ResourceError
from components.models.files import Weights, read_settings

logger = logging.getLogger(__name__)

MAX_ADDED_TOKENS = 100_000
"""Maximum number of added tokens; published tokenizers have 7,000 at most."""
MAX_FILE = 128 << 20
"""Maximum size of a file of a tokenizer or of a config, in bytes; published ones have 35 MB at most."""
MAX_TOKEN_ID = 10_000_000
"""Maximum token id; published vocabularies have 300,000 tokens at most, and tokenizers fills gaps between ids."""
_TOKEN_IDS = {
    "tokenizer.json": "added_tokens",
    "tokenizer_config.json": "added_tokens_decoder",
    "added_tokens.json": "",
    "vocab.json": "",
}
"""Key of the added tokens in each file of a tokenizer; empty: the whole file maps tokens to ids."""
_REPLACE = "repair or replace the file"
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
            raise ResourceError(f"{path}: {name} = {size!r:.100}: expected a positive integer; {_REPLACE}")
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
    """Raise ResourceError if the tokenizer has too many added tokens, too large token ids or too large files;
    ArtifactError if a file is damaged."""
    for path in folder.iterdir():
        if path.suffix in (".json", ".jinja", ".txt", ".model"):
            _check_size(path)
    for name, key in _TOKEN_IDS.items():
        path = folder / name
        if not path.is_file():
            continue
        content = _object(path)
        match name:
            case "tokenizer.json":
                added = content.get(key)
                if not isinstance(added, list) or not all(isinstance(token, Mapping) for token in added):
                    raise ResourceError(f"{path}: {key} = {added!r:.100}: expected a list of tokens; {_REPLACE}")
                model = content.get("model")
                vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
                ids = [token.get("id") for token in added]
                ids += vocabulary.values() if isinstance(vocabulary, Mapping) else ()
            case "tokenizer_config.json":
                added = content.get(key) or {}
                if not isinstance(added, Mapping):
                    raise ResourceError(f"{path}: {key} = {added!r:.100}: expected an object of tokens; {_REPLACE}")
                ids = [int(number) if number.isdecimal() else number for number in added]
            case _:
                added, ids = (content if name == "added_tokens.json" else ()), list(content.values())
        if len(added) > MAX_ADDED_TOKENS:
            raise ResourceError(
                f"{path} adds {len(added)} tokens; expected {MAX_ADDED_TOKENS} at most: use the tokenizer of the model"
            )
        for number in ids:
            if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= MAX_TOKEN_ID:
                raise ResourceError(
                    f"{path}: token id {number!r:.100}: expected an integer from 0 to {MAX_TOKEN_ID}; {_REPLACE}"
                )


def check_gguf(path: Path, reader: Any) -> None:
    """Raise ResourceError if the metadata of a GGUF file demand more than its tensors have. reader: its GGUFReader."""
    size_in_bytes, tensors = path.stat().st_size, len(reader.tensors)
    limits = {"block_count": tensors, "embedding_length": 8 * size_in_bytes, "feed_forward_length": 8 * size_in_bytes}
    for key, field in reader.fields.items():
        name = key.rpartition(".")[2]
        value = field.contents() if name in limits else 1
        for size in value if isinstance(value, list) else [value]:
            if not isinstance(size, int) or not 1 <= size <= limits.get(name, 1):
                raise ResourceError(
                    f"{path}: {key} = {size!r:.100}: it has {tensors} tensors in {size_in_bytes} bytes; export it again"
                )


@contextmanager
def building(subject: str, place: Path) -> Iterator[None]:
    """Turn any error of a library that builds something from untrusted files into a ResourceError that names them."""
    try:
        yield
    except EspalierError:
        raise
    except Exception as error:
        raise ResourceError(
            f"{subject} in {place} cannot be built: {type(error).__name__}: {error!s:.1000}; {_REPLACE}"
        ) from error


def _object(path: Path) -> dict[str, Any]:
    _check_size(path)
    content = read_settings(path)
    if not isinstance(content, dict):
        raise ResourceError(f"{path}: expected a JSON object; {_REPLACE}")
    return content


def _check_size(path: Path) -> None:
    if (size := path.stat().st_size) > MAX_FILE:
        raise ResourceError(f"{path} has {size} bytes; expected {MAX_FILE} at most: use the file of the model")


def check_loaded(loading: Mapping[str, Any], base_dir: Path) -> None:
    """Raise ResourceError if files lack weights of their config, which transformers would draw at random, each time
    others; warn of weights that the config does not use. loading: transformers' `output_loading_info`."""
    if missing := sorted(loading["missing_keys"]):
        raise ResourceError(
            f"the weights in {base_dir} lack {len(missing)} of the model that config.json describes: {_some(missing)}. "
            "Correct config.json, or get the whole model"
        )
    if unused := sorted(loading["unexpected_keys"]):
        logger.warning(
            "config.json in %s describes a model without %d of the weights in its files, which are not used: %s",
            *(base_dir, len(unused), _some(unused)),
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
