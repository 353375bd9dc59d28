"""Estimates of training memory against what a training holds, and the table and messages that they give."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from components.algorithms.policy import pack_size
from components.algorithms.policy.packing import TokenSequence, pack
from components.algorithms.policy.policy import Policy
from components.algorithms.policy_gradient.spec import GRPOSpec
from components.models.distribution import Cut
from components.models.spec import ArchitectureSpec, LoraSpec, ModelSpec
from components.models.trained_weights import shapes
from components.models.training_memory import LOGIT_ROWS, ModelSize, Shape, smallest, training_memory
from components.models.weights import prepare
from flows.experiment.compose import compose
from flows.planning import training_memory as notes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "distributed.md"
TINY = ModelSpec(
    name="tiny", source="random", device="cpu", max_length=1024, architecture=ArchitectureSpec(hidden=128, layers=2)
)
LORA = LoraSpec(rank=4)
GB = 1e9
QWEN = {  # config.json of Qwen2.5: hidden, layers, intermediate, keys and values, vocabulary, tied embeddings
    "0.5B": (896, 24, 4864, 128, 151936, True),
    "1.5B": (1536, 28, 8960, 256, 151936, True),
    "7B": (3584, 28, 18944, 512, 152064, False),
    "14B": (5120, 48, 13824, 1024, 152064, False),
    "32B": (5120, 64, 27648, 1024, 152064, False),
}
PARAMETERS = {"0.5B": 0.494, "1.5B": 1.544, "7B": 7.616, "14B": 14.770, "32B": 32.764}
"""In billions, from the model cards or the sizes of the files."""


def qwen(name: str) -> dict[str, Shape]:
    hidden, layers, wide, narrow, vocabulary, tied = QWEN[name]
    weights: dict[str, Shape] = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    if not tied:
        weights["lm_head.weight"] = (vocabulary, hidden)
    matrices = {"q": (hidden, hidden), "k": (narrow, hidden), "v": (narrow, hidden), "o": (hidden, hidden)}
    matrices |= {"gate": (wide, hidden), "up": (wide, hidden), "down": (hidden, wide)}
    vectors = {"q.bias": (hidden,), "k.bias": (narrow,), "v.bias": (narrow,), "n1": (hidden,), "n2": (hidden,)}
    for layer in range(layers):
        weights |= {f"model.layers.{layer}.{part}": shape for part, shape in (matrices | vectors).items()}
    return weights


def model(lora: LoraSpec | None, dtype: str = "bfloat16") -> ModelSpec:
    return TINY.model_copy(update={"lora": lora, "dtype": dtype})


@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "lora"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_are_those_that_a_forward_pass_keeps(tmp_path_factory, lora, dtype):
    spec = model(lora, dtype)
    base_dir = prepare(spec, tmp_path_factory.getbasetemp() / "models")
    policy = Policy(base_dir, spec, 0)
    (packed,) = pack([TokenSequence(list(range(3, 103)) * 7, list(range(1, 700)))], 4096)  # logits are recomputed
    own = {parameter.untyped_storage().data_ptr() for parameter in policy.model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own and tensor.shape[-2:] != (packed.computed, packed.computed):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.logprobs(packed, Cut())
    size = ModelSize.of(shapes(base_dir))
    settings = {"processes": 1, "strategy": "ddp", "checkpointing": False, "reference": False}
    expected = training_memory(size, spec, pack_tokens=packed.computed, **settings).activations
    expected -= 4 * 4 * LOGIT_ROWS * size.vocabulary
    assert sum(storage.nbytes() for storage in kept.values()) == pytest.approx(expected, rel=0.25)


def test_sizes_are_those_of_the_published_models():
    for name, billions in PARAMETERS.items():
        assert ModelSize.of(qwen(name)).parameters / GB == pytest.approx(billions, rel=1e-3), name


def table() -> list[str]:
    """Return the rows of the page's table."""
    rows = []
    for name in QWEN:
        size, cells = ModelSize.of(qwen(name)), []
        for lora, reference in ((LoraSpec(rank=16), True), (None, False), (None, True)):
            found = smallest(size, model(lora), 80 * GB, pack_tokens=4096, reference=reference)
            assert found is not None, name
            processes, checkpointing, memory = found
            mark = " with checkpointing" if checkpointing else ""
            cells.append(f"{processes} × {memory.total / GB:.0f} GB{mark}")
        offloaded = smallest(size, model(None), 80 * GB, pack_tokens=4096, reference=False, strategy="fsdp_offload")
        assert offloaded is not None, name
        processes, checkpointing, memory = offloaded
        mark = " with checkpointing" if checkpointing else ""
        cells.append(f"{processes} × {memory.total / GB:.0f} GB{mark}, host {processes * memory.host / GB:.0f} GB")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return rows


