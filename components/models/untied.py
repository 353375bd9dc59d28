"""Models whose output head has weights of its own: an adapter on the head of a model with tied embeddings could not be
merged into its files, because it would change the embeddings too."""

from __future__ import annotations

import shutil
from pathlib import Path

from components.models.files import save
from components.models.spec import ModelSpec
from components.models.stored_names import skeleton
from components.models.weights import derived


def untied(base_dir: Path, spec: ModelSpec, cache: Path) -> Path:
    """Return the folder of the model in `base_dir` with an output head of its own: `base_dir` if it has one, else a
    copy in `cache`. The outputs are equal."""
    model = skeleton(base_dir)
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        return base_dir
    return derived(base_dir, "untied", spec, cache, _untie)


def _untie(spec: ModelSpec, base_dir: Path, out: Path, record: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base_dir, dtype="auto", use_safetensors=True, trust_remote_code=False)
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    save(model, out)
    for path in filter(Path.is_file, base_dir.iterdir()):
        if path.suffix != ".safetensors" and not path.name.endswith(".index.json") and not (out / path.name).exists():
            shutil.copyfile(path, out / path.name)
