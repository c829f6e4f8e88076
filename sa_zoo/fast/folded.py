"""Mirrored layers at half the work: sums and differences of halves of channels and of mirrored taps.

A layer that commutes with mirroring maps even features to even and odd to odd ones (Boekman et al. 2025). With a and b
the halves of the channels, E = a + b is even and O = a - b is odd. Of a pair of taps at columns c and -c, the even
output needs E_c + E_-c and O_c - O_-c, the odd one O_c + O_-c and E_c - E_-c.
"""

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from sa_zoo.fast.deployed import Deployed, ReadPixels
from sa_zoo.fast.situation import Situation, makes_graph
from sa_zoo.fast.taps import Lattice, can_read_taps, convolved, lattice_of, padded
from sa_zoo.models.attention import Attention
from sa_zoo.models.blocks import MirroredBlock
from sa_zoo.models.norm import bias_of, is_plain, is_watched

WIDE = 64  # outputs, from which on sums and differences of pixels cost less than the work they save


def mirrored_kernel(block: MirroredBlock, X: Tensor) -> Lattice | None:
    """The kernel whose pixels the heads of both layers read, one each, if it is its own mirror image."""
    kernels = [kernel_of(layer, X) for layer in block.layers()]
    kernel = kernels[0] if kernels[0] == kernels[1] else None
    is_own_mirror = kernel and 0 in kernel[1] and kernel[1][0] == -kernel[1][-1]
    return kernel if is_own_mirror else None


def kernel_of(layer: Attention, X: Tensor) -> Lattice | None:
    if is_watched(layer) or makes_graph() or not is_plain(layer.W_val):
        return None
    if isinstance(layer, Deployed):
        return layer.constants.kernel if isinstance(layer.constants, ReadPixels) else None
    now = Situation(layer.children(), X)
    return lattice_of(now.taps_of(layer.terms[0])) if can_read_taps(layer, X, now) else None


def views_at_once(block: MirroredBlock, kernel: Lattice, X: Tensor) -> Tensor:
    """`MirroredBlock.in_views` as one convolution or two: (B, H, W, D_in) -> (B, H, W, D)"""
    maps, bias = maps_of(block, kernel), bias_of(block.attn.W_val)
    if len(maps) == 1:
        return convolved(maps[0], bias.repeat(2), kernel, X)
    steps = (kernel[0].step, 1)
    if maps[0].requires_grad:
        # torch's gradient of kernels in another order of memory fails for small images
        maps = [weight.contiguous() for weight in maps]
    parts = zip(folded_pixels(X, kernel), maps, (bias, None), strict=True)
    even, odd = (conv2d(*part, dilation=steps).permute(0, 2, 3, 1) for part in parts)
    return torch.cat([even + odd, even - odd], dim=3)


def maps_of(block: MirroredBlock, kernel: Lattice) -> list[Tensor]:
    """`new_maps`, which deployed layers keep until one of them changes"""
    even, odd = block.layers()
    if not isinstance(even, Deployed) or not isinstance(odd, Deployed):
        return new_maps(even, odd, kernel)
    if not even.maps or even.maps is not odd.maps:
        with torch.inference_mode(False):  # later calls may need gradients of images
            even.maps = odd.maps = new_maps(even, odd, kernel)
    return even.maps


def new_maps(even: Attention, odd: Attention, kernel: Lattice) -> list[Tensor]:
    """Of narrow layers one map of all channels, (D, rows * columns * D_in); of wide ones both `folded_weight`s."""
    weights = [layer.W_val.weight.unflatten(1, [*map(len, kernel), -1]) for layer in (even, odd)]
    if len(weights[0]) >= WIDE:
        return [folded_weight(weight) for weight in weights]
    own, other = (weights[0] + weights[1]) / 2, (weights[0] - weights[1]) / 2
    ahead = torch.cat([own, other.flip(2)], dim=3)
    back = torch.cat([other, own.flip(2)], dim=3)
    return [torch.cat([ahead, back]).flatten(1)]


def folded_pixels(x: Tensor, kernel: Lattice) -> list[Tensor]:
    """What the even and the odd output read: (B, H, W, D) -> 2 of (B, columns * D / 2, H', W)"""
    a, b = x.permute(0, 3, 1, 2).chunk(2, dim=1)
    images = [padded(a + b, kernel), padded(a - b, kernel)]  # E and O
    reach, width = kernel[1][-1], x.shape[2]
    even, odd = ([image[..., reach : reach + width]] for image in images)
    for column in kernel[1]:
        if column > 0:
            starts = (reach + column, reach - column)
            right, left = ([image[..., at : at + width] for image in images] for at in starts)
            even += [right[0] + left[0], right[1] - left[1]]
            odd += [right[1] + left[1], right[0] - left[0]]
    return [torch.cat(even, dim=1), torch.cat(odd, dim=1)]


def folded_weight(weight: Tensor) -> Tensor:
    """Sums and differences of mirrored taps: (N_out, rows, columns, N) -> (N_out, columns * N, rows, 1)"""
    across = weight.unbind(2)
    middle = len(across) // 2
    parts = [across[middle] / 2]
    for step in range(1, middle + 1):
        right, left = across[middle + step], across[middle - step]
        parts += [(right + left) / 4, (right - left) / 4]
    return torch.cat(parts, dim=2).transpose(1, 2)[..., None]
