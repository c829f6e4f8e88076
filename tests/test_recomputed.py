"""recomputed.py: the backward pass that builds heads again, against numerical derivatives and autograd's own."""

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

from sa_zoo.fast import portions
from sa_zoo.fast.choose import only
from sa_zoo.fast.recomputed import ProjectedHeads
from sa_zoo.models.attention import Attention, probabilities_from
from sa_zoo.models.terms import Quadratic

H, W, D, HEADS, B = 13, 11, 7, 3, 5


@pytest.fixture(autouse=True)
def two_images_at_a_time(monkeypatch):
    monkeypatch.setattr(portions, "PORTION", 2 * H * W * D)


def layer_of(*terms, dtype=torch.float64, **kwargs) -> Attention:
    torch.manual_seed(0)
    return Attention(D, HEADS, terms, (H, W), dtype=dtype, **kwargs)


def pixels(images: int = B, dtype=torch.float64) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(images, H, W, D, dtype=dtype, requires_grad=True)


def gradients(layer: nn.Module, X: torch.Tensor, call=None) -> list[torch.Tensor]:
    """Of X and all parameters, for a sum of the outputs with changing signs."""
    Y = layer(X) if call is None else call(X)
    direction = torch.linspace(-1.0, 1.0, Y.numel(), dtype=Y.dtype).view_as(Y)
    return list(torch.autograd.grad(Y, [X, *layer.parameters()], direction))


def equal(given: list[torch.Tensor], expected: list[torch.Tensor], error: float = 1e-10) -> bool:
    return all(
        got.dtype == want.dtype
        and (got - want).abs().max() <= error * max(1.0, float(want.abs().max()))
        for got, want in zip(given, expected, strict=True)
    )


def test_gradients_of_narrow_types_add_up_in_float32(monkeypatch):
    """Ones, of which bfloat16 counts no more than 256."""
    monkeypatch.setattr(portions, "PORTION", 1)
    sizes = [(601, 1, 1, 2), (3, 2 * HEADS), (3,), (HEADS, 1, 1), (HEADS, 1, 1)]
    given = [torch.ones(size, dtype=torch.bfloat16, requires_grad=True) for size in sizes]
    ProjectedHeads.apply(*given).sum().backward()
    _, W, _, *factors = given
    assert torch.equal(W.grad, torch.full_like(W, 601.0))
    assert all(torch.equal(P.grad, torch.full_like(P, 6 * 601.0)) for P in factors)


@pytest.mark.parametrize("sizes", [(3, 5), (7,), (2, 3, 5)])
@pytest.mark.parametrize("images", [1, 3])
def test_first_and_second_derivatives_are_numerical_ones(sizes, images, monkeypatch):
    monkeypatch.setattr(portions, "PORTION", 1)
    torch.manual_seed(0)
    X = torch.randn(images, *sizes, 2, dtype=torch.float64)
    weight = torch.randn(3, 2 * 2, dtype=torch.float64)
    bias = torch.randn(3, dtype=torch.float64)
    factors = [
        probabilities_from(torch.randn(2, n, n, dtype=torch.float64)).detach() for n in sizes
    ]
    given = [x.requires_grad_() for x in (X, weight, bias, *factors)]

    def function(*inputs: torch.Tensor) -> torch.Tensor:
        return ProjectedHeads.apply(*inputs)

    assert gradcheck(function, given, fast_mode=True)
    assert gradgradcheck(function, given, fast_mode=True)


def test_second_derivatives_take_each_path_once():
    """Where X was made of the weights that it is multiplied with."""
    layer = layer_of(Quadratic)

    def curvature() -> torch.Tensor:
        X = layer(pixels(2))
        Y = layer(X).square().sum()
        (first,) = torch.autograd.grad(Y, layer.W_val.weight, create_graph=True)
        return torch.autograd.grad(first.square().sum(), layer.terms[0].Delta)[0]

    with only("definition"):
        expected = curvature()
    assert equal([curvature()], [expected])


def test_nothing_of_the_size_of_all_heads_is_kept():
    layer, X, kept = layer_of(Quadratic), pixels(), []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.untyped_storage().nbytes())  # a view of few numbers holds no more
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(X)
    assert max(kept) == 8 * X.numel()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), only("by axes"):
        layer(X)
    assert max(kept) >= 8 * HEADS * X.numel()


@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_autocast_accumulates_in_the_type_of_the_parameters(drop):
    layer, X = layer_of(Quadratic, dtype=torch.float32, attn_drop=drop), pixels(dtype=torch.float32)

    def autocast(X: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            Y = layer(X)
        assert Y.dtype == torch.bfloat16
        return Y.float()

    def in_float32(X: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(2)
        return layer(X)

    expected = gradients(layer, X, in_float32)
    found = gradients(layer, X, autocast)
    assert equal(found, expected, error=4 * torch.finfo(torch.bfloat16).eps)
    assert not equal(found, expected, error=1e-5)


def test_compiled_networks_evaluate_by_axes_and_give_the_same():
    layer, X = layer_of(Quadratic), pixels()
    with only("definition"):
        expected = gradients(layer, X)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert equal(gradients(layer, X, compiled), expected)
