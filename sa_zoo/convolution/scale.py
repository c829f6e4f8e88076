"""A network for images of another size, without training: every layer covers the same part of an image.

For images r times as large, the Gaussian of a head moves and widens, and pooling reads pixels that are r times as far
apart, while strides stay. Grids are then r times as large, too. For a whole r, a query sees every r-th pixel, because
a head sharper than the trained grid has learned what its pixels make of a Gaussian. So the network evaluates its r^2
shifted small grids at once (the algorithme a trous; Chen et al. 2017, arXiv:1606.00915, Section 3.1).

A pixel of the small image is the mean of r x r pixels of the large one. So the first linear map takes means of squares;
heads in its place look at their middle, and widen by their variance. Symbols: theorem.py.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from sa_zoo.convolution.convolutional import ConvolutionalAttention
from sa_zoo.convolution.soft import SoftAttention
from sa_zoo.models.attention import Attention
from sa_zoo.models.blocks import MaxPool
from sa_zoo.models.network import SANet
from sa_zoo.models.terms import GeneralizedQuadratic, Quadratic


@torch.no_grad()
def scale(model: nn.Module, r: float) -> nn.Module:
    """A copy of a network for images r times as large as those that it was trained with.

    The network has quadratic heads, trained or as taps, or it is a CNN that `convert` made attention of, at an alpha
    near 30 (finite, so below 39; these heads see all pixels). It is not meant to be saved: scale again after loading.
    Scaling by r >= 1 and then by 1 / r gives the network back. Where it pools, r is rounded.

    Raises ValueError for an r that is not positive, and for layers that do not scale: learned encodings, content,
    convolutions other than the first layer, and mean pooling.
    """
    if not 0 < r < float("inf"):
        raise ValueError(f"r: got {r}, expected a positive number")
    copied = copy.deepcopy(model)
    named = dict(copied.named_modules())
    first = next((m for m in named.values() if isinstance(m, nn.Conv2d | SoftAttention)), None)
    unfit = [name for name, m in named.items() if not _is_scaled(m, m is first, r)]
    # transformers' models compute their grids from the layout
    fits = isinstance(model, SANet) or any(isinstance(m, SoftAttention) for m in named.values())
    if unfit or not fits:
        got = f"the layer {unfit[0]}" if unfit else type(model).__name__
        raise ValueError(
            f"model: got {got}, expected a network of timm with quadratic heads of finite alpha"
        )
    return copied


def _is_scaled(layer: Any, first: bool, r: float) -> bool:
    """Scale a layer in place; False for layers that cannot be scaled."""
    if isinstance(layer, Attention):
        for term in layer.terms:
            if not isinstance(term, Quadratic | GeneralizedQuadratic):
                return False
            reach = _reach(term, r)
            # taps read such a pixel anyway, and at borders the nearest one
            term.dilation = round(reach) if reach.is_integer() and not term.taps() else 1
            term.Delta.mul_(r)
            term.spread.div_(r)
        layer.set_grid(layer.grid)  # a deployed layer renews its constants
    elif isinstance(layer, SoftAttention):
        layer.Delta.mul_(r).add_(first * (r - 1) / 2)
        variance = r**2 / layer.alpha + first * (r**2 - 1) / 6  # of both axes
        layer.alpha.copy_(1 / variance)
    elif isinstance(layer, MaxPool | nn.MaxPool2d):
        at: Any = layer
        at.dilation = max(1, round(_reach(at, r)))
    elif first:
        sizes = [max(1, round(size * r)) for size in layer.kernel_size]
        layer.weight = nn.Parameter(resized(layer.weight, sizes), layer.weight.requires_grad)
        layer.kernel_size = tuple(sizes)
        layer.padding = tuple(round(pad * r) for pad in layer.padding)
    elif isinstance(layer, nn.Conv2d | ConvolutionalAttention | nn.AvgPool2d):
        return layer.kernel_size in (1, (1, 1))
    return True


def _reach(layer: Any, r: float) -> float:
    """How many times as far apart as in the trained network the layer reads pixels once it is scaled by r."""
    layer.reach = getattr(layer, "reach", 1.0) * r
    return layer.reach


def resized(kernel: Tensor, sizes: list[int]) -> Tensor:
    """The kernel that sees in images of other pixels what (.., K_1, K_2) sees in means of their squares."""
    down, across = (
        means(new, old) if new >= old else torch.linalg.pinv(means(old, new))
        for new, old in zip(sizes, kernel.shape[2:], strict=True)
    )
    return torch.einsum("ochw,yh,xw->ocyx", kernel.double(), down, across).to(kernel.dtype)


def means(large: int, small: int) -> Tensor:
    """The share of each of `large` pixels in the mean that is one of `small` pixels of a line: (large, small)"""
    edges = torch.arange(large + 1).double()
    r = large / small
    borders = torch.arange(small + 1).double() * r
    right = torch.minimum(edges[1:, None], borders[1:])
    left = torch.maximum(edges[:-1, None], borders[:-1])
    return (right - left).clamp(min=0.0) / r