AUTO = [
    ("0.5B", {}, 80, 1, 16384),
    ("7B", {}, 80, 1, 4096),
    ("7B", {}, 24, 1, 1024),
    ("7B", {}, 1, 1, 1024),  # nothing fits
    ("7B", {"gradient_checkpointing": True}, 24, 1, 16384),
    ("0.5B", {}, 80, 8, 4096),  # eight processes need eight packs
]
"""Model, algorithm, GB that the weights have left, processes, and the tokens of a pack."""


def test_packs_are_as_large_as_the_free_memory_of_a_gpu_allows(monkeypatch):
    for name, settings, free, processes, expected in AUTO:
        monkeypatch.setattr(pack_size, "shapes", lambda folder, name=name: qwen(name))
        request = SimpleNamespace(base_dir=None, model=model(LoraSpec(rank=16)), strategy="ddp")
        spec = GRPOSpec(**settings)
        assert pack_size.largest(spec, request, free * GB, processes) == expected, (name, settings, free, processes)
        monkeypatch.setattr(pack_size, "free_bytes", lambda device, free=free: free * GB)
        for device, changes, tokens in (
            ("cuda", {}, pack_size.largest(spec, request, free * GB, 1)),
            ("cpu", {}, 4096),
            ("cuda", {"dropout": 0.1}, 4096),
        ):
            request.model = model(LoraSpec(rank=16, **changes))
            resolved = pack_size.resolve(spec, SimpleNamespace(device=device), request)
            assert resolved.pack_tokens == tokens, (name, device, changes)
    assert GRPOSpec().key_part() == GRPOSpec(pack_tokens=4096).key_part()
    assert pack_size.resolve(GRPOSpec(pack_tokens=100), SimpleNamespace(device="cuda"), request).pack_tokens == 100


def test_the_page_has_the_table_of_what_fits():
    lines = PAGE.read_text().splitlines()
    assert [row for row in table() if row not in lines] == []


def test_a_plan_says_what_a_large_training_takes_and_where_it_fits(tmp_path, monkeypatch):
    monkeypatch.setattr(notes, "shapes", lambda folder: qwen("7B"))
    spec = compose(["+experiment=smoke", "model.lora=null", "model.dtype=bfloat16", f"root={tmp_path}"])
    (note,) = notes.memory_notes(spec, tmp_path)
    assert note.startswith("train takes about 1")
    assert "more than a device of 80 GB holds. Expected at least compute=fsdp with processes=4" in note
    assert note.endswith("On the host, 107 GB in the process that takes most")
    long = spec.model_copy(update={"model": spec.model.model_copy(update={"max_length": 10**6})})
    (note,) = notes.memory_notes(long, tmp_path)
    limit = int(re.findall(r"model\.max_length=1000000 is more than the (\d+) tokens that fit", note)[0])
    settings = {"device": notes.DEVICE, "reference": spec.algorithm.reads_reference}
    sizes = (ModelSize.of(qwen("7B")), spec.model)
    assert smallest(*sizes, **settings, pack_tokens=limit) is not None
    assert smallest(*sizes, **settings, pack_tokens=limit + 1024) is None
    monkeypatch.undo()
    assert list(notes.memory_notes(spec, tmp_path)) == []  # no weights here
