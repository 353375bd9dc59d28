"""`dtype: auto`: what it resolves to, where, and what a stage key says of it."""

from __future__ import annotations

import itertools
import json
import os

import pytest
import torch
from safetensors.torch import save_file

from components.compute.dask.spec import DaskPlace
from components.compute.process.spec import ProcessPlace
from components.compute.sky.spec import SkyPlace
from components.errors import ResourceError, SpecError
from components.models import precision
from components.models.spec import LoraSpec, ModelSpec
from components.rewards.llm.spec import asked_by
from components.specs import Target

PLACES = {"here": ProcessPlace(), "gpu": SkyPlace(accelerators="H100:1"), "cpu": SkyPlace(cpus="8+")}


def checkpoint(folder, weights=(), **config):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    for number, tensor in enumerate(weights):
        save_file({f"weight_{number}": tensor}, folder / f"{number}.safetensors")
    return str(folder)


@pytest.fixture
def processor(monkeypatch, tmp_path):
    def choose(flags, *, cuda=False):
        (tmp_path / "cpuinfo").write_text(f"flags : fpu {flags} sse\n")
        monkeypatch.setattr(precision, "CPU_INFO", tmp_path / "cpuinfo")
        monkeypatch.setattr(precision, "pick_device", lambda device: "cuda" if cuda else "cpu")

    choose("avx2")
    return choose


def test_auto_is_the_stored_dtype_on_a_gpu_and_float32_on_a_cpu_without_bfloat16(processor, tmp_path):
    stored = {
        "bfloat16": checkpoint(tmp_path / "b", torch_dtype="bfloat16"),
        "float16": checkpoint(tmp_path / "h", dtype="float16"),
        "float32": checkpoint(tmp_path / "f"),  # an early checkpoint, whose config.json names none
        "files": checkpoint(tmp_path / "w", [torch.ones(2), torch.ones(3).bfloat16(), torch.ones(9).byte()]),
        "multimodal": checkpoint(tmp_path / "m", text_config={"dtype": "bfloat16"}),
    }
    cases = [
        *((name, "gpu", "auto", "avx2", name if name in ("float16", "float32") else "bfloat16") for name in stored),
        *((name, place, "auto", "avx2", "float32") for name, place in itertools.product(stored, ("here", "cpu"))),
        ("bfloat16", "gpu", "cpu", "avx2", "float32"),
        ("bfloat16", "here", "cuda", "avx2", "bfloat16"),
        ("bfloat16", "here", "auto", "avx512_bf16", "bfloat16"),
        ("bfloat16", "here", "auto", "amx_bf16", "bfloat16"),
        ("float16", "here", "auto", "amx_bf16", "float32"),
        ("bfloat16", "cpu", "auto", "amx_bf16", "float32"),  # of another machine, whose processor is unknown
    ]
    for name, place, device, flags, expected in cases:
        processor(flags)
        model = ModelSpec(name=stored[name], dtype="auto", device=device)
        resolved = precision.resolve(model, PLACES[place].hardware, tmp_path)
        assert (name, place, device, flags, resolved.dtype) == (name, place, device, flags, expected)
    processor("avx2", cuda=True)
    model = ModelSpec(name=stored["bfloat16"], dtype="auto")
    assert precision.resolve(model, "this machine", tmp_path).dtype == "bfloat16"
    assert precision.resolve(model, "this machine", tmp_path, short_adapters=True).dtype == "bfloat16"
    for name, lora, expected in (
        ("float32", LoraSpec(), "bfloat16"), ("float16", LoraSpec(), "float16"), ("float32", None, "float32")
    ):  # fmt: skip
        model = ModelSpec(name=stored[name], dtype="auto", lora=lora)
        assert precision.resolve(model, "gpu", tmp_path, short_adapters=True).dtype == expected
    for source in ("package", "random"):
        model = ModelSpec(name="tiny", source=source, dtype="auto")
        assert precision.resolve(model, "gpu", tmp_path, short_adapters=True).dtype == "bfloat16"
        assert precision.resolve(model, "cpu", tmp_path, short_adapters=True).dtype == "float32"
    for source in ("package", "random"):
        model = ModelSpec(name="tiny", source=source, dtype="auto")
        assert precision.resolve(model, "gpu", tmp_path).dtype == "float32"


def test_every_model_of_a_stage_is_resolved(processor, tmp_path):
    name = checkpoint(tmp_path / "b", dtype="bfloat16")
    judge = {"name": "embedded", "model": {"name": name, "dtype": "auto"}}
    reward = Target.model_validate({"_target_": "components.rewards.judges.ruler.Ruler", "model": judge})
    resolved = precision.resolve({"rewards": [reward]}, "gpu", tmp_path)["rewards"][0]
    assert [model.local_model.dtype for model in asked_by(resolved)] == ["bfloat16"]
    assert '"dtype": "auto"' not in json.dumps(resolved.resolved())
    settled = ModelSpec(name=name, dtype="float16")
    assert precision.resolve(settled, "gpu", tmp_path) is settled


def test_what_auto_cannot_know_is_refused(processor, tmp_path):
    model = ModelSpec(name="organisation/name", dtype="auto")
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    with pytest.raises(ResourceError, match=r"config\.json of organisation/name.*set model\.dtype=bfloat16"):
        precision.resolve(model, "gpu", tmp_path)
    with pytest.raises(ResourceError, match=r"hardware of the cluster .*model\.device=cuda"):
        precision.resolve(model, DaskPlace(address="tcp://there:8786").hardware, tmp_path)
    with pytest.raises(SpecError, match=r"model.dtype.*auto"):
        model.key_part()
