"""Adapters of experts on a vLLM server: what it applies whole is asked for in its form, the rest is refused."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace

import pytest

from components.errors import ResourceError
from components.inference.engines.vllm import VllmSpec
from components.inference.vllm.server import options
from components.models.spec import LoraSpec
from flows.certify import certify
from flows.experiment.compose import compose
from flows.stages.base import Warm
from tests.deployment.tiny import TINY, write_adapter
from tests.inference.fake import environment
from tests.inference.test_vllm import seen
from tests.models.families import write

MIXED = "--enable-mixed-moe-lora-format"


def test_an_adapter_that_vllm_would_apply_in_part_is_refused(tmp_path):
    latent = {"model_type": "deepseek_v3", "n_routed_experts": 4, "kv_lora_rank": 32}
    for config, names, refused in (
        ({"model_type": "llama"}, "all-linear", None),
        ({"model_type": "qwen3_moe", "num_experts": 4}, ["all-linear", "gate"], None),
        ({"text_config": {"model_type": "gemma3_text"}, "model_type": "gemma3"}, "all-linear", None),
        ({"model_type": "mixtral", "num_local_experts": 4}, "all-linear", "experts and routers of mixtral"),
        ({"model_type": "mixtral", "num_local_experts": 4}, ["q_proj", "mlp.experts"], "experts and routers"),
        ({"model_type": "mixtral", "num_local_experts": 4}, ["q_proj", "gate_proj"], None),
        (latent, "all-linear", "kv_b_proj of latent attention"),
        (latent, ["o_proj", "experts"], None),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        model = TINY.model_copy(update={"lora": LoraSpec(target_modules=names)})
        with pytest.raises(ResourceError, match=refused) if refused else contextlib.nullcontext():
            VllmSpec().check_model(model, tmp_path)


def test_what_the_kernels_on_a_gpu_cannot_compute_is_refused_before_the_server_starts(start, base_dir, tmp_path):
    on_gpu = environment(tmp_path / "gpu", on_gpu=True)
    old = environment(tmp_path / "old", on_gpu=True)
    (tmp_path / "old" / "lib" / "python3.12" / "site-packages" / "vllm-0.26.0.dist-info").mkdir(parents=True)
    full, short = TINY.model_copy(update={"lora": None}), TINY.model_copy(update={"dtype": "bfloat16"})
    cases = [
        (TINY, {"python": on_gpu}, r"model\.dtype = float32: vLLM computes LoRA adapters on a GPU in 16 bits only"),
        (full, {"python": on_gpu}, None),
        (short, {"python": on_gpu}, None),
        (TINY, {"python": environment(tmp_path / "cpu")}, None),
        (TINY, {"urls": ["http://127.0.0.1:9/v1"], "arguments": {"tensor-parallel-size": 3}}, None),
        (short, {"python": old, "sleep": 2}, r"inference\.sleep = 2: vLLM 0\.26 cannot read weights again"),
        (full, {"python": old, "sleep": 2}, None),
        (short, {"arguments": {"tensor_parallel_size": 2}}, None),
        (short, {"arguments": {"tensor_parallel_size": 3}}, r"tensor-parallel-size = 3: the model has 4 .*of 1, 2, 4,"),
    ]
    for model, values, refused in cases:
        with pytest.raises(ResourceError, match=refused) if refused else contextlib.nullcontext():
            VllmSpec(**values).check_model(model, base_dir)
    host = SimpleNamespace(cache=tmp_path / "models", warm=Warm(), on_wait=print)
    with pytest.raises(ResourceError, match="16 bits only"):
        VllmSpec(python=on_gpu).build(TINY, host)
    assert not (tmp_path / "logs").exists()


def test_a_server_of_experts_loads_them_joined(base_dir, tmp_path):
    assert MIXED not in options(VllmSpec(), TINY, base_dir, 8123, on_cpu=False)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": 4}))
    assert MIXED in options(VllmSpec(), TINY, tmp_path, 8123, on_cpu=False)


def test_joined_experts_are_announced(start, connect, base_dir, tmp_path):
    server, adapter_dir = start(), write_adapter(base_dir, tmp_path / "adapter", seed=0)
    engine = connect(server)
    engine.load_policy("v1", str(adapter_dir))
    config = json.loads((adapter_dir / "adapter_config.json").read_text())
    joined = config | {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}
    (adapter_dir / "adapter_config.json").write_text(json.dumps(joined))
    engine.load_policy("v2", str(adapter_dir))
    loads = seen(server, "/v1/load_lora_adapter")
    assert [body.get("is_3d_lora_weight") for body in loads] == [None, True]


def test_a_run_is_refused_before_its_first_stage(answered, tmp_path):
    base_dirs = {family: write(family, tmp_path / family) for family in ("mixtral", "gpt2")}
    for family, setting, words in (
        ("gpt2", "compute=zero2", "strategy zero2: GPT2LMHeadModel has no layers"),
        ("mixtral", "inference=vllm", "experts and routers of mixtral"),
        ("mixtral", "model.lora.target_modules=[gate_proj]", "gate_proj is no layer of this model"),
        ("mixtral", "model.lora.dropout=0.1", "model.lora.dropout = 0.1"),
    ):
        line = "+experiment=smoke", "model=hf", f"model.name={base_dirs[family]}", f"root={tmp_path}", setting
        code, _, said = answered(*line, *(["inference.urls=[http://127.0.0.1:9/v1]"] if "vllm" in setting else []))
        assert code
        assert words in said
        assert not list((tmp_path / "artifacts").glob("[0-9a-f]*"))
    unknown = f"model.name={base_dirs['mixtral']}", "model.lora.target_modules=[gate_proj]"
    with pytest.raises(ResourceError, match="gate_proj is no layer of this model"):
        certify(compose(["+experiment=smoke", "model=hf", *unknown, f"root={tmp_path}"]), {"scenarios": 1}, [])
