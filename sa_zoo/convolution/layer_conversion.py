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

from sa_zoo.convolution.convolutional import ConvolutionalAttention, HardAttention
from sa_zoo.convolution.gated import ContentAttention
from sa_zoo.convolution.padding import Padding, SamePadding
from sa_zoo.convolution.patches import PatchAttention, patch_kernel, pixel_kernel
from sa_zoo.convolution.slices import Slices, low_rank_slices
from sa_zoo.convolution.soft import SoftAttention
from sa_zoo.convolution.theorem import exact_heads, head_shifts, is_exact, seen_offsets, window
from sa_zoo.kernels.situation import is_watched
from sa_zoo.models.positions import quadratic_scores

# Any: torch declares sizes as tuples of one, two or three items.
CONVOLUTIONS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TENSORFLOW_CONVOLUTIONS = (Conv2dSame, Conv2dSameExport)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def why_not(layer: nn.Module, content: bool = False) -> str:
    """Why this layer cannot be expressed as multi-head self-attention, with a content term or not; empty if it can."""
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
    same_call = (
        type(layer).forward is plain.forward and type(layer)._conv_forward is plain._conv_forward
    )
    if not same_call and type(layer) not in TENSORFLOW_CONVOLUTIONS:
        return f"{type(layer).__name__} computes more than a convolution with its weight"
    shifts = head_shifts(layer.kernel_size, layer.dilation, _center(layer))
    if (shifts.to(layer.weight.dtype) != shifts).any():
        return f"{layer.weight.dtype} rounds the positions of its heads; convert it in float32"
    if content and any(
        middle > size for middle, size in zip(_center(layer), _extent(layer), strict=True)
    ):
        return "its padding puts queries beyond all keys, where there is no content"
    return ""


def _extent(conv: _ConvNd) -> list[int]:
    """Last minus first key of a window, per axis."""
    return [step * (size - 1) for step, size in zip(conv.dilation, conv.kernel_size, strict=True)]


