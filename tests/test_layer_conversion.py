"""layer_conversion.py: from a convolution to attention and back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import layers
from timm.layers import StdConv2d
from timm.layers.conv2d_same import Conv2dSame
from torch import nn

from sa_zoo.convolution.layer_conversion import (
    attention_from_conv,
    conv_and_distance,
    conv_from_attention,
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(layers(), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_a_convolution_comes_back_bit_for_bit(drawn, dtype):
    conv = drawn.conv.to(dtype)
    again, distance = conv_and_distance(attention_from_conv(conv, 39.0))
    assert distance == 0.0
    assert type(again) is type(conv) and repr(again) == repr(conv)
    assert torch.equal(again.weight, conv.weight)
    assert conv.bias is None or torch.equal(again.bias, conv.bias)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(2, 3, (4, 3), padding="same"),
        nn.Conv2d(2, 3, 3, padding="valid"),
        Conv2dSame(2, 3, 3, 2),
    ],
)
def test_padding_by_name_comes_back_as_the_same_function(conv):
    again, x = conv_from_attention(attention_from_conv(conv)), torch.randn(1, 2, 7, 8)
    assert isinstance(again, type(conv))
    assert torch.equal(again(x), conv(x))


def test_the_convolution_is_cut_from_the_effective_kernel():
    """That kernel, from the answer to an impulse, cut to the pixels of the convolution; the rest is the distance."""
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, (3, 2), padding=(2, 1), dilation=(2, 1)).double()
    layer = attention_from_conv(conv, 1.4)
    layer.Delta.data += 0.3 * torch.randn_like(layer.Delta)
    layer.alpha.data *= torch.rand_like(layer.alpha) + 0.7
    images = torch.zeros(2, 2, 41, 41, dtype=torch.float64)
    images[[0, 1], [0, 1], 20, 20] = 1
    answers = layer(images) - layer.b_out[:, None, None]
    # Query q stands on pixel q, of 41 x 42, and sees the impulse at delta = 20 - q.
    kernel = answers[:, :, :41, :41].flip(2, 3).transpose(0, 1)
    expected = kernel[:, :, 18:23:2, 19:21]
    nearest, distance = conv_and_distance(layer)
    assert torch.allclose(nearest.weight, expected, atol=1e-10)
    rest = kernel.abs().sum(dim=(1, 2, 3)) - expected.abs().sum(dim=(1, 2, 3))
    assert distance == pytest.approx(rest.max().item(), rel=1e-9)
    assert torch.equal(nearest.bias, conv.bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_some_input_reaches_the_distance_of_a_rounded_kernel(dtype):
    """The two kernels in float64, on the input that has the sign of their difference at every pixel."""
    torch.manual_seed(0)
    layer = attention_from_conv(nn.Conv2d(3, 5, 3, dtype=dtype), 9.0)
    conv, distance = conv_and_distance(layer)
    x = torch.zeros(1, 3, 17, 19, dtype=torch.float64, requires_grad=True)
    apart = (layer.double().definition(x) - conv.double()(x))[0, :, 7, 8]
    reached = [torch.autograd.grad(each, x, retain_graph=True)[0].abs().sum() for each in apart]
    assert float(max(reached)) == pytest.approx(distance, rel=1e-9)


@pytest.mark.parametrize(("which", "value"), [("Delta", float("nan")), ("alpha", 0.0)])
def test_a_head_of_unbounded_support_has_no_convolution(which, value):
    layer = attention_from_conv(nn.Conv2d(3, 5, 3), 4.0)
    getattr(layer, which).data[4] = value
    with pytest.raises(ValueError, match="attention: got a head with unbounded support"):
        conv_from_attention(layer)


def changed(change):
    layer = nn.Conv2d(3, 5, 3)
    change(layer)
    return layer


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.ConvTranspose2d(3, 5, 3), "puts queries between keys"),
        (nn.Linear(3, 5), "Linear is not a convolution"),
        (nn.LazyConv2d(5, 3), "no weights before its first image"),
        (changed(nn.utils.parametrizations.spectral_norm), "on every call"),
        (changed(lambda layer: layer.register_full_backward_pre_hook(print)), "hooks"),
        (changed(lambda layer: setattr(layer, "forward", print)), "a replaced forward"),
        (nn.Conv1d(1, 1, 2, dilation=257, dtype=torch.bfloat16), "rounds the positions"),
        (StdConv2d(3, 5, 3), "StdConv2d computes more than a convolution"),
    ],
)
def test_what_attention_cannot_express_is_refused(layer, reason):
    with pytest.raises(ValueError, match=reason):
        attention_from_conv(layer)


def test_the_convolution_is_left_alone_and_its_state_kept():
    conv = nn.Conv2d(3, 5, 3).half().eval()
    layer = attention_from_conv(conv, 4.0)
    assert not layer.training and layer.alpha.dtype == torch.float16
    layer.W_val.weight.data.zero_()
    assert conv.weight.all()
    assert attention_from_conv(conv.to("meta"), 4.0).W_val.weight.is_meta


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize("alpha", [46.0, 3.0])
def test_a_frozen_tensor_stays_frozen_in_both_directions(alpha, frozen):
    conv = nn.Conv2d(3, 5, 3, padding=1)
    getattr(conv, frozen).requires_grad_(False)
    layer = attention_from_conv(conv, alpha)
    for name, value in layer.named_parameters():
        assert value.requires_grad == ((name == "b_out") == (frozen == "weight"))
    for name, value in conv_from_attention(layer).named_parameters():
        assert value.requires_grad == (name != frozen)
