"""convolutional.py, theorem.py, padding.py: the layer by its definition and in the hard limit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_convolution import attention, padded
from random_layers import CONVOLUTIONS, layers
from timm.layers.conv2d_same import Conv2dSame
from torch import nn

from sa_zoo.convolution.convolutional import HardAttention
from sa_zoo.convolution.layer_conversion import attention_from_conv
from sa_zoo.convolution.soft_attention import SoftAttention


def by_numpy(layer, conv, x):
    """The layer's output by the loop over queries and keys; numeric padding alone."""
    keys = padded(x.numpy(), [(amount, amount) for amount in conv.padding], conv.padding_mode)
    slices = conv.weight.detach().flatten(2).unbind(-1)
    dense = torch.stack([torch.block_diag(*each.chunk(conv.groups)) for each in slices])
    bias = torch.zeros(conv.out_channels) if conv.bias is None else conv.bias.detach()
    Delta, alpha = layer.Delta.detach().numpy(), layer.alpha.detach().numpy()
    geometry = np.array(conv.stride), np.array(conv.padding)
    return attention(
        keys, layer(x).shape[2:], Delta, alpha, dense.mT.numpy(), bias.numpy(), *geometry
    )


@settings(max_examples=100, deadline=None, derandomize=True)
@given(layers())
def test_the_hard_limit_and_the_definition_are_the_convolution(drawn):
    x = drawn.inputs(batch=2)
    expected = drawn.conv(x)
    for alpha in (46.0, torch.inf):
        layer = attention_from_conv(drawn.conv, alpha)
        assert isinstance(layer, HardAttention)
        assert torch.equal(layer(x), expected)
        assert torch.allclose(layer.definition(x), expected, rtol=0, atol=1e-12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(layers(), st.floats(0.3, 2.0))
def test_the_layer_is_what_the_paper_defines(drawn, alpha):
    layer, generator = attention_from_conv(drawn.conv, alpha), torch.Generator().manual_seed(0)
    layer.Delta.data += torch.randn(layer.Delta.shape, generator=generator)
    layer.alpha.data *= torch.rand(layer.alpha.shape, generator=generator) + 0.5
    x = drawn.inputs(batch=2)
    expected = by_numpy(layer, drawn.conv, x)
    for y in (layer.definition(x), layer(x)):
        assert np.abs(y.detach().numpy() - expected).max() < 1e-12


@pytest.mark.parametrize("image", [(7, 8), (2, 3)])
@pytest.mark.parametrize(
    ("kernel_size", "stride", "dilation"), [(3, 2, 1), (5, 3, 1), (2, 1, 2), (1, 2, 1)]
)
def test_tensorflows_padding_follows_the_image(image, kernel_size, stride, dilation):
    conv = Conv2dSame(2, 3, kernel_size, stride=stride, dilation=dilation).double()
    x = torch.randn(2, 2, *image, dtype=torch.float64)
    assert torch.equal(attention_from_conv(conv)(x), conv(x))
    layer = attention_from_conv(conv, 3.0)
    assert torch.allclose(layer(x), layer.definition(x), atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_from_alpha_39_on_a_layer_runs_as_its_convolution(axes, dtype):
    conv = CONVOLUTIONS[axes](2, 3, 3, dtype=dtype)
    needed = {1: 37.5, 2: 38.2, 3: 38.6}[axes]
    assert type(attention_from_conv(conv, needed)) is HardAttention
    assert type(attention_from_conv(conv, needed - 0.1)) is SoftAttention


def test_weights_of_a_softer_layer_are_refused_in_the_hard_limit():
    conv = nn.Conv2d(2, 3, 3)
    hard, soft = attention_from_conv(conv), attention_from_conv(conv, 4.0)
    moved = hard.state_dict() | {"Delta": hard.Delta + 0.5}
    for state in (soft.state_dict(), moved):
        with pytest.raises(RuntimeError, match="expected exact ones"):
            hard.load_state_dict(state)
    hard.load_state_dict(attention_from_conv(conv, torch.inf).state_dict())
    assert hard.alpha.isinf().all()


def test_networks_can_look_at_the_layer_as_at_a_convolution():
    conv = nn.Conv2d(4, 6, (3, 1), stride=2, groups=2)
    layer = attention_from_conv(conv)
    assert torch.equal(layer.weight, conv.weight) and torch.equal(layer.bias, conv.bias)
    for name in ("in_channels", "out_channels", "groups", "kernel_size", "stride"):
        assert torch.equal(*(torch.tensor(getattr(each, name)) for each in (layer, conv)))
