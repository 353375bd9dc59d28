"""Logits in parts of the vocabulary are those of one product, for any number of rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from components.models import split_head
from components.models.split_head import MOST_ROWS, PART, split


def model_with(head: torch.nn.Module):
    return SimpleNamespace(get_output_embeddings=lambda: head)


@pytest.fixture
def heads():
    """A head of two and a half parts, split, and the same as torch computes it."""
    torch.manual_seed(0)
    vocabulary = 5 * PART * torch.get_num_threads() // 2
    plain, parted = (torch.nn.Linear(32, vocabulary, bias=False) for _ in range(2))
    parted.load_state_dict(plain.state_dict())
    assert split(model_with(parted))
    return plain, parted


@pytest.fixture
def products(monkeypatch):
    """Shapes of the products that are computed in parts."""
    shapes = []
    original = torch.mm

    def mm(left, right, **options):
        shapes.append((len(left), right.shape[1]))
        return original(left, right, **options)

    monkeypatch.setattr(split_head.torch, "mm", mm)
    return shapes


@pytest.mark.parametrize("shape", [(2, 1), (7, 1), (3, 5), (MOST_ROWS, 1)])
def test_logits_are_those_of_one_product(heads, products, shape):
    plain, parted = heads
    x = torch.randn(*shape, 32)
    with torch.inference_mode():
        torch.testing.assert_close(parted(x), plain(x), rtol=1e-5, atol=1e-6)
    count = PART * torch.get_num_threads()
    assert products == [(shape[0] * shape[1], columns) for columns in (count, count, count // 2)]


@pytest.mark.parametrize("rows", [0, 1, MOST_ROWS + 1])
def test_other_numbers_of_rows_are_one_product(heads, products, rows):
    plain, parted = heads
    x = torch.randn(rows, 1, 32)
    with torch.no_grad():
        assert torch.equal(parted(x), plain(x))
    assert not products


def test_gradients_are_those_of_torch(heads, products):
    plain, parted = heads
    for head in heads:
        head(torch.ones(3, 32)).square().sum().backward()
    assert torch.equal(parted.weight.grad, plain.weight.grad)
    assert not products


def test_changed_weights_count(heads):
    plain, parted = heads
    with torch.no_grad():
        for head in heads:
            head.weight.mul_(2)
        torch.testing.assert_close(parted(torch.ones(2, 32)), plain(torch.ones(2, 32)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "head",
    [
        torch.nn.Linear(4, 8, bias=True),
        torch.nn.Linear(4, 8, bias=False, dtype=torch.bfloat16),
        torch.nn.Linear(4, 8, bias=False, device="meta"),
        torch.nn.Bilinear(4, 4, 8),
    ],
)
def test_other_heads_stay_as_they_are(head):
    assert not split(model_with(head))
    assert "forward" not in vars(head)