def _amounts(conv: _ConvNd) -> list[tuple[int, int]]:
    """Padding (before, after) each axis, by the padding argument of nn.Conv."""
    if isinstance(conv.padding, str):
        return [
            (size // 2, size - size // 2) if conv.padding == "same" else (0, 0)
            for size in _extent(conv)
        ]
    return [(amount, amount) for amount in conv.padding]


def _center(conv: _ConvNd) -> list[int]:
    """The key that the first query stands on, per axis."""
    if (
        type(conv) in TENSORFLOW_CONVOLUTIONS
    ):  # whose padding follows the image; the middle of the window does not
        return [size // 2 for size in _extent(conv)]
    return [before for before, _ in _amounts(conv)]


def attention_from_conv(
    conv: _ConvNd,
    alpha: float = 46.0,
    content: bool = False,
    head_dim: int | None = None,
    patch: int | None = None,
) -> nn.Module:
    """Multi-head self-attention that equals a convolution up to certificate.py's bound; `conv` is not modified.

    Args:
        conv: nn.Conv1d, nn.Conv2d, nn.Conv3d or timm's Conv2dSame.
        alpha: sharpness of all heads. From about 39 the layer runs as its convolution, in any type, and Delta and
            alpha are fixed; 46 is the paper's. Below, they are parameters.
        content: add a content term to the scores, behind a gate that starts at zero; needs a finite alpha.
        head_dim: D_h. None: D_out, with which Theorem 1 is exact; less: the best W_val_h W_out_h of that rank.
        patch: P, attend among patches of P x P pixels, with fewer heads.

    Raises ValueError for a layer that cannot be expressed, with the reason.
    """
    if reason := why_not(conv, content):
        raise ValueError(
            f"conv: got {conv}, expected a convolution that attention can express: {reason}"
        )
    conv = copy.deepcopy(conv)
    if patch is not None:
        return _patch_attention(conv, alpha, content, head_dim, patch)
    return attention_in_place(conv, alpha, content, head_dim)


def attention_in_place(
    conv: _ConvNd, alpha: float, content: bool, head_dim: int | None = None
) -> ConvolutionalAttention:
    """Like attention_from_conv, but takes over the tensors of a convolution that is not used any more."""
    if not alpha > 0:
        raise ValueError(f"alpha: got {alpha}, expected a positive number")
    if content and math.isinf(alpha):
        raise ValueError(
            "alpha: got inf with content=True, expected a finite one: one-hot heads see no content"
        )
    same = type(conv) in TENSORFLOW_CONVOLUTIONS
    pad = (
        SamePadding(_extent(conv), conv.stride)
        if same
        else Padding(_amounts(conv), conv.padding_mode)
    )
    offset, alphas = exact_heads(math.prod(conv.kernel_size), alpha, len(conv.kernel_size))
    exact = is_exact(offset, alphas)
    evaluation = ContentAttention if content else HardAttention if exact else SoftAttention
    weight = conv.weight.detach()
    attention = evaluation(
        Slices(weight) if head_dim is None else low_rank_slices(weight, conv.groups, head_dim),
        None if conv.bias is None else conv.bias.detach(),
        pad,
        conv.stride,
        conv.dilation,
        _center(conv),
        conv.groups if head_dim is None else 1,
        alphas.to(weight),
    )
    _train_what_was_trained(attention, conv.weight, conv.bias)
    return attention.train(conv.training)


def _train_what_was_trained(layer: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
    """Give the layer's bias the requires_grad of `bias`, and all of its other parameters that of `weight`."""
    for name, parameter in layer.named_parameters():
        given = bias if name in ("bias", "b_out") else weight
        parameter.requires_grad_(given is not None and given.requires_grad)


def _patch_attention(
    conv: _ConvNd, alpha: float, content: bool, head_dim: int | None, patch: int
) -> PatchAttention:
    extent = _extent(conv)
    if (
        type(conv) in TENSORFLOW_CONVOLUTIONS
        or any(size % 2 for size in extent)
        or max(conv.stride) > 1
    ):
        raise ValueError(
            f"patch: got {conv}, expected stride 1 and an odd kernel, so that patches stay where they are"
        )
    if (
        _amounts(conv) != [(size // 2, size // 2) for size in extent]
        or conv.padding_mode != "zeros"
    ):
        raise ValueError(f"patch: got {conv}, expected zero padding that keeps the image's size")
    if patch < 1:
        raise ValueError(f"patch: got {patch}, expected a positive number of pixels")
    kernel = patch_kernel(conv.weight.detach(), conv.dilation, patch)
    bias = (
        None
        if conv.bias is None
        else conv.bias.detach().repeat_interleave(patch ** (kernel.ndim - 2))
    )
    padding = [size // 2 for size in kernel.shape[2:]]
    among_patches = _convolution(kernel, bias, conv.groups, padding=padding)
    _train_what_was_trained(among_patches, conv.weight, conv.bias)
    attention = attention_in_place(among_patches.train(conv.training), alpha, content, head_dim)
    return PatchAttention(attention, conv.kernel_size, conv.dilation, patch)


def conv_from_attention(attention: nn.Module) -> _ConvNd:
    """The convolution that the layer equals, bit for bit, or else the nearest one: see `nearest_convolution`."""
    return nearest_convolution(attention)[0]


def nearest_convolution(attention: nn.Module) -> tuple[_ConvNd, float]:
    """The convolution of the layer's kernel size, stride and dilation whose kernel is nearest to the layer's.

    With it, a bound on the difference to the layer's output away from the border, for |x| <= 1: the part of the layer's
    kernel that the convolution's does not have, zero for a layer that equals a convolution. It is reached, except by
    layers with `patch` of finite alpha. Raises ValueError if the output depends on content, or the layer is not an
    attention layer of this package.
    """
    if isinstance(attention, PatchAttention):
        return _pixel_convolution(attention)
    if not isinstance(attention, ConvolutionalAttention):
        raise ValueError(
            f"attention: got {type(attention).__name__}, expected what attention_from_conv returns"
        )
    if isinstance(attention, ContentAttention) and attention.gate.detach().any():
        raise ValueError(
            "attention: got a layer whose gate is open, expected a layer that does not look at content"
        )
    with torch.no_grad():
        kernel, distance = attention.W_val().clone(), 0.0
        if not isinstance(attention, HardAttention):
            kernel, distance = _nearest_kernel(attention)
    bias = None if attention.b_out is None else attention.b_out.detach().clone()
    geometry: dict[str, Any] = {"stride": attention.stride, "dilation": attention.dilation}
    if not isinstance(attention.pad, SamePadding):
        symmetric = attention.pad.before == attention.pad.after
        geometry["padding"] = attention.pad.before if symmetric else "same"
        geometry["padding_mode"] = (
            "zeros" if attention.pad.mode == "constant" else attention.pad.mode
        )
    kind = Conv2dSame if isinstance(attention.pad, SamePadding) else None
    conv = _convolution(kernel, bias, attention.groups, kind, **geometry)
    _train_what_was_trained(conv, next(attention.W_val.parameters()), attention.b_out)
    return conv.train(attention.training), distance


def _nearest_kernel(attention: ConvolutionalAttention) -> tuple[Tensor, float]:
    """Kernel (D_out, D_in / groups, *K) of the nearest convolution, and its distance; float64 inside."""
    Delta, alpha = attention.Delta.double(), attention.alpha.double()
    taps = head_shifts(attention.kernel_size, attention.dilation, attention.center).to(Delta)
    on_taps, everywhere = (
        torch.ones(len(alpha), len(alpha)).to(Delta),
        torch.ones(len(alpha), 1).to(Delta),
    )
    precision = torch.finfo(torch.float64).eps
    for axis in range(Delta.shape[1]):
        first, _, _ = window(seen := seen_offsets(Delta[:, axis], alpha, precision))
        offsets = torch.arange(first, max(last for _, last in seen) + 1).to(Delta)
        query = torch.zeros(1).to(Delta)
        scores = quadratic_scores(Delta[:, axis], alpha, query, offsets).squeeze(1)
        at_taps = quadratic_scores(Delta[:, axis], alpha, query, taps[:, axis]).squeeze(1)
        on_taps = on_taps * (at_taps - scores.logsumexp(dim=1, keepdim=True)).exp()
        everywhere = (everywhere[:, :, None] * scores.softmax(dim=1)[:, None, :]).flatten(1)
    slices = attention.W_val().double().flatten(2)
    kernel, whole = slices @ on_taps, slices @ everywhere
    # What is not on a tap: the absolute values of the whole, less those of its part on taps, which is `kernel`.
    off_taps = (whole.abs().sum(dim=(1, 2)) - kernel.abs().sum(dim=(1, 2))).clamp(min=0)
    return kernel.to(attention.W_val()).unflatten(-1, attention.kernel_size), float(off_taps.max())


def _convolution(
    weight: Tensor,
    bias: Tensor | None,
    groups: int,
    kind: type[_ConvNd] | None = None,
    **geometry: Any,
) -> _ConvNd:
    """A convolution with these tensors; `geometry`: further arguments of nn.Conv."""
    kind = kind or CONVOLUTIONS[weight.ndim - 2]
    channels, kernel_size = (weight.shape[1] * groups, weight.shape[0]), tuple(weight.shape[2:])
    conv: _ConvNd = kind(
        *channels, kernel_size, groups=groups, bias=bias is not None, device="meta", **geometry
    )
    conv.weight = nn.Parameter(weight)
    if bias is not None:
        conv.bias = nn.Parameter(bias)
    return conv


def _pixel_convolution(folded: PatchAttention) -> tuple[_ConvNd, float]:
    among_patches, distance = nearest_convolution(folded.attention)
    blocks = among_patches.weight.detach()
    kernel = pixel_kernel(blocks, folded.kernel_size, folded.dilation, folded.patch)
    apart = (
        (patch_kernel(kernel, folded.dilation, folded.patch).double() - blocks)
        .abs()
        .flatten(1)
        .sum(dim=1)
    )
    bias, pixels = None, folded.patch ** (kernel.ndim - 2)
    if among_patches.bias is not None:
        biases = among_patches.bias.detach().unflatten(0, [-1, pixels])
        bias = biases.median(dim=1).values
        apart += (biases - bias[:, None]).abs().flatten()
    padding = [
        step * (size - 1) // 2
        for step, size in zip(folded.dilation, folded.kernel_size, strict=True)
    ]
    conv = _convolution(
        kernel, bias, among_patches.groups, padding=padding, dilation=folded.dilation
    )
    _train_what_was_trained(conv, among_patches.weight, among_patches.bias)
    return conv.train(folded.training), distance + float(apart.max())
