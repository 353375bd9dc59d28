"""Access to the tensors of a folder of safetensors files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.errors import ArtifactError

if TYPE_CHECKING:
    import torch


class Weights:
    """Context manager with lazy access to single tensors."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __enter__(self) -> Weights:
        from safetensors import SafetensorError, safe_open

        files = []
        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                files.append(safe_open(path, framework="pt"))
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
