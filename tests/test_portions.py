"""portions.py: a few images at a time, against all of them at once."""

import pytest
import torch
from torch import nn

from sa_zoo.kernels import portions
from sa_zoo.kernels.situation import situation

K, N = 7, 11


@pytest.fixture(autouse=True)
def two_images_per_portion(monkeypatch):
    monkeypatch.setattr(portions, "PORTION", 2 * 3 * K)


def divided(function, *tensors: torch.Tensor) -> torch.Tensor:
    return portions.divided(function, situation([], *tensors), *tensors)


def test_portions_give_the_whole_and_its_gradients_and_keep_nothing_between():
    torch.manual_seed(0)
    X = torch.randn(5, 3, K, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(N, K, dtype=torch.float64, requires_grad=True)
    seen, kept = [], []

    def function(some: torch.Tensor) -> torch.Tensor:
        seen.append(len(some))
        return (some @ weight.T).exp().square()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape[-1])
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        got = divided(function, X)
    assert seen == [2, 2, 1] and N not in kept
    expected = function(X)
    direction = torch.randn_like(expected)
    pairs = zip(
        (got, *torch.autograd.grad(got, [X, weight], direction)),
        (expected, *torch.autograd.grad(expected, [X, weight], direction)),
        strict=True,
    )
    assert all(torch.allclose(mine, theirs, rtol=1e-12) for mine, theirs in pairs)


@pytest.mark.parametrize("images", [0, 1, 2, 5])
def test_portions_without_gradients_give_the_whole(images):
    X, Y = torch.randn(images, 3, K), torch.randn(images, 11)

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.sum(dim=1)[:, :, None] * y[:, None]).double()

    with torch.no_grad():
        assert torch.equal(divided(function, X, Y), function(X, Y))


def test_portions_draw_the_same_dropout_again_for_their_gradients():
    X = torch.randn(5, 3, K, requires_grad=True)
    drop = nn.Dropout(0.5)
    y = divided(lambda some: drop(some) * some, X)
    (gradient,) = torch.autograd.grad(y.sum(), X)
    dropped = y == 0
    assert dropped.any() and not dropped.all()
    assert torch.equal(gradient == 0, dropped)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_divides_only_large_batches(dtype):
    for pixels, expected in ((1, [5]), (2, [2, 2, 3, 3])):
        X = torch.randn(5, pixels, K, dtype=dtype, requires_grad=True)
        seen = []
        divided(lambda some, seen=seen: seen.append(len(some)) or some.exp(), X).sum().backward()
        assert sorted(seen) == expected
