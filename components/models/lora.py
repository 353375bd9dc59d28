"""LoRA adapters as tensors: read them, merge them into base weights, digest them.

The merged weight is `W + (alpha / r) · B @ A` (arXiv:2106.09685, section 4.1). Adapters are PEFT folders:
`adapter_config.json` and `adapter_model.safetensors`. Variants whose merge is another formula are refused by name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from components.errors import ArtifactError

if TYPE_CHECKING:
    import torch

_PREFIX = "base_model.model."


def merged_tensors(base_dir: Path, adapter_dir: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, merged weight) for every base weight that the adapter changes; float32 sums, base dtype out.

    Raises ArtifactError for an adapter that is no plain LoRA or does not fit the base model.
    """
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file

    config = json.loads((adapter_dir / "adapter_config.json").read_text())
    for option in ("use_dora", "use_rslora", "modules_to_save", "alpha_pattern", "rank_pattern"):
        if config.get(option):
            raise ArtifactError(f"{adapter_dir}: adapters with {option} cannot be merged here; use plain LoRA")
    if config.get("bias", "none") != "none":
        raise ArtifactError(f"{adapter_dir}: adapters with trained biases cannot be merged here; use plain LoRA")
    scale = config["lora_alpha"] / config["r"]
    adapter = load_file(adapter_dir / "adapter_model.safetensors")
    with _BaseWeights(base_dir, safe_open) as base:
        for key in sorted(name for name in adapter if name.endswith(".lora_A.weight")):
            name = key.removeprefix(_PREFIX).replace(".lora_A.weight", ".weight")
            a_RI, b_OR = adapter[key].float(), adapter[key.replace(".lora_A.", ".lora_B.")].float()
            weight_OI = base.get(name)
            merged = torch.addmm(weight_OI.float(), b_OR, a_RI, alpha=scale)
            yield name, merged.to(weight_OI.dtype)


def base_tensors(base_dir: Path, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, weight) of the unchanged base model."""
    from safetensors import safe_open

    with _BaseWeights(base_dir, safe_open) as base:
        for name in names:
            yield name, base.get(name)


def merge(base_dir: Path, adapter_dir: Path | None, out: Path) -> None:
    """Writes the model in `base_dir` with the adapter merged in to `out`: config, tokenizer, safetensors."""
    import shutil

    from safetensors import safe_open
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    changed = dict(merged_tensors(base_dir, adapter_dir)) if adapter_dir else {}
    for path in sorted(base_dir.iterdir()):
        if path.suffix != ".safetensors":
            if path.is_file():
                shutil.copyfile(path, out / path.name)
            continue
        with safe_open(path, framework="pt") as file:
            tensors = {name: changed.pop(name, None) for name in file.keys()}
            tensors = {name: file.get_tensor(name) if value is None else value for name, value in tensors.items()}
            save_file(tensors, out / path.name, metadata=file.metadata() or {"format": "pt"})
    if changed:
        raise ArtifactError(f"{adapter_dir} does not fit {base_dir}: no base weight for {sorted(changed)[:3]}")


def adapter_digest(adapter_dir: Path) -> str:
    """sha256 over the adapter's tensors: name, dtype, shape and bytes of each, in order of name."""
    from safetensors.numpy import load_file

    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(adapter_dir / "adapter_model.safetensors").items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape} ".encode())
        digest.update(tensor.tobytes())
    return digest.hexdigest()


class _BaseWeights:
    """Random access to the tensors of a folder of safetensors, without loading the rest."""

    def __init__(self, base_dir: Path, safe_open):
        self.base_dir = base_dir
        self.safe_open = safe_open

    def __enter__(self):
        self.files = [self.safe_open(path, framework="pt") for path in sorted(self.base_dir.glob("*.safetensors"))]
        self.where = {name: file for file in self.files for name in file.keys()}
        return self

    def __exit__(self, *_):
        self.files, self.where = [], {}

    def get(self, name: str) -> torch.Tensor:
        if name not in self.where:
            raise ArtifactError(f"the adapter changes {name}, which the model in {self.base_dir} does not have")
        return self.where[name].get_tensor(name)
