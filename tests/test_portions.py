"""portions.py: a few images at a time, against all of them at once."""

import pytest
import torch

from sa_zoo.fast import portions
from sa_zoo.fast.situation import Situation

K, N = 7, 11


@pytest.fixture(autouse=True)
def two_images_per_portion(monkeypatch):
    monkeypatch.setattr(portions, "PORTION", 2 * 3 * K)


def divided(function, X: torch.Tensor) -> torch.Tensor:
    return portions.divided(function, Situation([], X), [], X)


def test_portions_give_the_gradients_and_keep_nothing_between():
    X = torch.randn(5, 3, K, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(N, K, dtype=torch.float64, requires_grad=True)
    seen, kept = [], []

    def function(some: torch.Tensor) -> torch.Tensor:
        seen.append(len(some))
        return (some @ weight.T).sin().square()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape[-1])
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        got = divided(function, X)
    assert seen == [1] * 5  # twice as wide as float32
    assert N not in kept
    expected = function(X)
    direction = torch.randn_like(expected)
    gradients = [torch.autograd.grad(y, [X, weight], direction) for y in (got, expected)]
    torch.testing.assert_close((got, gradients[0]), (expected, gradients[1]))


def test_portions_draw_the_same_dropout_for_their_gradients():
    X = torch.randn(5, 3, K, requires_grad=True)
    y = divided(lambda some: torch.dropout(some, 0.5, True) * some, X)
    (gradient,) = torch.autograd.grad(y.sum(), X)
    assert 0 < (y == 0).sum() < y.numel()
    assert torch.equal(gradient == 0, y == 0)


@pytest.mark.parametrize(
    ("dtype", "pixels", "expected"),
    [(torch.float32, 1, [5]), (torch.float32, 2, [2, 2, 3, 3]), (torch.bfloat16, 2, [5, 5])],
)
def test_training_divides_only_large_batches(dtype, pixels, expected):
    X = torch.randn(5, pixels, K, dtype=dtype, requires_grad=True)
    seen = []
    divided(lambda some: seen.append(len(some)) or some.exp(), X).sum().backward()
    assert sorted(seen) == expected
