"""Resolution of `dtype: auto` by the stored weights of a model and the hardware on which a stage computes.

On a GPU a model computes in the dtype in which its weights are stored, which its `config.json` states, or else the
headers of their files, here or on the hub. A CPU computes in float32; in bfloat16 if the weights are stored in it and
the processor has instructions for it. Packaged and random weights are stored in float32. On a GPU, a model with an
adapter whose engine computes adapters in 16 bits only (vLLM) is bfloat16 if it is stored in float32.

The flow resolves the models of a stage before it forms the stage key, so a key holds a dtype, and the machine that
computes the stage resolves nothing.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Literal, TypeVar

from components.errors import ResourceError
from components.models.files import Weights, read_settings
from components.models.spec import LocalModelSpec, ModelSpec, StoredDtype
from components.models.weights import folder, pick_device
from components.specs import Spec

Hardware = Literal["this machine", "gpu", "cpu", "unknown"]
"""Hardware on which a model with `device: auto` computes. `cpu`: one whose instructions are unknown."""
CPU_INFO = Path("/proc/cpuinfo")
"""Description of the processor by Linux."""
_BFLOAT16 = re.compile(r"\b(amx_bf16|avx512_bf16)\b")
"""Names of the instructions that multiply bfloat16 matrices."""
_FLOATS: dict[str, StoredDtype] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""Dtypes of safetensors in which a model can compute. Weights in other ones are quantized."""

T = TypeVar("T")


def resolve(value: T, hardware: Hardware, cache: Path, *, short_adapters: bool = False) -> T:
    """Return a spec or plain data with a dtype in place of each `auto` of a model in it.

    cache: folder of prepared weights. short_adapters: True if the engine computes the adapters of trained models in 16
    bits only on a GPU. Raises ResourceError if the hardware or the stored dtype is unknown."""
    resolve_part = partial(resolve, hardware=hardware, cache=cache, short_adapters=short_adapters)
    if isinstance(value, LocalModelSpec):
        if value.dtype != "auto":
            return value
        short = short_adapters and isinstance(value, ModelSpec) and value.lora is not None
        return value.model_copy(update={"dtype": _dtype(value, hardware, cache, short)})
    if isinstance(value, Spec):
        return value.model_copy(update={name: resolve_part(getattr(value, name)) for name in type(value).model_fields})
    if isinstance(value, Mapping):
        return {name: resolve_part(item) for name, item in value.items()}  # type: ignore[return-value]
    if isinstance(value, list | tuple):
        items = [resolve_part(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _dtype(model: LocalModelSpec, hardware: Hardware, cache: Path, short: bool) -> StoredDtype:
    if model.source != "hub" and not short:
        return "float32"
    on_gpu, bfloat16 = _abilities(model, hardware)
    if not on_gpu and not bfloat16:
        return "float32"
    stored = stored_dtype(model, cache) if model.source == "hub" else "float32"
    if on_gpu and short and stored == "float32":
        return "bfloat16"
    return stored if on_gpu or stored == "bfloat16" else "float32"


def _abilities(model: LocalModelSpec, hardware: Hardware) -> tuple[bool, bool]:
    """Return whether the model computes on a GPU, and whether a CPU on which it computes is fast in bfloat16."""
    if model.device == "auto" and hardware == "unknown":
        raise ResourceError(
            f"model.dtype = auto: the hardware of the cluster that computes with {model.name} is unknown here; "
            "expected model.dtype=bfloat16 for GPUs, float32 for CPUs, or model.device=cuda or cpu"
        )
    here = hardware == "this machine"
    device = pick_device("auto") if model.device == "auto" and here else model.device
    on_gpu = device == "cuda" or (device == "auto" and hardware == "gpu")
    return on_gpu, here and not on_gpu and has_bfloat16()


def has_bfloat16() -> bool:
    """Return True if the processor of this machine multiplies bfloat16 matrices faster than float32 ones."""
    return CPU_INFO.is_file() and _BFLOAT16.search(CPU_INFO.read_text()) is not None


def stored_dtype(model: LocalModelSpec, cache: Path) -> StoredDtype:
    """Return the dtype of the weights of a folder or of the hub, by `config.json`; if it names none, that of most of
    the weights, which is the same before and after a download; float32 if no weights have a dtype in which a model can
    compute. Raises ResourceError if the file or the weights cannot be read."""
    path = _config_file(model, cache)
    config = read_settings(path)
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    stated = [part.get("dtype") or part.get("torch_dtype") for part in parts]
    for stored in stated:
        if stored in ("bfloat16", "float16"):
            return stored
    if any(stated):
        return "float32"
    sizes = _sizes_in_files(path.parent)
    if not sizes and path.parent != Path(model.name):
        sizes = _sizes_on_hub(model.name, model.revision)
    return max(sizes, key=sizes.__getitem__, default="float32")


def _sizes_in_files(folder: Path) -> Mapping[StoredDtype, int]:
    """Return the number of stored values of each dtype in a folder, without quantized ones."""
    sizes: Counter[StoredDtype] = Counter()
    with Weights(folder) as weights:
        for name, file in weights.where.items():
            tensor = file.get_slice(name)
            if stored := _FLOATS.get(tensor.get_dtype()):
                sizes[stored] += math.prod(tensor.get_shape())
    return sizes


@cache
def _sizes_on_hub(name: str, revision: str | None) -> Mapping[StoredDtype, int]:
    """Return the number of stored values of each dtype by the headers of a model's files on the hub, without quantized
    ones."""
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import NotASafetensorsRepoError

    with _hub_errors("the headers of the weights", name):
        try:
            counts = get_safetensors_metadata(name, revision=revision).parameter_count
        except NotASafetensorsRepoError:  # the download refuses it
            return {}
    return {_FLOATS[dtype]: count for dtype, count in counts.items() if dtype in _FLOATS}


def _config_file(model: LocalModelSpec, cache: Path) -> Path:
    """Return `config.json` of a model: of its folder, of the prepared weights, or of the hub."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    path = folder(model, cache) / "config.json"
    if path.is_file():
        return path
    with _hub_errors("config.json", model.name):
        cached = try_to_load_from_cache(model.name, "config.json", revision=model.revision)
        if isinstance(cached, str):
            return Path(cached)
        return Path(hf_hub_download(model.name, "config.json", revision=model.revision))


@contextmanager
def _hub_errors(part: str, name: str) -> Iterator[None]:
    """Raise ResourceError in place of an error of the hub. part: what is read of the model."""
    from httpx import HTTPError
    from huggingface_hub.errors import HFValidationError, SafetensorsParsingError

    try:
        yield
    except (HFValidationError, HTTPError, OSError, SafetensorsParsingError) as error:
        raise ResourceError(
            f"model.dtype = auto: {part} of {name} cannot be read ({type(error).__name__}), so the dtype of its "
            "weights is unknown. Check model.name and the network, or set model.dtype=bfloat16 or float32"
        ) from None
