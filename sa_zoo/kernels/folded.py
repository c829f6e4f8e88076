"""Mirrored layers at half the work: sums and differences of halves of channels and of mirrored taps.

A layer that commutes with mirroring maps even features to even and odd to odd ones (Boekman et al. 2025). With a and b
the halves of the channels, E = a + b is even and O = a - b is odd. Of a pair of taps at columns c and -c, the even
output needs E_c + E_-c and O_c - O_-c, the odd one O_c + O_-c and E_c - E_-c: two maps of half the channels.
"""

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from sa_zoo.kernels.deployed import Deployed
from sa_zoo.kernels.situation import Situation
from sa_zoo.kernels.taps import Lattice, can_read_taps, convolved, lattice_of, padded
from sa_zoo.models.attention import Attention
from sa_zoo.models.norm import is_plain, is_watched

WIDE = 64  # outputs, from which on sums and differences of pixels cost less than the work they save


def mirrored_kernel(layer: Attention, X: Tensor, now: Situation) -> Lattice | None:
    """The kernel whose pixels the heads read, one each, if it is its own mirror image."""
    if is_watched(layer) or not can_read_taps(layer, X, now):
        return None
    if not is_plain(layer.W_val) or layer.W_val.bias is None:
        return None
    kernel = lattice_of(now.taps_of(layer.terms[0]))
    is_own_mirror = kernel and 0 in kernel[1] and kernel[1][0] == -kernel[1][-1]
    return kernel if is_own_mirror else None


def views_at_once(layer: Attention, kernel: Lattice, X: Tensor) -> Tensor:
    """A layer in both views of images: (B, H, W, D_in) -> (B, H, W, D)"""
    bias = layer.W_val.bias.unflatten(0, [2, -1]).sum(0)
    if len(bias) >= WIDE:
        return folded(maps_of(layer, kernel), bias, kernel, X)
    own, other = weights_of(layer, kernel)
    ahead = torch.cat([own, other.flip(2)], dim=3)
    back = torch.cat([other, own.flip(2)], dim=3)
    weight = torch.cat([ahead, back])
    return convolved(weight.flatten(1), bias.repeat(2), kernel, X)


def weights_of(layer: Attention, kernel: Lattice) -> Tensor:
    """W_val for the view itself and for the other one: (2, D / 2, rows, columns, D_in / 2)"""
    return layer.W_val.weight.unflatten(0, [2, -1]).unflatten(2, [*map(len, kernel), -1])


def maps_of(layer: Attention, kernel: Lattice) -> list[Tensor]:
    """`folded_weights`, which deployed layers keep"""
    if not isinstance(layer, Deployed):
        return folded_weights(*weights_of(layer, kernel))
    if not layer.maps:
        with torch.inference_mode(False):  # later calls may need gradients of images
            layer.maps = folded_weights(*weights_of(layer, kernel))
    return layer.maps


def folded(maps: list[Tensor], bias: Tensor, kernel: Lattice, X: Tensor) -> Tensor:
    """The layer by its `folded_weights`, at half the work: (B, H, W, D_in) -> (B, H, W, D)"""
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


def folded_weights(own: Tensor, other: Tensor) -> list[Tensor]:
    """The two maps: (D / 2, rows, columns, D_in / 2), twice -> 2 of (D / 2, columns * D_in / 2, rows, 1)"""
    maps = []
    for total in (own + other, own - other):
        across = total.unbind(2)
        middle = len(across) // 2
        parts = [across[middle] / 2]
        for step in range(1, middle + 1):
            right, left = across[middle + step], across[middle - step]
            parts += [(right + left) / 4, (right - left) / 4]
        maps.append(torch.cat(parts, dim=2).transpose(1, 2).contiguous()[..., None])
    return maps
