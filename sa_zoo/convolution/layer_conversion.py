"""One layer: nn.Conv1d, nn.Conv2d or nn.Conv3d -> multi-head self-attention -> convolution. Symbols: theorem.py.

Uses timm only for its convolutions with TensorFlow's padding.
"""

import copy
import math
from typing import Any

import torch
from timm.layers.conv2d_same import Conv2dSame, Conv2dSameExport
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized

from sa_zoo.convolution.convolutional import (
    ConvolutionalAttention,
    HardAttention,
    convolutional,
)
from sa_zoo.convolution.padding import Padding, SamePadding
from sa_zoo.convolution.soft_attention import SoftAttention
from sa_zoo.convolution.theorem import EXACT, head_shifts, missed_attention, neighborhoods_with
from sa_zoo.convolution.values import values_from_kernel
from sa_zoo.models.attention import Attention
from sa_zoo.models.linear import as_one_map, is_watched

# Any: torch declares sizes as tuples of one, two or three items.
CONVOLUTIONS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TENSORFLOW_CONVOLUTIONS = (Conv2dSame, Conv2dSameExport)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def why_not(layer: nn.Module) -> str:
    """Why this layer cannot be expressed as multi-head self-attention; empty if it can."""
    if isinstance(layer, TRANSPOSED):
        return (
            "its stride puts queries between keys, and each position in between has its own kernel"
        )
    if not isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return f"{type(layer).__name__} is not a convolution"
    if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
        return "it has no weights before its first image"
    if is_parametrized(layer):
        return "its kernel is computed on every call; remove the parametrization first"
    if is_watched(layer):
        return "it has hooks or a replaced forward, which would be lost; remove them first"
    plain = CONVOLUTIONS[layer.weight.ndim - 2]
    kind = type(layer)
    same_call = kind.forward is plain.forward and kind._conv_forward is plain._conv_forward
    if not same_call and kind not in TENSORFLOW_CONVOLUTIONS:
        return f"{kind.__name__} computes more than a convolution with its weight"
    shifts = head_shifts(layer.kernel_size, layer.dilation, _padding(layer).center)
    if (shifts.to(layer.weight.dtype) != shifts).any():
        return f"{layer.weight.dtype} rounds the positions of its heads; convert it in float32"
    return ""


