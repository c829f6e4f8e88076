"""Mirrored layers at half the work: sums and differences of halves of channels and of mirrored taps.

A layer that commutes with mirroring maps even features to even and odd to odd ones (Boekman et al. 2025). With a and b
the halves of the channels, E = a + b is even and O = a - b is odd. Of a pair of taps at columns c and -c, the even
output needs E_c + E_-c and O_c - O_-c, the odd one O_c + O_-c and E_c - E_-c.
"""

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from sa_zoo.kernels.deployed import Deployed
from sa_zoo.kernels.situation import Situation
from sa_zoo.kernels.taps import Lattice, can_read_taps, convolved, lattice_of, padded
from sa_zoo.models.attention import Attention
from sa_zoo.models.blocks import MirroredBlock
from sa_zoo.models.norm import is_plain, is_watched

WIDE = 64  # outputs, from which on sums and differences of pixels cost less than the work they save


def mirrored_kernel(block: MirroredBlock, X: Tensor) -> Lattice | None:
    """The kernel whose pixels the heads of both layers read, one each, if it is its own mirror image."""
    kernels = [kernel_of(layer, X, Situation(layer.children(), X)) for layer in block.layers()]
    kernel = kernels[0] if kernels[0] == kernels[1] else None
    is_own_mirror = kernel and 0 in kernel[1] and kernel[1][0] == -kernel[1][-1]
    return kernel if is_own_mirror else None


def kernel_of(layer: Attention, X: Tensor, now: Situation) -> Lattice | None:
    if is_watched(layer) or not is_plain(layer.W_val) or not can_read_taps(layer, X, now):
        return None
    return lattice_of(now.taps_of(layer.terms[0]))


def views_at_once(block: MirroredBlock, kernel: Lattice, X: Tensor) -> Tensor:
    """`MirroredBlock.in_views` as a convolution: (B, H, W, D_in) -> (B, H, W, D)"""
    bias = block.attn.W_val.bias
    if block.attn.W_val.out_features >= WIDE:
        maps = [map_of(layer, kernel) for layer in block.layers()]
        return folded(maps, bias, kernel, X)
    even, odd = (weight_of(layer, kernel) for layer in block.layers())
    own, other = (even + odd) / 2, (even - odd) / 2
    ahead = torch.cat([own, other.flip(2)], dim=3)
    back = torch.cat([other, own.flip(2)], dim=3)
    weight = torch.cat([ahead, back])
    bias = bias if bias is None else bias.repeat(2)
    return convolved(weight.flatten(1), bias, kernel, X)


def weight_of(layer: Attention, kernel: Lattice) -> Tensor:
    """W_val by pixel of the kernel: (D, rows, columns, D_in), half the channels of the network"""
    return layer.W_val.weight.unflatten(1, [*map(len, kernel), -1])


def map_of(layer: Attention, kernel: Lattice) -> Tensor:
    """`folded_weight`, which deployed layers keep"""
    if not isinstance(layer, Deployed):
        return folded_weight(weight_of(layer, kernel))
    if layer.folded is None:
        with torch.inference_mode(False):  # later calls may need gradients of images
            layer.folded = folded_weight(weight_of(layer, kernel))
    return layer.folded


def folded(maps: list[Tensor], bias: Tensor | None, kernel: Lattice, X: Tensor) -> Tensor:
    """The layers by their `folded_weight`, at half the work: (B, H, W, D_in) -> (B, H, W, D)"""
    steps = (kernel[0].step, 1)
    parts = zip(folded_pixels(X, kernel), maps, (bias, None), strict=True)
    even, odd = (conv2d(*part, dilation=steps).permute(0, 2, 3, 1) for part in parts)
    return torch.cat([even + odd, even - odd], dim=3)


def folded_pixels(x: Tensor, kernel: Lattice) -> list[Tensor]:
    """What the even and the odd output read: (B, H, W, D) -> 2 of (B, columns * D / 2, H', W)"""
    a, b = x.permute(0, 3, 1, 2).chunk(2, dim=1)
    image = padded(torch.cat([a + b, a - b], dim=1), kernel)
    reach, width = kernel[1][-1], x.shape[2]
    even, odd = ([part] for part in image[..., reach : reach + width].chunk(2, dim=1))
    for column in kernel[1]:
        if column > 0:
            right = image[..., reach + column : reach + column + width]
            left = image[..., reach - column : reach - column + width]
            even_sum, odd_sum = (right + left).chunk(2, dim=1)
            even_gap, odd_gap = (right - left).chunk(2, dim=1)
            even += [even_sum, odd_gap]
            odd += [odd_sum, even_gap]
    return [torch.cat(even, dim=1), torch.cat(odd, dim=1)]


def folded_weight(weight: Tensor) -> Tensor:
    """Sums and differences of mirrored taps: (D, rows, columns, D_in) -> (D, columns * D_in, rows, 1)"""
    across = weight.unbind(2)
    middle = len(across) // 2
    parts = [across[middle] / 2]
    for step in range(1, middle + 1):
        right, left = across[middle + step], across[middle - step]
        parts += [(right + left) / 4, (right - left) / 4]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous()[..., None]
