"""Grouped attention against the plain formula, and the models that it does not compute."""

from __future__ import annotations

import math
import random
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from components.algorithms.policy.packing import TokenSequence, pack
from components.errors import ResourceError
from components.models import attention, gpu_attention, trie_attention
from components.models.attention import grouped_attention, implementation, refuse_inexact
from components.models.masks import FULL, AttentionRange
from components.models.shared_attention import PrivateRun, Segment, Sharing, shared_mask
from components.models.spec import ModelSpec
from components.models.weights import check_length


def formula(query, key, value, mask, scale):
    """softmax(q k' scale) v, each head by itself."""
    batch, heads, length, _ = query.shape
    out = torch.empty(batch, length, heads, value.shape[-1], dtype=torch.float64)
    for b in range(batch):
        for head in range(heads):
            shared = head // (heads // key.shape[1])
            scores = query[b, head].double() @ key[b, shared].double().T * scale
            scores = scores.masked_fill(~mask[b, 0], -math.inf)
            out[b, :, head] = scores.softmax(-1) @ value[b, shared].double()
    return out


HEADS = [(4, 4), (4, 2), (6, 1), (9, 3)]
"""Numbers of heads, and of those of keys and values."""


def test_it_is_the_formula():
    for (heads, shared), length in product(HEADS, (1, 2, 5)):
        generator = torch.Generator().manual_seed(heads * length)
        query = torch.randn(2, heads, length, 8, generator=generator)
        key, value = (torch.randn(2, shared, 7, 8, generator=generator) for _ in range(2))
        mask = torch.rand(2, 1, length, 7, generator=generator) < 0.6
        mask[..., 0] = True
        expected = formula(query, key, value, mask, 0.3)
        for form in (mask, torch.zeros(mask.shape).masked_fill_(~mask, -math.inf)):
            output, _ = grouped_attention(torch.nn.Module(), query, key, value, form, scaling=0.3)
            torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("limit", [1, 7 * 4 * 2, 7 * 4 * 5 * 2, 10**9])
