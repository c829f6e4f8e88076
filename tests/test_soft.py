"""soft.py: finite alpha, by axes and by one composed kernel with a frame by axes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import CONVOLUTIONS, layers, without_onednn
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

from sa_zoo.convolution.layer_conversion import attention_from_conv
from sa_zoo.convolution.soft import SoftAttention

# What `axes_cost` has to be for either evaluation to be the cheaper one.
EVALUATIONS = {"composed": 10**9, "by axes": 0}
INFINITY = float("inf")


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
    return layer


def assert_is_the_definition(layer, x):
    """Every evaluation gives the definition's outputs."""
    expected = layer.definition(x)
    for evaluation, cost in EVALUATIONS.items():
        layer.axes_cost = cost
        assert torch.allclose(layer(x), expected, rtol=0, atol=1e-12), evaluation
    layer.axes_cost = SoftAttention.axes_cost


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    layers(), st.floats(0.05, 37.0), st.sampled_from([0.0, 0.4])
)  # soft in one dimension up to 37.4
def test_both_evaluations_are_the_definition(drawn, alpha, moved):
    layer = soft(drawn.conv, alpha, moved)
    assert isinstance(layer, SoftAttention)
    assert_is_the_definition(layer, drawn.inputs(batch=2))


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
            assert_is_the_definition(layer, x)


@pytest.mark.parametrize("alpha", [INFINITY, 1e5])
@pytest.mark.parametrize("moved", [0.5, 0.7, -0.5])
def test_one_hot_heads_between_pixels_are_the_definition_up_to_the_border(alpha, moved):
    layer = attention_from_conv(nn.Conv2d(2, 3, 3).double(), 20.0)
    with torch.no_grad():
        layer.Delta += moved
        layer.alpha.fill_(alpha)
    assert_is_the_definition(layer, torch.randn(1, 2, 11, 13, dtype=torch.float64))


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv1d(2, 3, 3, stride=2, padding=1),
        nn.Conv2d(2, 4, (3, 2), padding=(1, 0), groups=2),
        nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect", dilation=(1, 2), bias=False),
    ],
)
@pytest.mark.parametrize("cost", EVALUATIONS.values(), ids=EVALUATIONS)
def test_gradients_of_positions_sharpness_and_values(conv, cost):
    """Numerical derivatives move the numbers in place, so that the window is theirs."""
    layer = soft(conv.double(), 5.3, moved=0.2)
    layer.axes_cost = cost
    x = torch.randn(1, 2, *[11] * (conv.weight.ndim - 2), dtype=torch.float64, requires_grad=True)
    assert {"Delta", "alpha", "W_val.weight"} <= {name for name, _ in layer.named_parameters()}
    assert torch.autograd.gradcheck(lambda x, *_: layer(x), (x, *layer.parameters()), atol=1e-6)


def sharp():
    return attention_from_conv(nn.Conv2d(3, 5, 3, padding=1).double(), 20.0)


def dull_state(layer, moved):
    """Other numbers for a layer built sharp: its heads see far, around other centers."""
    state = {name: value.detach().clone() for name, value in layer.named_parameters()}
    state["alpha"].fill_(1.0)
    state["Delta"] += moved
    return state


def test_stacked_layers_are_each_evaluated_with_their_own_numbers():
    stacked, x = [sharp() for _ in range(3)], torch.randn(2, 3, 11, 13, dtype=torch.float64)
    for layer, moved in zip(stacked, (0.0, 2.3, -1.7), strict=True):
        layer.load_state_dict(dull_state(layer, moved))
    state, _ = stack_module_state(stacked)
    outputs = vmap(lambda state: functional_call(stacked[0], state, (x,)))(state)
    for layer, output in zip(stacked, outputs, strict=True):
        assert torch.allclose(output, layer.definition(x), rtol=0, atol=1e-12)


def test_a_layer_on_the_meta_device_has_the_shape_of_its_outputs():
    layer = attention_from_conv(nn.Conv2d(3, 5, 3, stride=2, device="meta"), 4.0)
    assert layer(torch.empty(2, 3, 11, 13, device="meta")).shape == (2, 5, 5, 6)


@pytest.mark.parametrize("value", [float("nan"), INFINITY, 1e9])
def test_a_head_without_a_center_costs_no_memory(value):
    layer = sharp()
    with torch.no_grad():
        layer.Delta[4, 1] = value
    x = torch.randn(1, 3, 7, 5, dtype=torch.float64)
    assert layer(x).isfinite().all() if value == 1e9 else layer(x).isnan().all()


@pytest.mark.parametrize(
    ("channels", "side", "evaluation"),
    [(67, 7, "by_axes"), (67, 131, "composed"), (3, 31, "composed"), (3, 2, "by_axes")],
)
def test_the_cheaper_evaluation_is_chosen_by_size(channels, side, evaluation, monkeypatch):
    layer = attention_from_conv(nn.Conv2d(channels, channels, 3, padding=1), 4.0)
    monkeypatch.setattr(layer, evaluation, lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        layer(torch.randn(1, channels, side, side))


@pytest.mark.parametrize("alpha", [-0.1, 0.0, 1e-6, 1e-4])
def test_the_dullest_heads_see_all_of_a_long_axis(alpha):
    layer = attention_from_conv(nn.Conv1d(1, 1, 1).double(), 1e-3)
    layer.alpha.data.fill_(alpha)
    x = torch.zeros(1, 1, 2003, dtype=torch.float64)
    x[..., 1009:] = 1.0
    assert torch.allclose(layer(x), layer.definition(x), rtol=0, atol=1e-12)


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


@pytest.mark.filterwarnings("ignore")  # of torch, for which tracing and scripting are legacy
@pytest.mark.parametrize("how", ["script", "trace", "compile", "export"])
@pytest.mark.parametrize(
    "arguments", [{}, {"alpha": 20.0}, {"alpha": 3.0}, {"alpha": 3.0, "content": True}]
)
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
