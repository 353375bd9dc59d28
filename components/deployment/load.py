"""Loading of an export as its users load it, by transformers and PEFT, without our own code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from components.models.attention import implementation
from components.models.folder_limits import building, check_gguf
from components.models.weights import load_model, load_tokenizer


def load_adapter(base_dir: Path, folder: Path, *, dtype: str, device: str) -> tuple[Any, Any]:
    """Return model and tokenizer of an adapter export on the base model in `base_dir`."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(load_model(base_dir, dtype=dtype, device=device), folder)
    return model.eval(), load_tokenizer(folder)


def load_gguf(folder: Path, *, dtype: str, device: str) -> tuple[Any, Any]:
    """Return model and tokenizer from the only GGUF file in a folder.

    transformers reads tokens, merges and weights, but supports only one way of splitting text before merging. If the
    file names another one, it is set here, as llama.cpp does.
    """
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (file,) = folder.glob("*.gguf")
    with building(f"the model of {file.name}", folder):
        reader = GGUFReader(file)
        check_gguf(file, reader)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=getattr(torch, dtype))
        model.set_attn_implementation(implementation(model.config))
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
        split_rule = reader.fields["tokenizer.ggml.pre"].contents()
    if split_rule == "smollm":
        from tokenizers import pre_tokenizers as split

        digits = [split.Digits(individual_digits=True), split.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = split.Sequence(digits)
    return model.to(device).eval(), tokenizer
