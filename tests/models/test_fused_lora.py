"""LoRA layers with few kernels compute what PEFT's do."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from components.models.fused_lora import fuse


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(24, 40)
        self.second = torch.nn.Linear(40, 16, bias=False)

    def forward(self, x):
        return self.second(torch.nn.functional.silu(self.first(x)))


def adapted(dtype=torch.float32, dropout=0.0, **options):
    """Return a model with an adapter that changes its outputs."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=8.0, lora_dropout=dropout, target_modules=["first", "second"], **options)
    model = get_peft_model(Block().to(dtype), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    return model


def gradients(model, x):
    """Return the output, and the gradients of the input and of the trained parameters."""
    x = x.clone().requires_grad_()
    out = model(x)
    out.float().square().sum().backward()
    return out, [x.grad, *(parameter.grad for parameter in model.parameters() if parameter.requires_grad)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_outputs_and_gradients_are_those_of_peft(dtype, tolerance):
    model = adapted(dtype)
    fused = copy.deepcopy(model)
    assert fuse(fused) == 2
    torch.manual_seed(1)
    x = torch.randn(2, 7, 24, dtype=dtype)
    (expected, expected_grads), (out, grads) = gradients(model, x), gradients(fused, x)
    assert "_Lora" in type(out.grad_fn.next_functions[0][0]).__name__ or "_Lora" in type(out.grad_fn).__name__
    assert out.dtype == dtype
    assert (out - expected).norm() <= tolerance * expected.norm()
    assert len(grads) == 5
    for one, other in zip(grads, expected_grads, strict=True):
        assert one.dtype == other.dtype
        assert (one - other).norm() <= tolerance * other.norm()


def test_gradients_equal_finite_differences():
    model = adapted().double()
    layer = model.base_model.model.first
    import components.models.fused_lora as fused_lora

    arguments = (
        torch.randn(3, 24, dtype=torch.float64, requires_grad=True),
        layer.base_layer.weight.detach(),
        layer.base_layer.bias.detach(),
        layer.lora_A["default"].weight.detach().requires_grad_(),
        layer.lora_B["default"].weight.detach().requires_grad_(),
        2.0,
    )
    assert torch.autograd.gradcheck(fused_lora._Lora.apply, arguments)


def test_the_reference_and_layers_that_compute_more_are_those_of_peft():
    x = torch.randn(5, 24)
    model = adapted()
    fuse(model)
    base = model.get_base_model()
    plain = Block()
    plain.first.load_state_dict(base.first.base_layer.state_dict())
    plain.second.load_state_dict(base.second.base_layer.state_dict())
    with model.disable_adapter():
        assert torch.equal(model(x), plain(x))
    model.merge_adapter()
    merged = model(x)
    model.unmerge_adapter()
    assert torch.allclose(model(x), merged, atol=1e-5)

    random = adapted(dropout=0.5)
    fuse(random)
    assert not torch.equal(random.train()(x), random(x)), "dropout has no effect"
    assert torch.equal(random.eval()(x), random(x))


def test_other_bases_keep_the_forward_pass_of_peft():
    assert fuse(adapted(torch.float16)) == 0
    assert fuse(Block()) == 0
    variant = adapted(use_dora=True)
    expected = copy.deepcopy(variant)
    fuse(variant)
    x = torch.randn(5, 24)
    assert torch.equal(variant(x), expected(x))


def test_a_second_adapter_is_used_when_it_is_active():
    model = adapted()
    model.add_adapter("other", LoraConfig(r=2, lora_alpha=2.0, target_modules=["first", "second"]))
    fuse(model)
    x = torch.randn(5, 24)
    first = model(x)
    model.set_adapter("other")
    with model.disable_adapter():
        base = model(x)
    assert torch.allclose(model(x), base)  # its B is zero
    assert not torch.allclose(first, base)
