"""Loads an export as its users do, by transformers and PEFT, without our own code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from components.models.weights import load_model, load_tokenizer


def load_adapter(base_dir: Path, folder: Path, *, dtype: str, device: str) -> tuple[Any, Any]:
    """Model and tokenizer of an adapter export on the base model in `base_dir`."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(load_model(base_dir, dtype=dtype, device=device), folder)
    return model.eval(), load_tokenizer(folder)


def load_gguf(folder: Path, *, dtype: str, device: str) -> tuple[Any, Any]:
    """Model and tokenizer from the one GGUF file in a folder, and nothing else.

    transformers reads tokens, merges and weights, but splits text before merging in one way only; where the file names
    another one, it is put in, as llama.cpp does.
    """
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (file,) = folder.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=getattr(torch, dtype))
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    if GGUFReader(file).fields["tokenizer.ggml.pre"].contents() == "smollm":
        from tokenizers import pre_tokenizers as split

        digits = [split.Digits(individual_digits=True), split.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = split.Sequence(digits)
    return model.to(device).eval(), tokenizer
