"""Sizes, models and caches that the parts share."""

from __future__ import annotations

import contextlib
import functools
import gc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.train_step import Episode, workload


@dataclass(frozen=True)
class Size:
    """Amounts of work."""

    dimensions: tuple[int, ...]
    """Of a Qwen3 model, whose steps are measured: hidden, intermediate, layers, heads, key-value heads, dimension of a
    head, vocabulary."""
    scale: float
    """Factor of the lengths of the workloads."""
    workloads: str
    """Workloads whose steps are measured, in this order."""
    matrix: int
    """Rows of the square matrices whose product gives the matrix rate."""
    chat_model: tuple[str, str]
    """Name and source of the model that generates."""
    experiment: str
    """Override of the quickstart."""
    rows: tuple[int, ...]
    """Concurrent requests of each measurement of generation."""
    sampled: int
    """Tokens of each response."""
    prompts: int
    """Prompts of a round, each with a group of eight responses."""
    rounds: int


SIZES = {
    "qwen3": Size(
        (1024, 3072, 28, 16, 8, 128, 151_936), 1.0, "beadc", 8192,  # the dimensions of Qwen3-0.6B
        ("smollm2-135m-instruct", "package"), "+experiment=quickstart", (64, 128, 256), 128, 16, 5,
    ),
    "tiny": Size(
        (64, 128, 2, 4, 2, 32, 512), 0.05, "be", 256, ("tiny", "random"), "+experiment=smoke", (4, 8), 8, 2, 3,
    ),
}  # fmt: skip
RANK, ALPHA = 8, 16.0
GROUP = 8
MAX_LENGTH = 2048
GPU_MEMORY = 0.2
"""Share of the GPU's memory that each vLLM reserves."""


@dataclass
class Setup:
    """Settings of all parts, and what they leave to each other."""

    size: str
    device: str
    """`cpu` or `cuda`."""
    repeat: int
    """Timed steps of each side."""
    folder: Path
    """Folder for weights, caches, runs and logs."""
    vllm_python: str | None
    server: Any = None
    """vLLM server of the parts, once it is started."""
    closing: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Closed after the last part."""

    @property
    def shape(self) -> Size:
        return SIZES[self.size]

    @property
    def dtype(self) -> str:
        """Dtype of the timed parts."""
        return "bfloat16" if self.device == "cuda" else "float32"

    def spec(self, name: Any, source: str = "hub", dtype: str | None = None) -> Any:
        """Return the spec of a model with an adapter. name: that of a model, or a folder."""
        from components.models.spec import LoraSpec, ModelSpec

        settings: dict[str, Any] = {"dtype": dtype or self.dtype, "device": self.device, "max_length": MAX_LENGTH}
        return ModelSpec(name=str(name), source=source, lora=LoraSpec(rank=RANK, alpha=ALPHA), **settings)  # type: ignore[arg-type]

    def step_model(self, dtype: str | None = None) -> Any:
        """Return the spec of the model whose steps are measured."""
        return self.spec(self.base_dir, dtype=dtype)

    @property
    def chat_model(self) -> Any:
        """The spec of the model that generates."""
        return self.spec(*self.shape.chat_model)

    @functools.cached_property
    def chat_dir(self) -> Path:
        from components.models.weights import prepare

        return prepare(self.chat_model, self.folder / "models")

    def root(self, name: str) -> Path:
        """Return a new root for runs, which shares the converted weights of the others."""
        root, models = self.folder / name, self.folder / "models"
        models.mkdir(exist_ok=True)
        root.mkdir()
        (root / "models").symlink_to(models)
        return root

    @functools.cached_property
    def base_dir(self) -> Path:
        """Folder of a Qwen3 model with random weights and a byte-level tokenizer."""
        import torch
        from transformers import Qwen3ForCausalLM

        from components.models import random_weights
        from components.models.files import save

        folder = self.folder / "qwen3"
        if folder.is_dir():  # written before this process resumed
            return folder
        draft = self.folder / "qwen3-draft"
        draft.mkdir(exist_ok=True)
        random_weights._save_tokenizer(random_weights._byte_tokenizer(), draft)
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)  # stored in bfloat16, so that it is equal in every dtype
        try:
            with torch.device(self.device):
                model = Qwen3ForCausalLM(self.config)
        finally:
            torch.set_default_dtype(torch.float32)
        save(model.cpu(), draft)
        return draft.rename(folder)

    @property
    def config(self) -> Any:
        """Config of the model whose steps are measured."""
        from transformers import Qwen3Config

        hidden, intermediate, layers, heads, shared_heads, head_dim, vocabulary = self.shape.dimensions
        return Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=shared_heads,
            head_dim=head_dim,
            max_position_embeddings=40_960,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=2,
            pad_token_id=0,
        )

    def workload(self, name: str) -> list[Episode]:
        return workload(name, self.shape.dimensions[-1], self.shape.scale)

    def linear_weights(self) -> int:
        """Return the number of weights of all linear layers but the head."""
        hidden, intermediate, layers, heads, shared_heads, head_dim, _ = self.shape.dimensions
        return layers * hidden * (2 * head_dim * (heads + shared_heads) + 3 * intermediate)


def environment(folder: Path) -> dict[str, str]:
    """Return the environment variables of this process and its children: offline, and all caches below `folder`."""
    caches = {name: str(folder / name.lower()) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    return {
        **caches,
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "TQDM_DISABLE": "1",
        "WANDB_MODE": "disabled",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def free() -> None:
    """Return unused memory to the GPU."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
