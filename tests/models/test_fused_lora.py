"""LoRA layers with few kernels compute what PEFT's do."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

from components.models.fused_lora import fuse


class Attention(torch.nn.Module):
    """Three layers of the same input, and one with a name like theirs that gets another."""

    def __init__(self):
        super().__init__()
        self.q_proj = torch.nn.Linear(40, 24)
        self.k_proj = torch.nn.Linear(40, 8, bias=False)
        self.v_proj = torch.nn.Linear(40, 8)

    def forward(self, x, values=None):
        return self.q_proj(x), self.k_proj(x), self.v_proj(x if values is None else values)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(24, 40)
        self.attention = Attention()
        self.second = torch.nn.Linear(40, 16, bias=False)

    def forward(self, x):
        return self.second(torch.cat(self.attention(torch.nn.functional.silu(self.first(x))), -1))


LAYERS = ["first", "q_proj", "k_proj", "v_proj", "second"]


def adapted(dtype=torch.float32, dropout=0.0, **options):
    """Return a model with an adapter that changes its outputs."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=6.0, lora_dropout=dropout, target_modules=LAYERS, **options)
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


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_outputs_and_gradients_are_those_of_peft_in_float64(dtype, tolerance):
    model = adapted(dtype)
    exact = copy.deepcopy(model).double()
    assert fuse(model) == len(LAYERS)
    torch.manual_seed(1)
    x = torch.randn(2, 7, 24, dtype=dtype)
    (expected, expected_grads), (out, grads) = gradients(exact, x.double()), gradients(model, x)
    assert out.dtype == dtype
    assert (out - expected).norm() <= tolerance * expected.norm()
    assert len(grads) == 1 + 2 * len(LAYERS)
    for one, other in zip(grads, expected_grads, strict=True):
        assert one.dtype == (dtype if one is grads[0] else torch.float32)
        assert (one - other).norm() <= tolerance * other.norm()


class Operations(TorchDispatchMode):
    """Context that counts operations, which are kernels on a GPU, without views."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += not func.is_view and "empty" not in func.name()
        return func(*args, **(kwargs or {}))


def test_layers_of_one_input_take_few_operations():
    """Three layers, forward and backward, gradients added to those of the pack before. The products of a GPU, which
    convert their result themselves, save four more. Adapters are rounded in the first pass of a step only."""
    counted = {}
    for name, prepare in {"peft": lambda model: None, "fused": fuse}.items():
        model = adapted(torch.bfloat16)
        prepare(model)
        attention, x = model.get_base_model().attention, torch.randn(9, 40, dtype=torch.bfloat16, requires_grad=True)
        counts = []
        for _ in range(2):
            x.grad = None
            with Operations() as operations:
                outs = attention(x)
                torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
            counts.append(operations.counts.total() - operations.counts["ones_like"])
        counted[name] = counts
    assert counted["fused"][1] <= 29, counted
    assert counted["fused"][1] < counted["fused"][0] + 6, counted  # six additions to earlier gradients
    assert counted["peft"][1] >= 2 * counted["fused"][1], counted


def test_a_layer_with_another_input_and_changed_parameters_are_computed_anew():
    model = adapted()
    expected = copy.deepcopy(model).get_base_model().attention
    fuse(model)
    attention = model.get_base_model().attention
    x, values = torch.randn(5, 40), torch.randn(5, 40)
    for arguments in [(x, values), (x, None), (values, x)]:
        for out, other in zip(attention(*arguments), expected(*arguments), strict=True):
            torch.testing.assert_close(out, other)
    before = attention(x)
    attention.q_proj(x)  # leaves outputs of the others
    with torch.no_grad():
        x.add_(1)
        for module in (attention, expected):
            module.k_proj.lora_B["default"].weight.mul_(-2)
    for out, other, old in zip(attention(x), expected(x), before, strict=True):
        torch.testing.assert_close(out, other)
        assert not torch.allclose(out, old)


def test_the_reference_and_layers_that_compute_more_are_those_of_peft():
    x = torch.randn(5, 24)
    model = adapted()
    fuse(model)
    base = model.get_base_model()
    plain = Block()
    for path in ("first", "second", "attention.q_proj", "attention.k_proj", "attention.v_proj"):
        plain.get_submodule(path).load_state_dict(base.get_submodule(path).base_layer.state_dict())
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
    model.add_adapter("other", LoraConfig(r=2, lora_alpha=2.0, target_modules=LAYERS))
    fuse(model)
    x = torch.randn(5, 24)
    first = model(x)
    model.set_adapter("other")
    with model.disable_adapter():
        base = model(x)
    assert torch.allclose(model(x), base)  # its B is zero
    assert not torch.allclose(first, base)
