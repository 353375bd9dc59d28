"""Models with a state or latent attention, which the embedded engine computes with transformers' own caches."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from components.errors import ResourceError
from components.inference.transformers import row_caches
from components.inference.transformers.row_caches import RowCaches
from components.models.weights import load_model
from tests.inference.exact import ask, assert_exact, go_on
from tests.inference.test_engine import TEXTS, chat
from tests.models.tiny_configs import tiny

QUICK = ("deepseek_v3", "jamba", "lfm2", "mamba2", "qwen3_next")
SLOW = (
    *("bamba", "deepseek_v2", "falcon_h1", "falcon_mamba", "gemma3n_text", "glm4_moe_lite", "granitemoehybrid"),
    *("kimi_linear", "lfm2_moe", "longcat_flash", "mamba", "minicpm3", "nemotron_h", "olmo_hybrid"),
    *("qwen3_5_moe_text", "qwen3_5_text", "zamba2", "zaya"),
)


def write(family: str, base_dir: Path, folder: Path) -> Path:
    """Write a model of a family with random weights and the tokenizer of the base model, and return its folder."""
    shutil.copytree(base_dir, folder)
    (folder / "model.safetensors").unlink()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny(family, vocab_size=259))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)  # so that a token depends on those before it
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", [*QUICK, *(pytest.param(family, marks=pytest.mark.slow) for family in SLOW)])
def test_a_model_with_a_state_samples_what_a_full_forward_pass_gives(family, base_dir, make_engine, tmp_path):
    """Prompts of different lengths together, a group with one prompt, second turns, and rows that end early."""
    folder = write(family, base_dir, tmp_path / family)
    engine, model = make_engine(folder), load_model(folder)
    openings = [ask(text, seed=index, max_tokens=6 + 3 * index) for index, text in enumerate(TEXTS)]
    firsts = chat(engine, *openings)
    seconds = chat(engine, *(go_on(o, f, "And?", seed=9) for o, f in zip(openings, firsts, strict=True)))
    prefilled = engine.counters["prefilled_tokens"]
    group = chat(engine, *(ask("Where is my parcel, please?", seed=seed) for seed in range(3)))
    assert engine.counters["prefilled_tokens"] - prefilled < len(group[0].prompt_token_ids)
    for answer in [*firsts, *seconds, *group]:
        assert_exact(model, answer)


def test_a_second_turn_continues_the_state(base_dir, make_engine, tmp_path):
    for family in ("qwen3_next", "deepseek_v3"):
        engine = make_engine(write(family, base_dir, tmp_path / family))
        opening = ask("Where is order K482?", max_tokens=20)
        (first,) = chat(engine, opening)
        before = engine.counters["prefilled_tokens"]
        (second,) = chat(engine, go_on(opening, first, "Thanks."))
        cached = len(first.prompt_token_ids) + len(first.token_ids) - 1
        assert engine.counters["prefilled_tokens"] - before == len(second.prompt_token_ids) - cached - 1


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("deepseek_v32", "DynamicIndexedLayer"),
        ("minimax", "MiniMax uses cache of its own"),
        ("recurrent_gemma", "its log-probabilities are off by"),
    ],
)
def test_caches_that_cannot_be_used_are_refused_by_name(family, reason, base_dir, make_engine, tmp_path):
    folder = write(family, base_dir, tmp_path / family)
    with pytest.raises(ResourceError, match=rf"{family} .* cannot be run exactly here: .*{reason}"):
        make_engine(folder)


@pytest.fixture
def decoder():
    """A model of six layers, three with a state; most of the memory of its cache are keys and values."""
    torch.manual_seed(0)
    kinds = {"num_hidden_layers": 6, "layer_types": ["linear_attention", "full_attention"] * 3}
    return AutoModelForCausalLM.from_config(tiny("qwen3_5_text", head_dim=64, num_key_value_heads=4, **kinds)).eval()


@torch.no_grad()
def test_rows_are_joined_and_separated_in_the_memory_that_is_stated_for_them(decoder):
    rows, length = 8, 400
    caches = RowCaches(decoder, rows, continues=True)
    limit = rows * caches.bytes_of(length + 3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        for row in range(rows):
            caches.compute(torch.zeros(1, length, dtype=torch.long), [row], None)
        for together in (range(8), range(7), range(1, 8)):
            caches.compute(torch.zeros(len(together), 1, dtype=torch.long), together)
    sizes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert limit / 2 < max(itertools.accumulate(sizes)) < 1.05 * limit


@torch.no_grad()
@pytest.mark.parametrize("name", ["_joined_layer", "_select"])
def test_no_layer_is_lost_where_joining_or_separating_fails(name, decoder, monkeypatch):
    tokens_BT = torch.arange(20).view(2, 10)
    caches, original = RowCaches(decoder, 2, continues=True), getattr(row_caches, name)
    for row in (0, 1):
        caches.compute(tokens_BT[[row], :8], [row], None)
    outcomes = iter([original, original, original, None])

    def fail_once(*arguments):
        if (outcome := next(outcomes, original)) is None:
            raise torch.OutOfMemoryError("no memory")
        return outcome(*arguments)

    monkeypatch.setattr(row_caches, name, fail_once)
    for place, rows in ((8, [0, 1]), (9, [0]), (9, [1])):
        tokens_B1 = tokens_BT[rows, place : place + 1]
        try:
            logits = caches.compute(tokens_B1, rows)
        except torch.OutOfMemoryError:
            logits = caches.compute(tokens_B1, rows)
        torch.testing.assert_close(logits[:, -1], decoder(tokens_BT[rows, : place + 1]).logits[:, -1])
    assert not list(outcomes)
