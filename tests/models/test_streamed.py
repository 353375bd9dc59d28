"""Models whose weights are read a layer at a time, against transformers' own loading."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from safetensors.torch import load_file, save_file

from components.errors import ResourceError
from components.models.streamed import StreamedModel
from components.models.weights import load_model
from tests.models.families import write

IDS = torch.arange(3, 23)[None]
FAMILIES = ("llama", "gemma3_text", "qwen3_moe", "deepseek_v3", "gpt_oss")
"""Plain; with scaled embeddings; with experts that files hold one by one; with a persistent buffer; with sinks."""


def tensors(model) -> dict[str, torch.Tensor]:
    return dict(chain(model.named_parameters(remove_duplicate=False), model.named_buffers()))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_buffers_are_those_of_transformers(family, tmp_path):
    base_dir = write(family, tmp_path / family, tie_word_embeddings=family != "llama")
    for dtype in ("bfloat16", "float32"):
        streamed, expected = StreamedModel(base_dir, dtype=dtype, device="cpu"), load_model(base_dir, dtype=dtype)
        widened = load_model(base_dir, dtype=dtype).float()
        with torch.no_grad():
            for context, model in (
                (streamed.computing(), expected),
                (streamed.computing(torch.float32), widened if dtype == "bfloat16" else expected),
            ):
                with context:
                    logits = streamed.model(IDS).logits
                assert torch.equal(logits, model(IDS).logits)
        large = [parameter for parameter in streamed.model.parameters() if parameter.ndim > 1]
        assert {parameter.untyped_storage().nbytes() for parameter in large} == {large[0].element_size()}
        streamed.fill(streamed.model)
        ours, theirs = tensors(streamed.model), tensors(expected)
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert ours[name].dtype == tensor.dtype, name
            assert torch.equal(ours[name], tensor), name
        tied = [name for name, other in ours.items() if other is streamed.model.get_input_embeddings().weight]
        assert len(tied) == 1 + (theirs["lm_head.weight"] is expected.get_input_embeddings().weight)


def test_files_that_hold_tied_weights_twice_or_lack_some(tmp_path):
    base_dir = write("llama", tmp_path / "base", tie_word_embeddings=True)
    file = base_dir / "model.safetensors"
    stored = load_file(file)
    for twice in (True, False):
        head = stored["model.embed_tokens.weight"] * (1 if twice else 2)
        save_file({**stored, "lm_head.weight": head.clone()}, file, metadata={"format": "pt"})
        streamed, expected = StreamedModel(base_dir, dtype="float32", device="cpu"), load_model(base_dir)
        for model in (streamed.model, expected):
            assert (model.lm_head.weight is model.model.embed_tokens.weight) == twice
        streamed.fill(streamed.model)
        assert torch.equal(streamed.model.lm_head.weight, head)
    save_file({name: stored[name] for name in stored if "o_proj" not in name}, file, metadata={"format": "pt"})
    with pytest.raises(ResourceError, match=r"lack 2 of the model that config.json describes: .*o_proj"):
        StreamedModel(base_dir, dtype="float32", device="cpu")
