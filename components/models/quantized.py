"""A base model that is held in four bits while an adapter on it is trained: QLoRA (arXiv:2305.14314, section 3).

The weights of the linear layers are rounded once to what 4-bit NormalFloat can hold, in blocks of 64 with a float32
scale each (no double quantisation), and stored so, in a folder like that of any model. Everything but the trainer reads
this folder as it reads other models: what is sampled from, merged, exported and served are the weights that are
trained on. The trainer alone holds them in four bits, which loses nothing more: rounding what is rounded changes no
bit, and `write` checks that.
"""

from __future__ import annotations

import importlib.util
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.errors import ResourceError
from components.models.saved import save

if TYPE_CHECKING:
    import torch

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns that CPUs have faster kernels, whoever imports it
KIND = "nf4"
_PASSES = 3
"""Of rounding, at most: in bfloat16 the scale of a block is rounded too, and is then the scale of the second pass."""


def check() -> None:
    """Raises ResourceError where bitsandbytes is not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ResourceError(
            "model.quantization=nf4 needs the package bitsandbytes: pip install 'espalier[quantized]', or say "
            "model.quantization=none"
        )


def load(base_dir: Path, *, dtype: str, device: str) -> Any:
    """The causal language model in `base_dir` with its linear layers in four bits, in evaluation mode."""
    import torch
    from bitsandbytes.nn import Linear4bit
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    computed = getattr(torch, dtype)
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=KIND,
        bnb_4bit_use_double_quant=False,
        bnb_4bit_compute_dtype=computed,
    )
    model = AutoModelForCausalLM.from_pretrained(
        base_dir,
        dtype=computed,
        quantization_config=config,
        device_map={"": device},
        attn_implementation="sdpa",
        use_safetensors=True,
        trust_remote_code=False,
    )
    for module in model.modules():
        if isinstance(module, Linear4bit):  # on some CPUs it would repack itself for inference: no gradient flows then
            module.support_avx512bf16_for_cpu = False
    return model.eval()


def write(base_dir: Path, out: Path, dtype: str) -> None:
    """Writes the model in `base_dir` to the folder `out`, with rounded weights in the type that it is to compute in.
    Raises ResourceError where they cannot be rounded so that they stay what they are."""
    import torch
    from bitsandbytes.nn import Linear4bit
    from transformers import AutoModelForCausalLM

    held = load(base_dir, dtype=dtype, device="cpu")
    names = [name for name, module in held.named_modules() if isinstance(module, Linear4bit)]
    del held
    model = AutoModelForCausalLM.from_pretrained(
        base_dir, dtype=getattr(torch, dtype), use_safetensors=True, trust_remote_code=False
    )
    with torch.no_grad():
        for name in names:
            weight_OI = model.get_submodule(name).weight
            weight_OI.copy_(_settled(weight_OI, name))
    save(model, out)
    for path in sorted(base_dir.iterdir()):
        if path.is_file() and not (out / path.name).exists() and ".safetensors" not in path.name:
            shutil.copyfile(path, out / path.name)


def rounded(weight_OI: torch.Tensor) -> torch.Tensor:
    """(O, I) as four bits hold it."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    return dequantize_4bit(*quantize_4bit(weight_OI.contiguous(), quant_type=KIND, compress_statistics=False))


def _settled(weight_OI: torch.Tensor, name: str) -> torch.Tensor:
    for _ in range(_PASSES):
        before_OI, weight_OI = weight_OI, rounded(weight_OI)
        if weight_OI.equal(before_OI):
            return weight_OI
    raise ResourceError(f"model.quantization=nf4: the weights of {name} do not settle when they are rounded")
