"""Contents of an export."""

from __future__ import annotations

import json
import random
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from components.deployment.export import export_adapter
from components.deployment.export import export_merged as export
from components.errors import ArtifactError
from tests.deployment.tiny import with_unused_decoders


def test_weights_are_base_plus_scaled_update(base_dir, adapter_dir, tmp_path):
    size = export(base_dir, adapter_dir, tmp_path / "out", "# card\n")
    base, merged = load_file(base_dir / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    adapter = load_file(adapter_dir / "adapter_model.safetensors")
    assert base.keys() == merged.keys()
    changed = 0
    for name, weight in base.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in adapter:
            changed += 1
            update = adapter[f"{stem}.lora_B.weight"] @ adapter[f"{stem}.lora_A.weight"]
            np.testing.assert_allclose(merged[name], weight + 8 / 4 * update, rtol=1e-5, atol=1e-5)
            assert not np.array_equal(merged[name], weight)
        else:
            np.testing.assert_array_equal(merged[name], weight)
    assert changed == len(adapter) // 2
    assert size > (tmp_path / "out" / "model.safetensors").stat().st_size


def test_it_loads_with_transformers_alone(base_dir, adapter_dir, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export(base_dir, adapter_dir, tmp_path / "out", "# card\n")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", use_safetensors=True)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert {name for name, _ in model.named_parameters()} <= load_file(tmp_path / "out" / "model.safetensors").keys()


def test_without_an_adapter_the_base_model_is_exported(base_dir, tmp_path):
    export(base_dir, None, tmp_path / "out", "# card\n")
    base, out = load_file(base_dir / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert all(np.array_equal(base[name], out[name]) for name in base)


def test_pickles_and_code_of_the_base_model_are_not_exported(base_dir, adapter_dir, tmp_path):
    base = shutil.copytree(base_dir, tmp_path / "base")
    for name in ("pytorch_model.bin", "training_args.pt", "modeling_x.py", "pytorch_model.bin.index.json"):
        (base / name).write_bytes(b"x")
    (base / "README.md").write_text("of the base model")
    (base / "LICENSE").write_text("licence text")
    export(base, adapter_dir, tmp_path / "out", "# card\n")
    files = {path.name: path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert len(set(files.values())) == 1, files  # a server of another user reads them
    assert files.keys() == {path.name for path in base_dir.iterdir()} | {"README.md", "LICENSE"}
    assert (tmp_path / "out" / "README.md").read_text() == "# card\n"


def test_a_base_model_without_safetensors_or_tokenizer_is_refused(base_dir, tmp_path):
    no_tokenizer = shutil.copytree(base_dir, tmp_path / "a", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(ArtifactError, match="tokenizer"):
        export(no_tokenizer, None, tmp_path / "out-a", "")
    no_weights = shutil.copytree(base_dir, tmp_path / "b", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(ArtifactError, match="safetensors"):
        export(no_weights, None, tmp_path / "out-b", "")


def test_the_chat_template_shows_tools_as_training_did(base_dir, adapter_dir, tmp_path):
    """The exported template renders tools like the policy's; the base model's own template is unchanged."""
    from components.models.weights import load_tokenizer
    from components.trajectories.chat import ChatFormat

    before = (base_dir / "chat_template.jinja").read_bytes()
    export(base_dir, adapter_dir, tmp_path / "merged", "")
    export_adapter(base_dir, adapter_dir, tmp_path / "adapter", "", base="tiny", revision=None)
    tool = {"type": "function", "function": {"name": "look_up", "description": "Finds.", "parameters": {}}}
    talk = [{"role": "user", "content": "Where is it?"}]
    expected = ChatFormat(load_tokenizer(base_dir)).prompt_ids(talk, [tool])
    for format in ("merged", "adapter"):
        tokenizer = load_tokenizer(tmp_path / format)
        prompt_ids = tokenizer.apply_chat_template(talk, tools=[tool], add_generation_prompt=True, return_dict=False)
        assert prompt_ids == expected
        assert ChatFormat(tokenizer).prompt_ids(talk, [tool]) == expected
    assert (base_dir / "chat_template.jinja").read_bytes() == before


@pytest.mark.parametrize("form", ["merged", "adapter"])
def test_decoders_without_effect_are_left_out_of_the_tokenizer(base_dir, adapter_dir, tmp_path, form):
    """It decodes every token, and texts, as the base model's does."""
    from transformers import AutoTokenizer

    base, out = with_unused_decoders(shutil.copytree(base_dir, tmp_path / "base")), tmp_path / "out"
    before = (base / "tokenizer.json").read_bytes()
    if form == "merged":
        export(base, adapter_dir, out, "# card\n")
    else:
        export_adapter(base, adapter_dir, out, "# card\n", base="base", revision=None)
    assert (base / "tokenizer.json").read_bytes() == before
    assert json.loads((out / "tokenizer.json").read_text())["decoder"]["type"] == "ByteLevel"
    old, new = AutoTokenizer.from_pretrained(base), AutoTokenizer.from_pretrained(out)
    assert old.get_vocab() == new.get_vocab()
    for token in range(len(old)):
        assert new.decode([token]) == old.decode([token])
    text = "Zwei Fäden, 北京 42 — <b>naïve</b>\n\tdef f(x): return x**2 # 🙂<|im_end|>"
    assert new.encode(text) == old.encode(text)
    assert new.decode(new.encode(text)) == old.decode(old.encode(text)) == text
    generator = random.Random(0)
    for _ in range(50):  # also of bytes that are no characters
        tokens = [generator.randrange(len(old)) for _ in range(8)]
        assert new.decode(tokens) == old.decode(tokens)
