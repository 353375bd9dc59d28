"""Reading and writing of a model folder with safetensors files."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.errors import ArtifactError
from components.json_text import read_json

if TYPE_CHECKING:
    import torch


def read_settings(path: Path) -> Any:
    """Return the value of a JSON file of a model's folder, which may be the user's. Raises ArtifactDamaged if it is
    invalid."""
    return read_json(path, "Repair or replace the file")


class Weights:
    """Context manager with lazy access to single tensors. framework: `pt`, or `numpy` for shapes without torch."""

    def __init__(self, folder: Path, framework: str = "pt"):
        self.folder = folder
        self._framework = framework

    def __enter__(self) -> Weights:
        from safetensors import SafetensorError, safe_open

        files = []
        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                files.append(safe_open(path, framework=self._framework))
            except (SafetensorError, OSError) as error:
                raise ArtifactError(
                    f"{path} cannot be read ({error!s:.200}): it is damaged, or not safetensors"
                ) from None
        self.where: dict[str, Any] = {name: file for file in files for name in file.offset_keys()}
        """Open file of each tensor, by tensor name."""
        return self

    def __exit__(self, *_: object) -> None:
        self.where = {}

    def get(self, name: str) -> torch.Tensor:
        """Return a tensor by name. Raises ArtifactError if it does not exist."""
        if name not in self.where:
            raise ArtifactError(f"{name} was changed, and the model in {self.folder} does not have it")
        return self.where[name].get_tensor(name)


_DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
"""Names of dtypes in safetensors, in ascending order of their place in a file."""


def write_tensors(
    path: Path | None,
    like: Mapping[str, torch.Tensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file a tensor at a time, with the bytes that `save_file` writes of all of them. like: tensors
    of the same shapes and dtypes, by name. path: None only computes the tensors, in the other processes of a training
    that gathers them."""
    import torch

    def place(name: str) -> tuple[int, str]:
        return -list(_DTYPES).index(str(like[name].dtype).removeprefix("torch.")), name

    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for name in sorted(like, key=place):
        begin, end = end, end + like[name].numel() * like[name].element_size()
        dtype = _DTYPES[str(like[name].dtype).removeprefix("torch.")]
        header[name] = {"dtype": dtype, "shape": list(like[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with contextlib.nullcontext() if path is None else open(path, "wb") as file:
        if file is not None:
            file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors:
            if file is not None:
                file.seek(8 + len(text) + header[name]["data_offsets"][0])
                file.write(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())


def save(model: Any, out: Path) -> None:
    """Write config and safetensors of a transformers model from the calling process. In distributed training, plain
    `save_pretrained` silently writes on rank 0 only."""
    model.should_save_on_this_rank = lambda is_main_process: is_main_process
    model.save_pretrained(out)
    del model.should_save_on_this_rank
