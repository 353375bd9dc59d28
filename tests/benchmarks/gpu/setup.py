"""What all parts of the benchmark share: sizes, weights, and the device."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Size:
    """Dimensions of a Qwen3 model and of what runs on it."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    shared_heads: int
    head_dim: int
    vocabulary: int
    scale: float
    """Factor of the lengths of the workloads."""
    requests: int
    """Number of concurrent requests for generation."""
    prompt: int
    """Number of prompt characters of a request, and nearly of its tokens."""
    sampled: int
    """Number of sampled tokens of a request."""
    scenarios: int
    """Number of scenarios of a round of the overlapped run, with four episodes each."""
    rounds: int
    """Number of rounds of the overlapped run."""


SIZES = {
    "qwen3": Size(1024, 3072, 28, 16, 8, 128, 151_936, 1.0, 128, 400, 128, 16, 3),  # the dimensions of Qwen3-0.6B
    "tiny": Size(64, 128, 2, 4, 2, 32, 512, 0.1, 8, 100, 8, 2, 2),
}
RANK, ALPHA = 8, 16.0
MAX_LENGTH = 2048
PACK_TOKENS = 8192
"""Maximum number of tokens of a pack: each workload fits one."""


@dataclass(frozen=True)
class Setup:
    """Settings of a part."""

    size: str
    device: str
    """`cpu` or `cuda`."""
    repeat: int
    folder: Path
    """Folder for weights and scratch files."""
    workloads: list[str]
    vllm_python: str | None
    deadline: float
    """Reading of the monotonic clock at which a part takes no further repetition."""

    @property
    def shape(self) -> Size:
        return SIZES[self.size]

    @property
    def base_dir(self) -> Path:
        return self.folder / "model"

    @property
    def dtype(self) -> str:
        """Dtype of the timed parts."""
        return "bfloat16" if self.device == "cuda" else "float32"

    def model(self, dtype: str | None = None) -> Any:
        """Return the spec of the model with its adapter."""
        from components.models.spec import LoraSpec, ModelSpec

        lora = LoraSpec(rank=RANK, alpha=ALPHA)
        settings: dict[str, Any] = {"dtype": dtype or self.dtype, "device": self.device, "max_length": MAX_LENGTH}
        return ModelSpec(name=str(self.base_dir), lora=lora, **settings)


def write_model(setup: Setup) -> dict[str, Any]:
    """Write a Qwen3 model with random weights, and a byte-level tokenizer. Return its description."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from components.models import random_weights
    from components.models.files import save

    shape = setup.shape
    setup.base_dir.mkdir(parents=True)
    random_weights._save_tokenizer(random_weights._byte_tokenizer(), setup.base_dir)
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.shared_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)  # stored in bfloat16, so that it is equal in every dtype
    with torch.device(setup.device):
        model = Qwen3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    save(model.cpu(), setup.base_dir)
    count = sum(parameter.numel() for parameter in model.parameters())
    return {"architecture": "Qwen3", "parameters": count, "vocabulary": shape.vocabulary, "weights": "random"}


# Memory


def with_peak(device: str, call: Callable[[], T]) -> tuple[T, float]:
    """Return the result, and the MB that the call allocated beyond what was allocated before it: of the GPU by
    torch's allocator, else of resident memory."""
    if device == "cpu":
        from tests.benchmarks import train_step

        return train_step.with_peak(call)
    import torch

    gc.collect()  # the allocator keeps its blocks: to allocate them again would be part of the measured time
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    return result, round((torch.cuda.max_memory_allocated() - before) / 1e6, 1)


def free() -> None:
    """Return unused memory to the GPU."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def reason(side: str, error: BaseException) -> str:
    """Return the reason for a side that is skipped: type and first line of an error, whose traceback is logged."""
    logging.getLogger(__name__).error("%s is skipped", side, exc_info=error)
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


# Attention of the prefix trie


def attentions(device: str) -> tuple[list[str], dict[str, str]]:
    """Return the ways in which the trie's attention can be computed here, and the reasons why the others cannot."""
    from components.models import trie_attention

    if device == "cpu":
        cause = "FlexAttention has no backward pass on a CPU, where the trie computes dense blocks (`blocks`)"
        return ["blocks", "sdpa"], {"flex": cause}
    if trie_attention.flex_works():
        return ["flex", "sdpa"], {}
    return ["sdpa"], {"flex": "FlexAttention does not compile here (see the log)"}


@contextlib.contextmanager
def attention(kind: str) -> Iterator[None]:
    """Compute the trie's attention in this way within the context."""
    from components.models import trie_attention

    saved = trie_attention.mask
    if kind == "sdpa":
        trie_attention.mask = trie_attention.dense_mask
    try:
        yield
    finally:
        trie_attention.mask = saved


# Reports


class Report:
    """Result of a part, which is written after every measurement, so that a crash loses only what follows."""

    def __init__(self, path: Path):
        self.path = path
        self.result: dict[str, Any] = {}

    def update(self, **values: Any) -> None:
        self.result |= values
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(self.result))
        draft.replace(self.path)
