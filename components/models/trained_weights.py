"""Trained weights of a checkpoint: a LoRA adapter, one for each role, or all weights.

    CHECKPOINT/adapter/         PEFT folder (`lora`)
    CHECKPOINT/adapters/ROLE/   a PEFT folder for each role of the episodes (`model.lora.roles`)
    CHECKPOINT/weights/         model.safetensors: every weight, under the names of the base model's files

The sampling engine and the export both read trained models with this module, so their weights are bit-identical.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.artifacts.keys import file_digest
from components.errors import ArtifactError
from components.json_text import read_json
from components.models import lora
from components.models.files import Weights

if TYPE_CHECKING:
    import torch

ADAPTER, ADAPTERS, WEIGHTS = "adapter", "adapters", "weights"
FILE = "model.safetensors"
_OTHER_WEIGHTS = {".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx"}
"""Suffixes of files with the unmerged weights in another format."""


def folder_of(checkpoint_dir: Path) -> Path:
    """Return the folder of a checkpoint's trained weights. Raises ArtifactError if there is none."""
    for name in (ADAPTER, ADAPTERS, WEIGHTS):
        if (checkpoint_dir / name).is_dir():
            return checkpoint_dir / name
    raise ArtifactError(
        f"{checkpoint_dir} is no checkpoint: expected a folder {ADAPTER}, {ADAPTERS} or {WEIGHTS} in it"
    )


def role_folders(folder: Path) -> dict[str, Path]:
    """Return the PEFT folder of each role by role; {} for trained weights that all roles share."""
    if (folder / FILE).is_file() or (folder / "adapter_config.json").is_file() or not folder.is_dir():
        return {}
    return {path.name: path for path in sorted(folder.iterdir()) if (path / "adapter_config.json").is_file()}


def changed_tensors(base_dir: Path, folder: Path, *, float32: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, weight) for each changed weight: adapters are merged with float32 sums, in the dtype of the base or
    unrounded (`float32`); full weights are unmodified.

    Raises ArtifactError for an adapter that is not plain LoRA, and for weights that do not fit the base model.
    """
    if not is_whole(folder):
        yield from lora.merged_tensors(base_dir, folder, float32=float32)
        return
    base_shapes = shapes(base_dir)
    with Weights(folder) as weights:
        for name in sorted(weights.where):
            tensor = weights.get(name)
            if base_shapes.get(name) != tuple(tensor.shape):
                raise ArtifactError(
                    f"the weights in {folder} are those of another model than {base_dir}: {name} is "
                    f"{tuple(tensor.shape)} in the one and {base_shapes.get(name, 'missing')} in the other"
                )
            if not tensor.isfinite().all():
                raise ArtifactError(f"the weights in {folder} are damaged: {name} has values that are not finite")
            yield name, tensor


def base_tensors(base_dir: Path, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, weight) of the base model."""
    with Weights(base_dir) as base:
        for name in names:
            yield name, base.get(name)


def shapes(base_dir: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight in a model's files, by name."""
    with Weights(base_dir, framework="numpy") as base:
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in base.where.items()}


def merge(base_dir: Path, folder: Path | None, out: Path) -> None:
    """Write the model in `base_dir` with the trained weights to `out`: config, tokenizer, safetensors. folder: trained
    weights; None writes the base model.

    Weights in other formats are not copied, because they do not include the training. Raises ArtifactError if the
    trained weights do not fit the base model.
    """
    import shutil

    from safetensors import safe_open
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    changed = dict(changed_tensors(base_dir, folder)) if folder else {}
    types = {str(tensor.dtype).removeprefix("torch.") for tensor in changed.values()}
    for path in sorted(base_dir.iterdir()):
        if path.suffix != ".safetensors":
            if path.is_file() and path.suffix not in _OTHER_WEIGHTS:
                shutil.copyfile(path, out / path.name)
            continue
        with safe_open(path, framework="pt") as file:
            tensors = {name: changed.pop(name, None) for name in file.offset_keys()}
            tensors = {name: file.get_tensor(name) if value is None else value for name, value in tensors.items()}
            save_file(tensors, out / path.name, metadata=file.metadata() or {"format": "pt"})
    if changed:
        raise ArtifactError(f"{folder} does not fit {base_dir}: no base weight for {sorted(changed)[:3]}")
    if folder is not None and is_whole(folder) and len(types) == 1:
        _declare_type(out / "config.json", types.pop())


def digest(folder: Path) -> str:
    """Return the SHA-256 of trained weights: of the file with full weights, or of name, dtype, shape and bytes of each
    adapter tensor, in order of name; of adapters of several roles, that of role and digest of each, in order of
    name."""
    import torch
    from safetensors.torch import load_file

    if (folder / FILE).is_file():
        return file_digest(folder / FILE)
    sha256 = hashlib.sha256()
    if roles := role_folders(folder):
        sha256.update(json.dumps({role: digest(path) for role, path in roles.items()}).encode())
        return sha256.hexdigest()
    for name, tensor in sorted(load_file(folder / "adapter_model.safetensors").items()):
        sha256.update(f"{name} {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} ".encode())
        sha256.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()


def is_whole(folder: Path) -> bool:
    """Return True if a folder has full weights, False for an adapter. Raises ArtifactError if it has neither."""
    if (folder / FILE).is_file():
        return True
    if roles := role_folders(folder):
        raise ArtifactError(
            f"{folder} holds an adapter for each of the roles {', '.join(roles)}, which cannot be merged into one "
            "model; expected the folder of one role in it"
        )
    if not (folder / "adapter_config.json").is_file():
        raise ArtifactError(
            f"{folder} is no adapter: expected adapter_config.json and adapter_model.safetensors, or {FILE} with all "
            "weights"
        )
    return False


def _declare_type(config: Path, dtype: str) -> None:
    """Set the weights' dtype in the config."""
    data: dict[str, Any] = read_json(config)
    data.pop("torch_dtype", None)
    config.write_text(json.dumps({**data, "dtype": dtype}, indent=2, sort_keys=True) + "\n")
