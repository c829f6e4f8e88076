"""soft_attention.py: finite alpha, by axes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import CONVOLUTIONS, layers, without_onednn
from torch import nn

from sa_zoo.convolution.layer_conversion import attention_from_conv
from sa_zoo.convolution.soft_attention import SoftAttention


def assert_is_the_definition(layer, x, gradients):
    """The layer gives the outputs of the explicit softmax, and its gradients."""
    expected, y = layer.definition(x), layer(x)
    assert torch.allclose(y, expected, rtol=0, atol=1e-12)
    direction = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, gradients, direction)
    found = torch.autograd.grad(y, gradients, direction)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    layers(), st.floats(0.05, 37.0), st.sampled_from([0.0, 0.4])
)  # soft in one dimension up to 37.4
def test_soft_attention_is_the_definition(drawn, alpha, moved):
    """With gradients of the image, of Delta and alpha, a little off their start, and of values."""
    layer = attention_from_conv(drawn.conv, alpha)
    assert isinstance(layer, SoftAttention)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        layer.Delta += moved * torch.randn(layer.Delta.shape, generator=generator)
        layer.alpha *= 1 + moved * torch.rand(layer.alpha.shape, generator=generator)
    x = drawn.inputs(batch=2).requires_grad_()
    assert_is_the_definition(layer, x, [x, layer.Delta, layer.alpha, layer.W_val.weight])


@pytest.mark.parametrize("alpha", [-0.1, 0.0, 1e-6, 0.6, 20.0, 37.0, 1e5, torch.inf])
@pytest.mark.parametrize(("sizes", "stride"), [((2,), 1), ((13,), 2), ((5, 7), 1), ((5, 7), 2)])
def test_a_head_whose_targets_lie_outside_attends_to_the_nearest_key(sizes, stride, alpha):
    """One head, so that whole windows lie outside; also half-way between two pixels."""
    layer = attention_from_conv(CONVOLUTIONS[len(sizes)](2, 3, 1, stride=stride).double(), 20.0)
    x = torch.randn(2, 2, *sizes, dtype=torch.float64)
    layer.alpha.data.fill_(alpha)
    for shift in (-5.0, -1.0, -0.5, 0.4, 0.5, 3.0):
        layer.Delta.data[0, -1] = shift
        assert_is_the_definition(layer, x, [layer.W_val.weight])


def test_autocast_and_half_precision_agree_with_float32():
    conv = nn.Conv2d(5, 7, 3, padding=1)
    x = torch.randn(2, 5, 11, 13)
    for alpha in (46.0, 20.0, 3.0):
        layer = attention_from_conv(conv, alpha)
        expected = layer(x)
        with torch.autocast("cpu", dtype=torch.bfloat16), without_onednn():
            assert (layer(x) - expected).abs().max() < 0.05
        half = layer.half()(x.half())
        assert half.dtype == torch.float16
        assert (half - expected).abs().max() < 0.01


@pytest.mark.filterwarnings("ignore")  # of torch, for which tracing and scripting are legacy
@pytest.mark.parametrize("how", ["script", "trace", "compile", "export"])
@pytest.mark.parametrize("arguments", [{}, {"alpha": 20.0}, {"alpha": 3.0}])
def test_graphs_take_any_number_of_images_and_follow_their_heads(arguments, how):
    layer = attention_from_conv(nn.Conv2d(3, 5, 3, stride=2, padding=1), **arguments)
    few, many = torch.randn(2, 3, 7, 5), torch.randn(37, 3, 7, 5)
    torch.compiler.reset()
    batch = {0: torch.export.Dim("batch")}
    graph = {
        "script": lambda: torch.jit.script(layer),
        "trace": lambda: torch.jit.trace(layer, (few,)),
        "compile": lambda: torch.compile(layer, fullgraph=True, backend="eager"),
        "export": lambda: torch.export.export(layer, (few,), dynamic_shapes=(batch,)).module(),
    }[how]()
    assert torch.allclose(graph(many), layer.definition(many), atol=1e-6)
    assert layer(many[:0]).shape == (0, 5, 4, 3)
    if arguments and how != "export":
        layer.alpha.data.fill_(2.0)  # the tensor of both
        assert torch.allclose(graph(many), layer.definition(many), atol=1e-6)