def test_capped_scores_and_sinks_take_bounded_memory_for_any_number_of_rows(limit, monkeypatch):
    """7 keys, 4 heads, 5 queries, 3 rows: a query at a time, two, two rows, all."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 4, 5, 8, generator=generator)
    key, value = (torch.randn(3, 2, 7, 8, generator=generator) for _ in range(2))
    mask = torch.rand(1, 1, 5, 7, generator=generator) < 0.6
    sinks_H = torch.randn(4, generator=generator)
    scores = 2 * torch.tanh(query @ key.repeat_interleave(2, 1).mT * 0.3 / 2)
    exponentials = scores.exp() * mask
    weights = exponentials / (exponentials.sum(-1, keepdim=True) + sinks_H.exp()[:, None, None])
    sizes, by_formula = [], attention._by_formula

    def measured(query, key, *rest):
        sizes.append(query[..., 0].numel() * key.shape[2])
        return by_formula(query, key, *rest)

    monkeypatch.setattr(attention, "SCORES", limit)
    monkeypatch.setattr(attention, "_by_formula", measured)
    out, _ = grouped_attention(torch.nn.Module(), query, key, value, mask, scaling=0.3, softcap=2.0, s_aux=sinks_H)
    torch.testing.assert_close(out, (weights @ value.repeat_interleave(2, 1)).transpose(1, 2))
    assert max(sizes) <= max(limit, 7 * 4)
    assert sum(sizes) == scores.numel()


def test_attention_that_needs_more_is_refused():
    tensor = torch.zeros(1, 1, 1, 4)
    with pytest.raises(ResourceError, match="Module needs attention with position_bias"):
        grouped_attention(torch.nn.Module(), tensor, tensor, tensor, tensor.bool(), position_bias=1.0)
    grouped_attention(torch.nn.Module(), tensor, tensor, tensor, torch.ones(1, 1, 1, 1).bool(), position_bias=None)


def config(family: str, **options):
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **options)


LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 48,
    "long_factor": [2.0] * 48,
}
REFUSED = {
    "inkling_text": ({"log_scaling_n_floor": 1024}, "it has a temperature by place in a row"),
    "llama4_text": ({"floor_scale": 1024}, "it has a temperature by place in a row"),
    "phi3": (
        {"rope_parameters": LONG, "original_max_position_embeddings": 1024, "sliding_window": None},
        "its rotary positions change with the longest",
    ),
}
TAKEN = {
    "inkling_text": {"log_scaling_n_floor": 2048},
    "llama4_text": {},
    "phi3": {"rope_parameters": LONG, "original_max_position_embeddings": 4096, "sliding_window": 4096},
}


def test_models_that_would_be_wrong_are_refused_by_name():
    for family, (options, message) in REFUSED.items():
        expected = (
            f"max_length = 2048: some-model cannot be computed exactly for more than 1024 tokens, because {message}"
        )
        with pytest.raises(ResourceError, match=expected):
            refuse_inexact(config(family, **options), 2048, "some-model")


def test_models_that_are_right_are_taken():
    for family, options in TAKEN.items():
        refuse_inexact(config(family, **options), 2048, "some-model")


def test_attention_of_transformers_is_what_the_model_needs():
    expected = {"llama": "sdpa", "gemma3_text": "sdpa", "gemma2": "eager", "gpt_oss": "eager", "bloom": "eager"}
    assert {family: implementation(config(family)) for family in expected} == expected
    assert implementation(config("gemma2", attn_logit_softcapping=None)) == "sdpa"


def test_a_folder_is_refused_before_a_run(tmp_path):
    config("phi3", **REFUSED["phi3"][0]).save_pretrained(tmp_path)
    spec = ModelSpec(source="hub", name=str(tmp_path), max_length=1024)
    check_length(spec, tmp_path)
    with pytest.raises(ResourceError, match=r"because its rotary positions change .*; expected model.max_length=1024"):
        check_length(spec.model_copy(update={"max_length": 1025}), tmp_path)


ENDS_N = torch.tensor([9, 9, 5, 5, 5, 8, 7, 8, 9, 12, 12, 12])
"""Two trees; in the first, branches at two depths."""
DEPTHS_N = torch.tensor([0, 1, 2, 3, 4, 2, 3, 3, 2, 0, 1, 2])
REACHES = [
    FULL,
    AttentionRange(1),
    AttentionRange(2),
    AttentionRange(3),
    AttentionRange(2, chunked=True),
    AttentionRange(3, chunked=True),
]


@pytest.mark.parametrize("reach", REACHES, ids=str)
@pytest.mark.parametrize("extra", [{}, {"softcap": 0.7}, {"s_aux": 1}, {"softcap": 0.7, "s_aux": 1}], ids=str)
def test_attention_of_a_trie_and_its_gradient_are_those_of_a_dense_mask(reach, extra, monkeypatch):
    monkeypatch.setattr(trie_attention, "CAPPED_KEYS", 2)
    generator = torch.Generator().manual_seed(0)
    nodes_N = torch.arange(len(ENDS_N))
    mask_NN = (nodes_N <= nodes_N[:, None]) & (nodes_N[:, None] < ENDS_N)
    lowest_N = {1: DEPTHS_N // (reach.size or 99) * (reach.size or 99), 0: DEPTHS_N - (reach.size or 99) + 1}
    mask_NN &= lowest_N[reach.chunked][:, None] <= DEPTHS_N
    options = {"dtype": torch.float64, "generator": generator, "requires_grad": True}
    query, key, value = inputs = [torch.randn(1, heads, 12, 16, **options) for heads in (6, 2, 2)]
    if "s_aux" in extra:
        inputs.append(torch.randn(6, **options))
        extra = extra | {"s_aux": inputs[-1]}
    seen = torch.randn(1, 12, 6, 16, dtype=torch.float64, generator=generator)
    scores = (query @ key.repeat_interleave(3, 1).mT) * 0.3
    if "softcap" in extra:
        scores = extra["softcap"] * torch.tanh(scores / extra["softcap"])
    exponentials = scores.exp() * mask_NN
    total = exponentials.sum(-1, keepdim=True)
    if "s_aux" in extra:
        total = total + inputs[-1].exp()[:, None, None]
    expected = ((exponentials / total) @ value.repeat_interleave(3, 1)).transpose(1, 2)
    expected_gradients = torch.autograd.grad(expected, inputs, seen)
    for mask in (trie_attention.mask(ENDS_N, DEPTHS_N, reach), gpu_attention.dense_mask(ENDS_N, DEPTHS_N, reach)):
        out, _ = grouped_attention(torch.nn.Module(), query, key, value, mask, scaling=0.3, **extra)
        for ours, dense in zip(
            (out, *torch.autograd.grad(out, inputs, seen)), (expected, *expected_gradients), strict=True
        ):
            torch.testing.assert_close(ours, dense, atol=1e-12, rtol=1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("reach", REACHES, ids=str)
def test_the_attention_of_a_gpu_is_the_same(reach, monkeypatch):
    """FlexAttention without a compiler, which computes on a CPU too."""
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(gpu_attention, "_compiled", lambda: flex_attention)
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)  # refuses gradients
    torch.manual_seed(0)
    options = {"dtype": torch.float64, "requires_grad": True}
    query, key, value = inputs = [torch.randn(1, heads, 12, 16, **options) for heads in (6, 2, 2)]
    inputs.append(torch.randn(6, **options))
    block_mask = gpu_attention.block_mask(ENDS_N, DEPTHS_N, reach)
    for cap, sinks_H in product((None, 0.7), (None, inputs[-1])):
        results = []
        for mask in (block_mask, trie_attention.mask(ENDS_N, DEPTHS_N, reach)):
            out = trie_attention.attend(query, key, value, mask, 0.3, cap, sinks_H)
            results.append((out, *torch.autograd.grad(out.square().sum(), inputs, allow_unused=True)))
        for flex, blocks in zip(*results, strict=True):
            torch.testing.assert_close(flex, blocks, atol=1e-6, rtol=1e-6)


def tiles(counts: torch.Tensor, indices: torch.Tensor) -> set[tuple[int, int]]:
    """Return the tiles of queries and keys that FlexAttention computes."""
    return {(row, int(key)) for row, count in enumerate(counts[0, 0]) for key in indices[0, 0, row, :count]}


@pytest.mark.parametrize("reach", REACHES, ids=str)
def test_blocks_of_a_gpu_hold_what_is_visible(reach, monkeypatch):
    """Random tries of several tiles: those of full attention are the ones that `create_block_mask` finds in all pairs;
    with a window, some more may be computed."""
    from torch.nn.attention.flex_attention import create_block_mask

    draw = random.Random(0)
    monkeypatch.setattr(gpu_attention, "TILE", 4)
    for _ in range(12):
        stem = [draw.randrange(9) for _ in range(draw.randrange(1, 30))]
        sequences = [stem[: draw.randrange(1, 30)] + [draw.randrange(3) for _ in range(20)] for _ in range(4)]
        (packed,) = pack([TokenSequence(tokens, [len(tokens) - 1]) for tokens in sequences], 1000)
        arguments, count = (packed.ends_N, packed.positions_N, reach), len(packed.ends_N)
        ours = gpu_attention.block_mask(*arguments)
        rule = gpu_attention.visible(*arguments)
        theirs = create_block_mask(rule, None, None, count, count, device="cpu", BLOCK_SIZE=4)
        full, partial, all_full, all_partial = (
            tiles(*columns)
            for mask in (ours, theirs)
            for columns in ((mask.full_kv_num_blocks, mask.full_kv_indices), (mask.kv_num_blocks, mask.kv_indices))
        )
        assert full == all_full
        assert partial == all_partial or (reach != FULL and partial > all_partial and not partial & full)
        assert ours.seq_lengths == theirs.seq_lengths == (count, count)


def test_blocks_of_a_long_context_take_memory_by_tiles():
    """131,072 nodes in four branches: all pairs would be 17 GB."""
    sizes = set()

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            sizes.update(each.numel() for each in tree_leaves(result) if isinstance(each, torch.Tensor))
            return result

    count, branch = 1 << 17, 1 << 15
    depths_N = torch.arange(count) % branch
    with Sizes():
        mask = gpu_attention.block_mask((torch.arange(count) // branch + 1) * branch, depths_N)
    assert max(sizes) <= (count // 128) * (count // 128 + 1)
    assert mask.full_kv_num_blocks.sum() == 4 * 256 * 255 // 2
    assert mask.kv_num_blocks.sum() == count // 128


@pytest.mark.parametrize(("heads", "shared"), HEADS)
def test_attention_over_shared_prefixes_is_the_formula(heads, shared):
    """Five rows share four tokens, of these two share three more; the last shares nothing and has its own run."""
    generator = torch.Generator().manual_seed(heads)
    query = torch.randn(6, heads, 1, 8, generator=generator)
    key, value = (torch.randn(6, shared, 12, 8, generator=generator) for _ in range(2))
    segments = (Segment((0, 1, 2, 3, 4), 0, 4), Segment((1, 3), 4, 7))
    for part in (key, value):
        for segment in segments:
            tokens = slice(segment.start, segment.stop)
            part[list(segment.rows), :, tokens] = part[segment.rows[0], :, tokens].clone()
    lengths = torch.tensor([9, 12, 6, 9, 10, 3])
    mask = (torch.arange(12) < lengths[:, None])[:, None, None]
    runs = (PrivateRun(0, 5, 4, 11), PrivateRun(5, 6, 0, 2))  # when the batch was partitioned, one token earlier
    sharing = Sharing(segments, (4, 7, 4, 7, 4, 0), runs, grown=1)
    output, _ = grouped_attention(torch.nn.Module(), query, key, value, shared_mask(mask, sharing), scaling=0.3)
    expected = formula(query, key, value, mask, 0.3)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)


def test_attention_of_a_trie_copies_only_what_it_pads():
    saved = set()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.add(tensor.data_ptr()) or tensor, lambda x: x):
        for size, copied in ((16, ()), (8, ("value",))):
            inputs = {
                name: torch.randn(1, heads, 12, width, requires_grad=True)
                for name, heads, width in (("query", 4, 16), ("key", 2, 16), ("value", 2, size))
            }
            out = trie_attention.attend(*inputs.values(), trie_attention.mask(ENDS_N, DEPTHS_N), 0.3)
            assert out.shape == (1, 4, 12, size)
            assert {name for name, tensor in inputs.items() if tensor.data_ptr() not in saved} == {*copied}
