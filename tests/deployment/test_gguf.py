"""GGUF export: another program's reader loads the same model, and an unsupported model is rejected by name."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from gguf import GGUFReader
from safetensors.numpy import load_file

from components.deployment.answers import TOLERANCE, answers_of, check_answers
from components.deployment.check import opening_requests
from components.deployment.export import export_adapter, export_gguf, export_merged
from components.deployment.gguf import check_architecture, write_gguf
from components.deployment.load import load_adapter, load_gguf
from components.errors import ArtifactError, EngineError, ResourceError
from components.inference.transformers.engine import TransformersEngine
from components.models.weights import load_model, load_tokenizer
from tests.deployment.small import write_llama
from tests.deployment.tiny import write_adapter


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("llama") / "base")


@pytest.fixture(scope="module")
def adapter(llama, tmp_path_factory):
    return write_adapter(llama, tmp_path_factory.mktemp("adapter") / "trained", seed=1)


@pytest.fixture(scope="module")
def asked(llama, adapter, held_out):
    """Return the policy's requests and answers."""
    engine = TransformersEngine(llama, max_length=512, device="cpu")
    engine.load_policy("trained", str(adapter))
    requests = opening_requests(held_out, 3, policy="trained", max_tokens=12)
    answers = answers_of(engine, requests)
    engine.close()
    return requests, answers


@pytest.fixture(scope="module")
def merged(llama, adapter, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "merged"
    export_merged(llama, adapter, out, "")
    return out


def test_the_merged_model_answers_like_the_policy(merged, asked):
    report = check_answers("merged", load_model(merged), load_tokenizer(merged), *asked, TOLERANCE["float32"])
    assert report["prompts"] == 3
    assert report["max_logprob_difference"] < 1e-4


def test_the_adapter_answers_like_the_policy_under_peft(llama, adapter, asked, tmp_path):
    export_adapter(llama, adapter, tmp_path / "adapter", "card", base="someone/base", revision="abc")
    model, tokenizer = load_adapter(llama, tmp_path / "adapter", dtype="float32", device="cpu")
    assert check_answers("adapter", model, tokenizer, *asked, TOLERANCE["float32"])["tokens"] >= 3
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("someone/base", "abc")
    assert (tmp_path / "adapter" / "README.md").read_text() == "card"


def test_full_weights_have_no_adapter_export(llama, tmp_path):
    with pytest.raises(ArtifactError, match="has all weights and no adapter"):
        export_adapter(llama, llama, tmp_path / "adapter", "", base="x", revision=None)


@pytest.mark.parametrize(("precision", "coarsest"), [("f32", "float32"), ("f16", "float16")])
def test_a_gguf_answers_like_the_policy(merged, asked, tmp_path, precision, coarsest):
    size = export_gguf(merged, tmp_path / "gguf", "card", name="shop", precision=precision)
    assert size > (tmp_path / "gguf" / f"shop-{precision}.gguf").stat().st_size
    model, tokenizer = load_gguf(tmp_path / "gguf", dtype="float32", device="cpu")
    report = check_answers("gguf", model, tokenizer, *asked, TOLERANCE[coarsest])
    assert report["prompts"] == 3


def test_a_gguf_that_demands_more_than_its_tensors_is_refused(merged, tmp_path):
    """The number of layers, a 32-bit integer behind its key and type, is overwritten in place."""
    write_gguf(merged, tmp_path / "x.gguf", name="x", precision="f16")
    content = bytearray((tmp_path / "x.gguf").read_bytes())
    at = content.index(b"llama.block_count") + len(b"llama.block_count") + 4
    content[at : at + 4] = (10**6).to_bytes(4, "little")
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ResourceError, match=r"llama\.block_count = 1000000: it has \d+ tensors"):
        load_gguf(tmp_path, dtype="float32", device="cpu")
    (tmp_path / "x.gguf").write_bytes(content[:300])
    with pytest.raises(ResourceError, match=r"the model of x\.gguf in .* cannot be built"):
        load_gguf(tmp_path, dtype="float32", device="cpu")