def _padding(conv: _ConvNd) -> Padding:
    """The convolution's padding, as a module."""
    extent = [step * (size - 1) for step, size in zip(conv.dilation, conv.kernel_size, strict=True)]
    if type(conv) in TENSORFLOW_CONVOLUTIONS:
        return SamePadding(extent, conv.stride)
    if conv.padding == "same":
        before = [size // 2 for size in extent]
        after = [size - size // 2 for size in extent]
        return Padding(before, after, conv.padding_mode)
    amounts = conv.padding if isinstance(conv.padding, tuple) else [0] * len(extent)  # "valid"
    return Padding(amounts, amounts, conv.padding_mode)


def attention_from_conv(conv: _ConvNd, alpha: float = 46.0) -> ConvolutionalAttention:
    """Multi-head self-attention equal to a convolution up to certificate.py's bound; `conv` is not modified.

    Args:
        conv: nn.Conv1d, nn.Conv2d, nn.Conv3d or timm's Conv2dSame.
        alpha: sharpness of all heads. From 39 on, the layer runs as its convolution, in any type, and Delta and alpha
            are fixed; 46 is the paper's. Below, they are parameters.

    Raises ValueError, with the reason, for layers it cannot express.
    """
    reason = why_not(conv)
    if reason:
        raise ValueError(
            f"conv: got {conv}, expected a convolution that attention can express: {reason}"
        )
    return attention_in_place(copy.deepcopy(conv), alpha)


def attention_in_place(conv: _ConvNd, alpha: float) -> ConvolutionalAttention:
    """Like attention_from_conv, but takes over the tensors of `conv`: do not use it afterwards."""
    if not alpha > 0:
        raise ValueError(f"alpha: got {alpha}, expected a positive number")
    weight = conv.weight.detach()
    heads = math.prod(conv.kernel_size)
    alphas = torch.full([heads], alpha, device="cpu", dtype=torch.float64)
    offset = torch.zeros(heads, len(conv.kernel_size), device="cpu")
    evaluation: type[ConvolutionalAttention] = SoftAttention
    if missed_attention(offset, alphas).max() <= EXACT:
        evaluation = HardAttention
    attention = evaluation(
        values_from_kernel(weight),
        conv.bias,
        _padding(conv),
        conv.stride,
        conv.dilation,
        conv.groups,
        alphas.to(weight),
    )
    _train_what_was_trained(attention, conv.weight, conv.bias)
    return attention.train(conv.training)


def _train_what_was_trained(layer: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
    """Give the layer's bias the requires_grad of `bias`, and all of its other parameters that of `weight`."""
    for name, parameter in layer.named_parameters():
        given = bias if name in ("bias", "b_out") else weight
        parameter.requires_grad_(given is not None and given.requires_grad)


def conv_from_attention(attention: nn.Module) -> _ConvNd:
    """The convolution equal to the layer, bit for bit, or else that of `conv_and_distance`.

    Network attention whose heads are taps, as made by `harden`, gives one with replicate padding and W_out folded in,
    from (B, D, H, W) to (B, D, H, W). Its kernel is the smallest one around the query with all taps.
    """
    return conv_and_distance(attention)[0]


def conv_and_distance(attention: nn.Module) -> tuple[_ConvNd, float]:
    """The nearest convolution of the layer's kernel size, stride and dilation, and the distance of their outputs.

    The distance is a bound away from the border, for |x| <= 1: the layer's weights outside the kernel's pixels, plus
    the rounding of the others to the layer's type. Some input reaches it. It is zero for a layer equal to a
    convolution. Raises ValueError if a head has unbounded support, for a network's
    attention whose heads are not all taps, or for other layers than those of attention_from_conv.
    """
    if isinstance(attention, Attention):
        return _conv_of_network(attention), 0.0
    attention = convolutional("attention", attention)
    with torch.no_grad():
        kernel, distance = _kernel_and_distance(attention)
    geometry: dict[str, Any] = {"stride": attention.stride, "dilation": attention.dilation}
    kind = CONVOLUTIONS[kernel.ndim - 2]
    pad = attention.pad
    if isinstance(pad, SamePadding):
        kind = Conv2dSame
    else:
        geometry["padding"] = pad.before if pad.before == pad.after else "same"
        geometry["padding_mode"] = pad.mode
    conv = conv_of(kernel, attention.b_out, kind, groups=attention.groups, **geometry)
    _train_what_was_trained(conv, next(attention.W_val.parameters()), attention.b_out)
    return conv.train(attention.training), distance


def conv_of(kernel: Tensor, bias: Tensor | None, kind: Any, **geometry: Any) -> _ConvNd:
    """A convolution with this kernel, (D_out, D_in / groups, *K), and this bias."""
    channels = kernel.shape[1] * geometry.get("groups", 1)
    conv: _ConvNd = kind(
        channels, len(kernel), kernel.shape[2:], bias=bias is not None, device="meta", **geometry
    )
    conv.weight = nn.Parameter(kernel)
    if bias is not None:
        conv.bias = nn.Parameter(bias.detach().clone())
    return conv


@torch.no_grad()
def _conv_of_network(attention: Attention) -> _ConvNd:
    """The convolution of a network's attention whose heads are taps. Raises ValueError for other heads."""
    offsets = attention.terms[0].taps()
    if len(attention.terms) > 1 or not offsets:
        raise ValueError(
            "attention: got heads that are not all taps, expected those of a network after sa_zoo.harden"
        )
    merged = as_one_map(attention.W_val, attention.W_out)
    weight, bias = (x.to(attention.W_val.weight) for x in merged)
    slices = weight.unflatten(1, [len(offsets), -1]).transpose(0, 1)  # (N_h, D_out, D)
    down, across = torch.tensor(offsets).abs().amax(dim=0).tolist()
    kernel = weight.new_zeros(*slices.shape[1:], 2 * down + 1, 2 * across + 1)
    for (row, column), matrix in zip(offsets, slices, strict=True):
        kernel[:, :, down + row, across + column] += matrix  # heads may share a pixel
    conv = conv_of(kernel, bias, nn.Conv2d, padding=(down, across), padding_mode="replicate")
    return conv.train(attention.training)


def _kernel_and_distance(attention: ConvolutionalAttention) -> tuple[Tensor, float]:
    """Kernel (D_out, D_in / groups, *K) on the pixels of the layer's kernel, and its distance; float64 inside."""
    shifts = head_shifts(attention.kernel_size, attention.dilation, attention.center)
    if isinstance(attention, HardAttention) or attention.missed().max() <= EXACT:
        return attention.weight.clone(), 0.0
    wide = copy.deepcopy(attention).double()
    support = neighborhoods_with(shifts.to(wide.Delta), wide.Delta, wide.alpha)
    if not support:
        raise ValueError(
            "attention: got a head with unbounded support (its alpha is not positive, or its Delta not finite), "
            "expected heads with a center and a sharpness"
        )
    whole = wide.composed_kernel(support)
    kernel = whole
    for axis, offsets in enumerate(support):
        places = [offsets.index(shift) for shift in shifts[:, axis].int().unique().tolist()]
        kernel = kernel.index_select(2 + axis, torch.tensor(places, device=kernel.device))
    rounded = kernel.to(attention.weight)
    # Per output channel (D_out,); the distance is the weight outside the kernel, plus the rounding of the kernel.
    parts = (whole, kernel, kernel - rounded)
    total, kept, rounding = (part.abs().flatten(1).sum(dim=1) for part in parts)
    return rounded, float(((total - kept).clamp(min=0) + rounding).max())
