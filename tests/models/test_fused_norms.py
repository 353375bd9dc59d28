"""RMS norms with one kernel compute what those of transformers do; other norms are left alone."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from components.models.fused_norms import fuse


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
def test_outputs_and_gradients_are_those_of_transformers(kind, dtype, tolerance):
    torch.manual_seed(0)
    model = torch.nn.ModuleList([kind(64).to(dtype)])
    with torch.no_grad():
        model[0].weight.uniform_(0.5, 1.5)
    fused = copy.deepcopy(model)
    before = fused[0].weight.clone()
    assert fuse(fused) == 1
    assert torch.equal(fused[0].weight, before)
    results = []
    for each in (model, fused):
        torch.manual_seed(1)
        x = (3 * torch.randn(2, 5, 64)).to(dtype).requires_grad_()
        out = each[0](x)
        (out.float() * torch.arange(64)).sum().backward()
        results.append([out, x.grad, each[0].weight.grad])
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype
        assert (one.float() - other.float()).norm() <= tolerance * other.float().norm()


def test_other_formulas_and_norms_are_left_alone():
    gemma = GemmaRMSNorm(64)  # multiplies by 1 + weight
    gemma.variance_epsilon = gemma.eps
    model = torch.nn.ModuleList([gemma, torch.nn.LayerNorm(64), torch.nn.RMSNorm(64)])
    x = torch.randn(3, 64)
    expected = [module(x) for module in model]
    assert fuse(model) == 0
    assert all(torch.equal(module(x), one) for module, one in zip(model, expected, strict=True))


def test_inputs_of_another_dtype_are_computed_as_before():
    model = torch.nn.ModuleList([LlamaRMSNorm(64)])
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    expected = model[0](x)
    fuse(model)
    assert torch.equal(model[0](x), expected)
