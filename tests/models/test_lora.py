"""LoRA against PEFT: the merged weights, their digest, and what is refused rather than merged wrongly."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from components.errors import ArtifactError
from components.models.lora import merged_tensors
from components.models.trained_weights import base_tensors, merge
from components.models.trained_weights import digest as digest_of
from components.models.weights import load_model
from tests.deployment.tiny import write_adapter


def test_a_merge_is_pefts(base_dir, adapter_dir, tmp_path):
    import peft

    merge(base_dir, adapter_dir, tmp_path / "merged")
    merged = load_model(tmp_path / "merged").state_dict()
    expected = peft.PeftModel.from_pretrained(load_model(base_dir), adapter_dir).merge_and_unload().state_dict()
    base = load_model(base_dir).state_dict()
    assert merged.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(merged[name], tensor, atol=1e-6, rtol=1e-6)
        assert torch.equal(merged[name], base[name]) != name.endswith("_proj.weight")


def test_the_engine_and_the_export_hold_the_same_bits(base_dir, adapter_dir, tmp_path):
    merge(base_dir, adapter_dir, tmp_path / "merged")
    exported = load_file(tmp_path / "merged" / "model.safetensors")
    changed = dict(merged_tensors(base_dir, adapter_dir))
    assert len(changed) == 14
    assert all(torch.equal(tensor, exported[name]) for name, tensor in changed.items())


def test_without_an_adapter_it_is_a_copy(base_dir, tmp_path):
    merge(base_dir, None, tmp_path / "copy")
    before, after = load_file(base_dir / "model.safetensors"), load_file(tmp_path / "copy" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert {path.name for path in base_dir.iterdir()} == {path.name for path in (tmp_path / "copy").iterdir()}


def test_weights_of_other_formats_are_not_exported(base_dir, adapter_dir, tmp_path):
    """They would be those before training."""
    copied = shutil.copytree(base_dir, tmp_path / "base")
    for name in ("pytorch_model.bin", "model.gguf", "model.onnx"):
        (copied / name).write_bytes(b"old")
    (copied / "README.md").write_text("kept")
    merge(copied, adapter_dir, tmp_path / "merged")
    assert {path.name for path in (tmp_path / "merged").iterdir()} == {p.name for p in base_dir.iterdir()} | {
        "README.md"
    }


def test_shards_stay_shards(base_dir, adapter_dir, tmp_path):
    copied = shutil.copytree(base_dir, tmp_path / "base")
    (copied / "model.safetensors").unlink()
    load_model(base_dir).save_pretrained(copied, max_shard_size="100KB")
    shards = sorted(path.name for path in copied.glob("*.safetensors"))
    assert len(shards) > 1
    merge(copied, adapter_dir, tmp_path / "merged")
    merge(base_dir, adapter_dir, tmp_path / "whole")
    assert sorted(path.name for path in (tmp_path / "merged").glob("*.safetensors")) == shards
    merged, other = load_model(tmp_path / "merged").state_dict(), load_model(tmp_path / "whole").state_dict()
    assert all(torch.equal(merged[name], other[name]) for name in other)


def test_the_base_is_read_back_bit_for_bit(base_dir, adapter_dir):
    base = load_file(base_dir / "model.safetensors")
    names = [name for name, _ in merged_tensors(base_dir, adapter_dir)]
    tensors = dict(base_tensors(base_dir, names))
    assert list(tensors) == names
    assert all(torch.equal(tensors[name], base[name]) for name in names)


def test_a_base_of_less_precision_keeps_it(base_dir, adapter_dir, tmp_path):
    """The sum is made in float32 and rounded once."""
    copied = shutil.copytree(base_dir, tmp_path / "base")
    base = {name: tensor.bfloat16() for name, tensor in load_file(base_dir / "model.safetensors").items()}
    save_file(base, copied / "model.safetensors", metadata={"format": "pt"})
    adapter = load_file(adapter_dir / "adapter_model.safetensors")
    for name, merged in merged_tensors(copied, adapter_dir):
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        exact = base[name].double() + 2.0 * (  # alpha / r = 8 / 4
            adapter[f"{stem}.lora_B.weight"].double() @ adapter[f"{stem}.lora_A.weight"].double()
        )
        assert merged.dtype == torch.bfloat16
        torch.testing.assert_close(merged.double(), exact, atol=0, rtol=2**-8)


# The digest


def test_an_adapter_in_bfloat16_has_a_digest_too(adapter_dir, tmp_path):
    tensors = load_file(adapter_dir / "adapter_model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, tmp_path / "adapter_model.safetensors")
    assert digest_of(tmp_path) != digest_of(adapter_dir)


def test_the_digest_is_of_tensors_not_of_files(base_dir, adapter_dir, tmp_path):
    digest = digest_of(adapter_dir)
    tensors = load_file(adapter_dir / "adapter_model.safetensors")
    other = tmp_path / "other"
    other.mkdir()
    save_file(dict(reversed(tensors.items())), other / "adapter_model.safetensors", metadata={"written": "later"})
    assert digest_of(other) == digest
    name = next(iter(tensors))
    for changed in (
        {**tensors, name: tensors[name] * 1.0000002},
        {**tensors, name: tensors[name].reshape(-1)},
        {**{key: value for key, value in tensors.items() if key != name}, f"{name}x": tensors[name]},
    ):
        save_file(changed, other / "adapter_model.safetensors")
        assert digest_of(other) != digest


def test_the_digest_is_the_formula_written_out(tmp_path):
    """Pinned: it names policies in artifacts and on the last line of a run."""
    import hashlib

    import numpy

    save_file({"b": torch.tensor([[1.5, -2.0]]), "a": torch.tensor([3.0])}, tmp_path / "adapter_model.safetensors")
    expected = hashlib.sha256()
    for name, values in (("a", numpy.array([3.0], "<f4")), ("b", numpy.array([[1.5, -2.0]], "<f4"))):
        expected.update(f"{name} float32 {values.shape} ".encode() + values.tobytes())
    assert digest_of(tmp_path) == expected.hexdigest()


# Refusals


def test_other_formulas_are_refused_by_name(base_dir, adapter_dir, tmp_path):
    path = adapter_dir / "adapter_config.json"
    plain = path.read_text()
    for options, message in (
        ({"use_dora": True}, "adapters with use_dora cannot be merged"),
        ({"use_rslora": True}, "use_rslora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"lora_bias": True}, "lora_bias"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"bias": "all"}, "trained biases"),
        ({"init_lora_weights": "pissa_niter_4"}, "changed the base weights"),
        ({"peft_type": "IA3"}, "an adapter of type IA3"),
        ({"peft_type": None}, "an adapter of type None"),
    ):
        path.write_text(json.dumps(json.loads(plain) | options))
        with pytest.raises(ArtifactError, match=message):
            merge(base_dir, adapter_dir, tmp_path / "merged")


def test_pefts_defaults_are_no_refusal(base_dir, adapter_dir, tmp_path):
    """Every option as PEFT itself writes it."""
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    config.save_pretrained(adapter_dir)
    merge(base_dir, adapter_dir, tmp_path / "merged")


def test_tensors_that_would_be_left_out_are_refused(base_dir, adapter_dir, tmp_path):
    path = adapter_dir / "adapter_model.safetensors"
    tensors, embedding = load_file(path), "base_model.model.model.embed_tokens.lora_embedding_A"
    for name in ("base_model.model.lm_head.weight", embedding, "lora_A.weight"):
        save_file({**tensors, name: torch.zeros(2, 2)}, path)
        with pytest.raises(ArtifactError, match="no plain LoRA of linear layers"):
            merge(base_dir, adapter_dir, tmp_path / "merged")


def test_an_adapter_of_another_model(base_dir, adapter_dir, tmp_path):
    path = adapter_dir / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({name.replace("layers.0", "layers.9"): tensor for name, tensor in tensors.items()}, path)
    with pytest.raises(ArtifactError, match=r"does not fit: the base model has no layer model\.layers\.9\."):
        merge(base_dir, adapter_dir, tmp_path / "merged")
    save_file({n: t[:, :-1].contiguous() if "lora_A" in n else t for n, t in tensors.items()}, path)
    with pytest.raises(
        ArtifactError, match=r"does not fit .*: model\.layers\..* is \(\d+, \d+\), the adapter's update is"
    ):
        merge(base_dir, adapter_dir, tmp_path / "merged")


def test_a_folder_that_is_no_adapter(base_dir, adapter_dir, tmp_path):
    (adapter_dir / "adapter_model.safetensors").rename(adapter_dir / "adapter_model.bin")
    with pytest.raises(
        ArtifactError, match=r"is no adapter: expected adapter_config.json and adapter_model.safetensors"
    ):
        merge(base_dir, adapter_dir, tmp_path / "merged")


def test_adapters_differ_by_their_seed(base_dir, adapter_dir, tmp_path):
    other = write_adapter(base_dir, tmp_path / "second", seed=2)
    assert digest_of(other) != digest_of(adapter_dir)
