"""certificate.py: the bound holds for any layer and input, and is not far above what some input reaches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import layers, without_onednn
from torch import nn

from sa_zoo.convolution.certificate import certificate
from sa_zoo.convolution.layer_conversion import attention_from_conv

# Half of the layers in the range where heads still see their neighbours, the others from unbounded to one-hot.
ALPHAS = st.one_of(
    st.floats(0.1, 20.0), st.floats(-3.0, 7.0).map(lambda power: 2.0**power), st.just(torch.inf)
)


def adversary(layer: nn.Module, conv: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The input in [-1, 1] that sets the layer and the convolution furthest apart at one output in the middle."""
    probe = torch.zeros_like(x, dtype=torch.float64, requires_grad=True)
    apart = layer.double().definition(probe) - conv.double()(probe)
    middle = tuple(size // 2 for size in apart.shape[2:])
    (gradient,) = torch.autograd.grad(apart[(0, -1, *middle)], probe)
    return gradient.sign().to(x.dtype)


def excess(layer: nn.Module, conv: nn.Module, x: torch.Tensor) -> float:
    """The measured difference over the bound, for the worst channel."""
    with torch.no_grad():
        apart = (layer(x).double() - conv(x).double()).abs()
    bound = certificate(layer, list(x.shape[2:]), float(x.abs().max())).bound
    ratio = apart.amax(dim=(0, *range(2, x.ndim))) / bound
    return float(ratio.nan_to_num(0.0).max())  # no weights, no bound, no difference: 0 / 0


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str
)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    drawn=layers(),
    alpha=ALPHAS,
    magnitude=st.floats(0.01, 10.0),
    underflows=st.booleans(),
)
def test_no_input_breaks_the_bound(dtype, drawn, alpha, magnitude, underflows):
    if underflows:
        limits = torch.finfo(dtype)
        for parameter in drawn.conv.parameters():
            parameter.data *= 64 * limits.smallest_normal * limits.eps
    conv, x = drawn.conv.to(dtype), drawn.inputs().to(dtype) * magnitude
    layer = attention_from_conv(conv, alpha)
    with without_onednn():
        assert excess(layer, conv, x) <= 1
        worst = adversary(attention_from_conv(conv, alpha), attention_from_conv(conv), x)
        assert excess(layer, conv.to(dtype), worst * magnitude) <= 1


@settings(max_examples=100, deadline=None, derandomize=True)
@given(drawn=layers(), alpha=st.floats(0.5, 30.0), moved=st.floats(0.0, 0.6))
def test_the_bound_holds_for_trained_positions(drawn, alpha, moved):
    layer = attention_from_conv(drawn.conv, alpha)
    generator = torch.Generator().manual_seed(drawn.seed)
    layer.Delta.data += moved * (2 * torch.rand(layer.Delta.shape, generator=generator) - 1)
    layer.alpha.data *= 0.5 + torch.rand(layer.alpha.shape, generator=generator)
    assert excess(layer, drawn.conv, drawn.inputs()) <= 1


@pytest.mark.parametrize("kernel_size", [1, 2, 5])
@pytest.mark.parametrize("alpha", [1.0, 8.0])
def test_some_input_comes_within_a_factor_of_three_of_the_bound(alpha, kernel_size):
    """The factor is what the heads' errors cancel among each other, which the bound adds up."""
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 5, kernel_size, padding=kernel_size // 2).double()
    layer = attention_from_conv(conv, alpha)
    x = adversary(layer, conv, torch.zeros(1, 3, 17, 19)).double()
    apart = (layer(x) - conv(x)).detach().abs().amax(dim=(0, 2, 3))[-1]
    bound = certificate(layer, [17, 19]).bound[-1]
    assert bound / 3 <= apart <= bound


@pytest.mark.parametrize("which", ["Delta", "alpha"])
def test_heads_of_extreme_parameters_cost_no_memory(which):
    conv = nn.Conv2d(3, 5, 3, padding=1)
    layer = attention_from_conv(conv, 20.0)
    expected = certificate(layer, [7, 7]).attention
    getattr(layer, which).data[4] = 1e9
    if which == "Delta":
        # This head's whole value matrix, twice, and little of the others.
        expected = 2 * conv.weight.detach().double()[:, :, 1, 1].abs().sum(dim=1)
    assert torch.allclose(certificate(layer, [7, 7]).attention, expected, rtol=1e-5)
