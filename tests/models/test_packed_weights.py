"""Packed linear layers compute the products of PyTorch's layers, the same for any number of rows."""

from __future__ import annotations

import pytest
import torch

from components.models.packed_weights import pack


@pytest.fixture
def layers():
    """A packed layer, and the same as PyTorch computes it."""
    torch.manual_seed(0)
    plain, packed = torch.nn.Linear(96, 160), torch.nn.Linear(96, 160)
    packed.load_state_dict(plain.state_dict())
    pack(torch.nn.Sequential(packed))
    return plain, packed


def assert_equal_products(plain, packed, x):
    with torch.inference_mode():
        torch.testing.assert_close(packed(x), plain(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(96,), (1, 96), (3, 5, 96), (300, 96), (0, 96)])
def test_products_are_those_of_the_layer(layers, shape):
    assert_equal_products(*layers, torch.randn(shape))


def test_inputs_may_be_views(layers):
    assert_equal_products(*layers, torch.randn(96, 7).T)
    assert_equal_products(*layers, torch.randn(5, 4, 96)[:, -1])


def test_rows_do_not_depend_on_the_batch(layers):
    x = torch.randn(64, 96)
    with torch.no_grad():
        whole = layers[1](x)
        assert all(torch.equal(layers[1](x[:rows]), whole[:rows]) for rows in range(2, 65))


def test_gradients_are_those_of_the_layer(layers):
    x = torch.randn(3, 96)
    for layer in layers:
        layer(x).square().sum().backward()
    assert torch.equal(layers[0].weight.grad, layers[1].weight.grad)


def test_changed_weights_are_packed_again_with_those_tied_to_them():
    model = torch.nn.ModuleDict({"input": torch.nn.Embedding(32, 16), "head": torch.nn.Linear(16, 32, bias=False)})
    model["head"].weight = model["input"].weight
    pack(model)
    with torch.no_grad():
        model["input"].weight.mul_(2)
    pack(model, [model["input"].weight])
    x = torch.randn(4, 16)
    with torch.no_grad():
        torch.testing.assert_close(model["head"](x), x @ model["input"].weight.T)


@pytest.mark.parametrize(
    "layer",
    [
        torch.nn.Linear(4, 8, dtype=torch.bfloat16),
        torch.nn.Linear(4, 8, device="meta"),
        torch.nn.Bilinear(4, 4, 8),
    ],
)
def test_other_layers_stay_as_they_are(layer):
    pack(torch.nn.Sequential(layer))
    assert "forward" not in vars(layer)
