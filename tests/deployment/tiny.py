"""Tiny model and adapters that change its answers, without training."""

from __future__ import annotations

import json
from pathlib import Path

from components.models.spec import ModelSpec

TINY = ModelSpec(name="tiny", source="random", max_length=512)


def write_adapter(base_dir: Path, out: Path, seed: int, rank: int = 4) -> Path:
    """Create a PEFT LoRA folder with random A and B on every projection of attention and MLP."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    with safe_open(base_dir / "model.safetensors", framework="pt") as base:
        for name in base.keys():  # noqa: SIM118 - the file is no mapping
            if name.endswith("_proj.weight"):
                rows, columns = base.get_slice(name).get_shape()
                stem = f"base_model.model.{name.removesuffix('.weight')}"
                tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, columns, generator=generator)
                tensors[f"{stem}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * 0.02
    out.mkdir(parents=True)
    save_file(tensors, out / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "bias": "none", "target_modules": "all-linear"}
    (out / "adapter_config.json").write_text(json.dumps(config))
    return out


def with_unused_decoders(folder: Path) -> Path:
    """Add SentencePiece's decoders to the byte-level tokenizer of a model folder, as a conversion from GGUF does."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    replaced = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    decoders = [{"type": "ByteFallback"}, {"type": "Fuse"}, replaced, tokenizer["decoder"]]
    path.write_text(json.dumps({**tokenizer, "decoder": {"type": "Sequence", "decoders": decoders}}))
    return folder
