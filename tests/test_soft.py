"""soft.py: finite alpha, by one composed kernel and by axes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import CONVOLUTIONS, layers, without_onednn
from torch import nn

from sa_zoo.convolution.layer_conversion import attention_from_conv
from sa_zoo.convolution.soft import SoftAttention
from sa_zoo.convolution.theorem import seen_offsets, window


def soft(conv, alpha, moved=0.0):
    """A layer with trained positions: each alpha and Delta a little off, by a generator of its own."""
    layer = attention_from_conv(conv, alpha)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        layer.Delta += moved * torch.randn(
            layer.Delta.shape, generator=generator, dtype=layer.Delta.dtype
        )
        layer.alpha *= 1 + moved * torch.rand(
            layer.alpha.shape, generator=generator, dtype=layer.alpha.dtype
        )
    layer.settle()
    return layer


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    layers(), st.floats(0.05, 37.0), st.sampled_from([0.0, 0.4])
)  # soft in one dimension up to 37.4
def test_both_evaluations_are_the_explicit_softmax(drawn, alpha, moved):
    layer, x = soft(drawn.conv, alpha, moved), drawn.inputs(batch=2)
    assert isinstance(layer, SoftAttention)
    keys, expected = layer.pad.keys(x), layer.explicit(x)
    assert torch.allclose(layer.composed(keys), expected, rtol=0, atol=1e-12)
    assert torch.allclose(layer.by_axes(keys), expected, rtol=0, atol=1e-12)
    assert torch.allclose(layer(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("sizes", [(2,), (13,), (5, 7)])
def test_a_head_whose_targets_lie_outside_sees_the_nearest_key(sizes, stride):
    """One head, so that whole windows lie outside, moved by up to 5 pixels."""
    conv = CONVOLUTIONS[len(sizes)](2, 3, 1, stride=stride).double()
    x = torch.randn(2, 2, *sizes, dtype=torch.float64)
    for alpha in (0.6, 20.0, 37.0):
        for shift in (-5.0, -3.0, -1.0, -0.4, 0.4, 1.0, 3.0, 5.0):
            layer = attention_from_conv(conv, alpha)
            layer.Delta.data[0, -1] = shift
            layer.eval()
            composed = layer.composed(layer.pad.keys(x))
            assert torch.allclose(composed, layer.explicit(x), rtol=0, atol=1e-12), (alpha, shift)


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv1d(2, 3, 3, stride=2, padding=1),
        nn.Conv2d(2, 4, (3, 2), padding=(1, 0), groups=2),
        nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect", dilation=(1, 2), bias=False),
    ],
)
@pytest.mark.parametrize("evaluation", ["composed", "by_axes"])
def test_gradients_of_positions_sharpness_and_values(conv, evaluation):
    layer = soft(conv.double(), 1.7, moved=0.2)
    x = torch.randn(1, 2, *[5] * (conv.weight.ndim - 2), dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in layer.named_parameters()]
    assert {"Delta", "alpha", "W_val.weight"} <= set(names)

    def outputs(x, *parameters):
        bound = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(
            _Evaluation(layer, evaluation), {f"layer.{n}": p for n, p in bound.items()}, x
        )

    assert torch.autograd.gradcheck(outputs, (x, *layer.parameters()), atol=1e-6)


class _Evaluation(nn.Module):
    """One evaluation of a layer, whichever is the cheaper one."""

    def __init__(self, layer, evaluation):
        super().__init__()
        self.layer, self.evaluation = layer, evaluation

    def forward(self, x):
        return getattr(self.layer, self.evaluation)(self.layer.pad.keys(x))


def test_a_head_sees_the_keys_whose_probability_counts():
    Delta, alpha = torch.tensor([0.0, 2.4]), torch.tensor([5.0, 0.7])
    for (first, last), centre, sharpness in zip(
        seen_offsets(Delta, alpha, 1e-8), Delta, alpha, strict=True
    ):
        offsets = torch.arange(-30.0, 31.0)
        scores = -sharpness * (offsets - centre).square()
        counts = offsets[(scores - scores.max()).exp() > 1e-8]
        assert (first, last) == (counts.min().item(), counts.max().item())


def test_windows_are_the_smallest_lattice():
    assert window([(-4, -4), (0, 0), (4, 4)]) == (-4, 4, 3)
    assert window([(-5, -3), (-1, 1), (3, 5)]) == (-5, 1, 11)
    assert window([(2, 2)]) == (2, 1, 1)


def test_the_composed_kernel_is_as_wide_as_alpha_and_positions_ask():
    conv = nn.Conv2d(2, 3, (3, 5), padding=(1, 2), dilation=(4, 1))
    assert attention_from_conv(conv, 20.0).composed_kernel().shape == (3, 2, 3, 5)
    assert attention_from_conv(conv, 5.0).composed_kernel().shape == (3, 2, 11, 7)
    layer = attention_from_conv(conv, 20.0)
    with torch.no_grad():
        layer.Delta[0, 0] -= 7
    assert layer.eval().composed_kernel().shape == (3, 2, 16, 5)
    again = attention_from_conv(conv, 20.0)
    again.load_state_dict(layer.state_dict())
    assert again.composed_kernel().shape == (3, 2, 16, 5)


def test_positions_and_sharpness_may_change_between_calls():
    """As in fine-tuning with the network in evaluation mode, or by hand."""
    layer = attention_from_conv(nn.Conv2d(3, 5, 3, padding=1).double(), 20.0).eval()
    x = torch.randn(1, 3, 11, 13, dtype=torch.float64)
    layer.alpha.data.fill_(1.0)
    assert torch.allclose(layer(x), layer.explicit(x), rtol=0, atol=1e-12)
    optimizer = torch.optim.SGD([layer.Delta], lr=1.0)
    layer.Delta.grad = torch.full_like(layer.Delta, 4.3)
    optimizer.step()
    assert torch.allclose(layer(x), layer.explicit(x), rtol=0, atol=1e-12)


def test_the_cheaper_evaluation_is_chosen_by_size():
    deep, shallow = nn.Conv2d(251, 241, 3, padding=1), nn.Conv2d(3, 5, 3, padding=1)
    assert attention_from_conv(deep, 4.0).cheaper_by_axes([9, 9])
    assert not attention_from_conv(deep, 4.0).cheaper_by_axes([257, 257])
    assert not attention_from_conv(shallow, 4.0).cheaper_by_axes([31, 37])


def test_axes_contracted_in_turn_give_the_explicit_form():
    layer = soft(nn.Conv2d(2, 3, (3, 2), padding=1, stride=(2, 1)).double(), 0.6, moved=0.3)
    for image in ([5, 7], [41, 43]):
        x = torch.randn(2, 2, *image, dtype=torch.float64)
        keys = layer.pad.keys(x)
        assert torch.allclose(layer.by_axes(keys), layer.explicit(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("alpha", [0.0, 1e-6, 1e-4])
def test_the_dullest_heads_see_all_of_a_long_axis(alpha):
    layer, x = (
        attention_from_conv(nn.Conv1d(1, 1, 1).double(), 1e-3),
        torch.zeros(1, 1, 2003, dtype=torch.float64),
    )
    layer.alpha.data.fill_(alpha)
    x[..., 1009:] = 1.0
    assert torch.allclose(layer(x), layer.explicit(x), rtol=0, atol=1e-12)


def test_autocast_and_half_precision_agree_with_float32():
    conv = nn.Conv2d(5, 7, 3, padding=1)
    x = torch.randn(2, 5, 11, 13)
    for alpha in (46.0, 20.0, 3.0):
        layer = attention_from_conv(conv, alpha)
        expected = layer(x)
        with torch.autocast("cpu", dtype=torch.bfloat16), without_onednn():
            assert (layer(x) - expected).abs().max() < 0.05
        half = attention_from_conv(conv, alpha).half()
        assert half(x.half()).dtype == torch.float16
        assert (half(x.half()) - expected).abs().max() < 0.01


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("how", ["script", "compile", "export"])
@pytest.mark.parametrize(
    "arguments", [{}, {"alpha": 20.0}, {"alpha": 3.0}, {"alpha": 3.0, "content": True}]
)
def test_layers_script_compile_and_export(arguments, how):
    layer = attention_from_conv(nn.Conv2d(3, 5, 3, stride=2, padding=1), **arguments)
    x = torch.randn(2, 3, 11, 13)
    if how == "script":
        other = torch.jit.script(layer)
    elif how == "compile":
        torch.compiler.reset()
        other = torch.compile(layer, fullgraph=True, backend="eager")
    else:
        other = torch.export.export(layer, (x,)).module()
    assert torch.allclose(other(x), layer(x), atol=1e-6)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_scripted_layer_switches_modes_and_follows_its_heads_then():
    layer = attention_from_conv(nn.Conv2d(3, 5, 3, padding=1), 20.0)
    scripted, x = torch.jit.script(nn.Sequential(layer, nn.Dropout(0.5))), torch.randn(1, 3, 7, 5)
    for mode in (True, False):
        assert all(child.training is mode for child in scripted.train(mode).children())
    next(scripted.children()).alpha.data.fill_(2.0)  # the tensor of both layers
    assert torch.allclose(scripted.eval()(x), layer.explicit(x), atol=1e-6)
