"""layer_conversion.py, slices.py: from a convolution to attention and back."""

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
    why_not,
)
from sa_zoo.convolution.soft import SoftAttention


@settings(max_examples=100, deadline=None, derandomize=True)
@given(layers(), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), st.booleans())
def test_a_convolution_comes_back_bit_for_bit(drawn, dtype, content):
    """Also from behind a shut gate."""
    conv = drawn.conv.to(dtype)
    content = content and not why_not(conv, content=True)
    again, distance = conv_and_distance(attention_from_conv(conv, 39.0, content))
    assert distance == 0.0
    assert type(again) is type(conv)
    assert repr(again) == repr(conv)
    assert torch.equal(again.weight, conv.weight)
    assert conv.bias is None or torch.equal(again.bias, conv.bias)
    assert (
        attention_from_conv(again).state_dict().keys()
        == attention_from_conv(conv).state_dict().keys()
    )


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_padding_by_name_and_tensorflows_come_back_as_the_same_function():
    x = torch.randn(1, 2, 7, 8)
    for conv in (
        nn.Conv2d(2, 3, (4, 3), padding="same"),
        nn.Conv2d(2, 3, 3, padding="valid"),
        Conv2dSame(2, 3, 3, 2),
    ):
        again = conv_from_attention(attention_from_conv(conv))
        assert isinstance(again, type(conv))
        assert torch.equal(again(x), conv(x))


def test_the_convolution_on_the_taps_and_its_distance_are_those_of_the_effective_kernel():
    """The effective kernel, from the answer to an impulse, cut to the convolution's taps; the rest is the distance."""
    torch.manual_seed(0)
    conv = nn.Conv2d(
        2, 3, (3, 2), padding=(2, 1), dilation=(2, 1)
    ).double()  # 41 x 42 queries for 41 x 41 pixels
    layer = attention_from_conv(conv, 1.4)
    with torch.no_grad():
        layer.Delta += 0.3 * torch.randn_like(layer.Delta)
        layer.alpha *= torch.rand_like(layer.alpha) + 0.7
    kernel = torch.zeros(3, 2, 41, 41, dtype=torch.float64)
    image = torch.zeros(1, 2, 41, 41, dtype=torch.float64)
    with torch.no_grad():
        for channel in range(2):
            image.zero_()[0, channel, 20, 20] = 1
            answer = (layer(image) - layer.b_out[:, None, None])[0]
            # Query q stands on pixel q and sees the impulse at delta = 20 - q.
            kernel[:, channel] = answer[:, :41, :41].flip(1, 2)
    expected = kernel[:, :, 18:23:2, 19:21]
    nearest, distance = conv_and_distance(layer)
    assert torch.allclose(nearest.weight, expected, atol=1e-10)
    rest = kernel.abs().sum(dim=(1, 2, 3)) - expected.abs().sum(dim=(1, 2, 3))
    assert distance == pytest.approx(rest.max().item(), rel=1e-9)
    assert torch.equal(conv_from_attention(layer).weight, nearest.weight)
    assert torch.equal(nearest.bias, conv.bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_some_input_reaches_the_distance_of_a_rounded_kernel(dtype):
    """The two kernels in float64, on the input that has the sign of their difference at every pixel."""
    torch.manual_seed(0)
    layer = attention_from_conv(nn.Conv2d(3, 5, 3, dtype=dtype), 9.0)
    conv, distance = conv_and_distance(layer)
    x = torch.zeros(1, 3, 17, 19, dtype=torch.float64, requires_grad=True)
    apart = layer.double().definition(x) - conv.double()(x)
    reached = []
    for channel in range(5):
        (gradient,) = torch.autograd.grad(apart[0, channel, 7, 8], x, retain_graph=True)
        reached.append(gradient.abs().sum().item())
    assert max(reached) == pytest.approx(distance, rel=1e-9)


@pytest.mark.parametrize(("which", "value"), [("Delta", float("nan")), ("alpha", 0.0)])
def test_a_head_that_sees_without_end_has_no_convolution(which, value):
    layer = attention_from_conv(nn.Conv2d(3, 5, 3), 4.0)
    with torch.no_grad():
        getattr(layer, which)[4] = value
    with pytest.raises(ValueError, match="attention: got a head that sees without end"):
        conv_from_attention(layer)


def test_what_attention_cannot_express_is_refused_with_the_reason():
    parametrized = nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 5, 3))
    hooked, hooked_backward, replaced = (nn.Conv2d(3, 5, 3) for _ in range(3))
    hooked.register_forward_hook(lambda *_: None)
    hooked_backward.register_full_backward_pre_hook(lambda *_: None)
    replaced.forward = lambda x: x
    for layer, reason in (
        (nn.ConvTranspose2d(3, 5, 3), "puts queries between keys"),
        (nn.Linear(3, 5), "Linear is not a convolution"),
        (nn.LazyConv2d(5, 3), "no weights before its first image"),
        (parametrized, "computed on every call"),
        (hooked, "hooks"),
        (hooked_backward, "hooks"),
        (replaced, "a replaced forward"),
        (nn.Conv1d(1, 1, 2, dilation=257, dtype=torch.bfloat16), "bfloat16 rounds the positions"),
        (StdConv2d(3, 5, 3), "StdConv2d computes more than a convolution"),
    ):
        with pytest.raises(ValueError, match=reason):
            attention_from_conv(layer)
    with pytest.raises(ValueError, match="alpha: got -1"):
        attention_from_conv(nn.Conv2d(3, 5, 3), -1.0)
    with pytest.raises(ValueError, match="attention: got Conv2d"):
        conv_from_attention(nn.Conv2d(3, 5, 3))
    opened = attention_from_conv(nn.Conv2d(3, 5, 3), 4.0, content=True)
    nn.init.ones_(opened.gate)
    with pytest.raises(ValueError, match="gate is open"):
        conv_from_attention(opened)


def test_the_convolution_is_left_alone_and_its_state_is_taken_over():
    conv = nn.Conv2d(3, 5, 3).eval().requires_grad_(False)
    weight = conv.weight.clone()
    layer = attention_from_conv(conv, 4.0)
    assert isinstance(layer, SoftAttention) and not layer.training
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    with torch.no_grad():
        layer.W_val.weight.zero_()
    assert torch.equal(conv.weight, weight)
    assert attention_from_conv(nn.Conv2d(3, 5, 3).half(), 4.0).alpha.dtype == torch.float16
    assert attention_from_conv(nn.Conv2d(3, 5, 3, device="meta"), 4.0).W_val.weight.is_meta


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize("arguments", [{}, {"alpha": 3.0}])
def test_a_frozen_tensor_stays_frozen_in_both_directions(arguments, frozen):
    conv = nn.Conv2d(3, 5, 3, padding=1)
    getattr(conv, frozen).requires_grad_(False)
    layer = attention_from_conv(conv, **arguments)
    trained = {
        name.rpartition(".")[2] == "b_out": value.requires_grad
        for name, value in layer.named_parameters()
    }
    assert trained == {True: frozen == "weight", False: frozen == "bias"}
    again = conv_from_attention(layer)
    assert (again.weight.requires_grad, again.bias.requires_grad) == (
        frozen == "bias",
        frozen == "weight",
    )
