"""Base models quantized to 4 bits for adapter training: QLoRA (arXiv:2305.14314, section 3).

The weights of the linear layers are quantized once to 4-bit NormalFloat values, in blocks of 64 with a float32 scale
each (no double quantization), and stored dequantized in an ordinary model folder. Everything but the trainer reads this
folder like any other model, so sampling, merging, export and serving use the weights that are trained on. Only the
trainer stores them in 4 bits, without further loss: quantization is idempotent on quantized weights, which `write`
verifies.
"""

from __future__ import annotations

import importlib.util
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.errors import ResourceError
from components.models.files import save
from components.models.folder_limits import building, check_config, check_loaded
from components.models.stored_names import skeleton
from components.models.targets import other_modules

if TYPE_CHECKING:
    import torch

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns about faster CPU kernels on import
KIND = "nf4"
_PASSES = 3
"""Maximum quantization passes: in bfloat16, a block's scale is rounded too, so a second pass may change values."""


def check() -> None:
    """Raise ResourceError if bitsandbytes is not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ResourceError(
            "model.quantization=nf4 needs the package bitsandbytes: pip install -e '.[quantized]', or set "
            "model.quantization=none"
        )


def load(base_dir: Path, *, dtype: str, device: str, attention: str = "eager") -> Any:
    """Return the causal language model in `base_dir` with 4-bit linear layers, in evaluation mode. attention:
    implementation, by its name in transformers. The towers of a multimodal model are not quantized."""
    import torch
    from bitsandbytes.nn import Linear4bit
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    check_config(base_dir)
    computed = getattr(torch, dtype)
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=KIND,
        bnb_4bit_use_double_quant=False,
        bnb_4bit_compute_dtype=computed,
        llm_int8_skip_modules=[*towers, "lm_head"] if (towers := other_modules(skeleton(base_dir))) else None,
    )
    with building("the model of config.json", base_dir):
        model = AutoModelForCausalLM.from_pretrained(
            base_dir,
            dtype=computed,
            quantization_config=config,
            device_map={"": device},
            attn_implementation=attention,
            use_safetensors=True,
            trust_remote_code=False,
        )
    for module in model.modules():
        if isinstance(module, Linear4bit):  # repacking for inference on some CPUs would block gradients
            module.support_avx512bf16_for_cpu = False
    return model.eval()


def write(base_dir: Path, out: Path, dtype: str) -> None:
    """Write the model in `base_dir` to the folder `out`, with quantized weights in the compute dtype. Raises
    ResourceError if quantization does not converge."""
    import torch
    from bitsandbytes.nn import Linear4bit
    from transformers import AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    quantized_model = load(base_dir, dtype=dtype, device="cpu")
    names = [name for name, module in quantized_model.named_modules() if isinstance(module, Linear4bit)]
    del quantized_model
    model, loading = AutoModelForCausalLM.from_pretrained(
        base_dir,
        dtype=getattr(torch, dtype),
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    check_loaded(loading, base_dir)
    with torch.no_grad():
        for name in names:
            layer = model.get_submodule(name)
            weight_OI = layer.weight.mT if isinstance(layer, Conv1D) else layer.weight
            weight_OI.copy_(_converged(weight_OI, name))
    save(model, out)
    for path in sorted(base_dir.iterdir()):
        if path.is_file() and not (out / path.name).exists() and ".safetensors" not in path.name:
            shutil.copyfile(path, out / path.name)


def rounded(weight_OI: torch.Tensor) -> torch.Tensor:
    """Return an (O, I) weight quantized to 4 bits and dequantized."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    return dequantize_4bit(*quantize_4bit(weight_OI.contiguous(), quant_type=KIND, compress_statistics=False))


def _converged(weight_OI: torch.Tensor, name: str) -> torch.Tensor:
    for _ in range(_PASSES):
        before_OI, weight_OI = weight_OI, rounded(weight_OI)
        if weight_OI.equal(before_OI):
            return weight_OI
    raise ResourceError(f"model.quantization=nf4: the weights of {name} do not settle when they are rounded")