def test_digit_splitting_tokenizer_round_trips(tmp_path):
    base = write_llama(tmp_path / "base", digits=True)
    write_gguf(base, tmp_path / "x.gguf", name="x", precision="f16")
    assert GGUFReader(tmp_path / "x.gguf").fields["tokenizer.ggml.pre"].contents() == "smollm"
    _, read = load_gguf(tmp_path, dtype="float32", device="cpu")
    text = "order 12121212 of 3.50, it's there"
    assert read(text).input_ids == load_tokenizer(base)(text).input_ids
    assert "12" in write_llama(tmp_path / "together").joinpath("tokenizer.json").read_text()  # else this shows nothing


def test_a_gguf_of_f32_holds_the_very_weights(merged, tmp_path):
    write_gguf(merged, tmp_path / "x.gguf", name="x", precision="f32")
    model, _ = load_gguf(tmp_path, dtype="float32", device="cpu")
    for name, weight in load_file(merged / "model.safetensors").items():
        np.testing.assert_array_equal(model.state_dict()[name].numpy(), weight, err_msg=name)


def test_tokenizer_metadata_for_llama_cpp(merged, tmp_path):
    write_gguf(merged, tmp_path / "x.gguf", name="shop", precision="f16")
    fields = GGUFReader(tmp_path / "x.gguf").fields
    metadata = {name: fields[f"tokenizer.ggml.{name}"].contents() for name in ("pre", "tokens", "token_type", "merges")}
    assert metadata["pre"] == "gpt-2"
    assert metadata["tokens"][:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert metadata["token_type"][:4] == [3, 3, 3, 1]  # control, control, control, normal
    assert len(metadata["tokens"]) == 400
    assert fields["tokenizer.ggml.eos_token_id"].contents() == 2
    assert fields["tokenizer.ggml.add_bos_token"].contents() is False
    assert "<|im_start|>" in fields["tokenizer.chat_template"].contents()
    assert fields["general.name"].contents() == "shop"


def test_what_answers_differently_is_caught(llama, merged, base_dir, asked, tmp_path):
    """Another model, weights without a value, another tokenizer, and nothing to compare."""
    export_merged(llama, write_adapter(llama, tmp_path / "other", seed=2), tmp_path / "merged", "")
    with pytest.raises(EngineError, match=r"the merged export differs from the policy trained on held-out prompt 0"):
        check_answers("merged", load_model(tmp_path / "merged"), load_tokenizer(llama), *asked, TOLERANCE["float16"])
    model = load_model(merged)
    with pytest.raises(EngineError, match=r"tokenizes held-out prompt 0 differently .* tokenizer or chat template"):
        check_answers("merged", model, load_tokenizer(base_dir), *asked, TOLERANCE["float32"])
    with pytest.raises(EngineError, match="no held-out prompt"):
        check_answers("merged", model, load_tokenizer(merged), [], [], 1.0)
    model.get_input_embeddings().weight.data.fill_(float("nan"))
    with pytest.raises(EngineError, match="differs from the policy"):
        check_answers("merged", model, load_tokenizer(merged), *asked, TOLERANCE["bfloat16"])


UNSUPPORTED = [
    ("config.json", {"architectures": ["Qwen3ForCausalLM"]}, "its architecture is Qwen3ForCausalLM"),
    ("config.json", {"rope_parameters": {"rope_type": "llama3"}}, r"rotary embedding is scaled \(llama3\)"),
    ("config.json", {"mlp_bias": True}, r"biases \(mlp_bias\)"),
    ("tokenizer.json", {"model": {"type": "Unigram"}}, "its tokenizer has the type Unigram"),
    (
        "tokenizer.json",
        {"normalizer": {"type": "Lowercase"}},
        "GGUF has no name here for the way in which its tokenizer splits text",
    ),
    (
        "tokenizer.json",
        {"pre_tokenizer": {"type": "Whitespace"}},
        "GGUF has no name here for the way in which its tokenizer splits text",
    ),
]


def test_unsupported_model_is_rejected_with_the_reason(llama, base_dir, tmp_path):
    for number, (file, changed, message) in enumerate(UNSUPPORTED):
        folder = shutil.copytree(llama, tmp_path / str(number) / "other-model")
        (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | changed))
        reason = rf"deploy.formats: gguf: other-model cannot be written as GGUF.*{message}"
        with pytest.raises(ResourceError, match=reason):
            check_architecture(folder)
    with pytest.raises(ResourceError, match="its tokenizer has no merges"):
        check_architecture(base_dir)
