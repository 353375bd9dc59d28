"""Reading and writing of a model folder with safetensors files."""

from __future__ import annotations

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


def save(model: Any, out: Path) -> None:
    """Write config and safetensors of a transformers model from the calling process. In distributed training, plain
    `save_pretrained` silently writes on rank 0 only."""
    model.should_save_on_this_rank = lambda is_main_process: is_main_process
    model.save_pretrained(out)
    del model.should_save_on_this_rank
