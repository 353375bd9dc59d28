"""A base in four bits: everything else computes with the very weights that it holds."""

from __future__ import annotations

import asyncio

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from components.algorithms.policy.packing import TokenSequence, pack
from components.algorithms.policy.policy import Policy
from components.algorithms.policy_gradient.spec import GRPOSpec
from components.algorithms.sft.spec import SFTSpec
from components.errors import ResourceError
from components.inference.protocol import ChatRequest, Sampling
from components.models import quantized, trained_weights
from components.models.distribution import Cut
from components.models.weights import check_weights, load_model, prepare
from tests.algorithms.builders import MODEL, batch, demonstrations, train

pytest.importorskip("bitsandbytes")
NF4 = MODEL.model_copy(update={"quantization": "nf4"})
CODE = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
"""NF4's sixteen values: arXiv:2305.14314, appendix E."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def ids(text="Where is order 7?", extra=20):
    return [ord(one) % 200 + 5 for one in text] + list(range(5, 5 + extra))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounded_weights_are_the_nearest_that_four_bits_hold(cache, dtype):
    spec = NF4.model_copy(update={"dtype": dtype})
    plain, rounded = prepare(MODEL, cache), prepare(spec, cache)
    before, after = (load_file(folder / "model.safetensors") for folder in (plain, rounded))
    assert before.keys() == after.keys()
    projections = [name for name in before if name.endswith("_proj.weight")]
    assert len(projections) == 7 * len([name for name in before if name.endswith("q_proj.weight")]) > 0
    for name in before:
        if name not in projections:
            assert torch.equal(after[name], before[name].to(after[name].dtype)), name
            continue
        blocks = before[name].to(after[name].dtype).float().reshape(-1, 64)
        scale = blocks.abs().amax(1, keepdim=True)
        code = torch.tensor(CODE)
        nearest = code[((blocks / scale)[..., None] - code).abs().argmin(-1)] * scale
        tolerance = 1e-6 if dtype == "float32" else 5e-3
        off = (after[name].float().reshape(-1, 64) - nearest).abs() / scale
        assert off.max() < tolerance, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_four_bits_hold_the_rounded_weights_exactly(cache, dtype):
    """The trainer's model and a plain one of the rounded folder give the same logits, bit for bit."""
    folder = prepare(NF4.model_copy(update={"dtype": dtype}), cache)
    model = load_model(folder, dtype=dtype, quantization="nf4")
    plain = load_model(folder, dtype=dtype)
    token_ids = torch.tensor([ids()])
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    assert torch.equal(model(token_ids).logits, plain(token_ids).logits)
    assert model.get_memory_footprint() < plain.get_memory_footprint()


def test_trained_sampled_and_exported_are_the_same_policy(cache, tmp_path):
    from components.inference.transformers.engine import TransformersEngine

    base_dir, out = prepare(NF4, cache), tmp_path / "out"
    out.mkdir()
    spec = GRPOSpec(learning_rate=1e-2, kl_coefficient=0.1, gradient_checkpointing=True)
    options = {"start": None, "reference": None, "scratch": tmp_path, "seed": 1, "on_step": lambda _: None}
    train(spec, NF4, base_dir, batch(), out=out, **options)
    policy = Policy(base_dir, NF4, seed=0)
    policy.load(policy.folder(out))
    engine = TransformersEngine(base_dir, device="cpu", max_length=256)
    engine.load_policy("a", str(trained_weights.folder_of(out)))
    request = ChatRequest([{"role": "user", "content": "Hello."}], [], "a", Sampling(max_tokens=12), seed=3)
    answer = asyncio.run(engine.chat(request))
    prompt = len(answer.prompt_token_ids)
    whole = answer.prompt_token_ids + answer.token_ids
    (one,) = pack([TokenSequence(whole, list(range(prompt, len(whole))))], 1000)
    with torch.no_grad():
        logprob_S, _ = policy.logprobs(one, Cut())
    assert answer.logprobs == pytest.approx(logprob_S.tolist(), abs=1e-4)
    trained_weights.merge(base_dir, trained_weights.folder_of(out), tmp_path / "export")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert getattr(exported.config, "quantization_config", None) is None
    logp = exported(torch.tensor([whole])).logits[0].log_softmax(-1)
    expected = [logp[at - 1, whole[at]].item() for at in range(prompt, len(whole))]
    assert answer.logprobs == pytest.approx(expected, abs=1e-4)


def test_supervised_training_leaves_the_adapter_in_float32(cache, tmp_path):
    (tmp_path / "out").mkdir()
    options = {"start": None, "reference": None, "scratch": tmp_path, "seed": 1, "on_step": lambda _: None}
    train(SFTSpec(), NF4, prepare(NF4, cache), demonstrations(), out=tmp_path / "out", **options)
    tensors = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


def test_only_the_adapter_learns(cache):
    policy = Policy(prepare(NF4, cache), NF4, seed=0)
    assert all("lora_" in name for name in policy.parameters)


def test_rounded_once_for_every_process(cache):
    first = prepare(NF4, cache)
    before = (first / "model.safetensors").stat().st_mtime_ns
    assert prepare(NF4, cache) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == before
    assert prepare(MODEL, cache) != first


def test_a_folder_that_changed_is_rounded_again(cache, tmp_path):
    import shutil

    shutil.copytree(prepare(MODEL, cache), tmp_path / "own")
    spec = NF4.model_copy(update={"name": str(tmp_path / "own"), "source": "hub"})
    first = prepare(spec, cache)
    from safetensors.torch import save_file

    tensors = {name: tensor * 2 for name, tensor in load_file(tmp_path / "own" / "model.safetensors").items()}
    save_file(tensors, tmp_path / "own" / "model.safetensors", metadata={"format": "pt"})
    assert prepare(spec, cache) != first


def test_without_the_package_it_is_refused_before_anything_starts(cache, monkeypatch):
    find = quantized.importlib.util.find_spec
    monkeypatch.setattr(
        quantized.importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find(name)
    )
    with pytest.raises(ResourceError, match=r"pip install -e '\.\[quantized\]'"):
        check_weights(NF4, cache)


def test_weights_that_do_not_settle_are_refused(monkeypatch):
    monkeypatch.setattr(quantized, "rounded", lambda weight: weight + 1)
    with pytest.raises(ResourceError, match="do not settle"):
        quantized._converged(torch.zeros(2, 2), "layer")
