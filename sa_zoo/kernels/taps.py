"""Heads that read one pixel each: one gather, and one product or convolution. Nothing is mixed.

Outside of the image, a head reads the nearest pixel of the border. Where the taps are all pixels of a kernel, also a
dilated one, the image is padded like that and the layer is a convolution, which never builds the tensor of all heads.
"""

import math
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from sa_zoo.kernels.portions import divided
from sa_zoo.kernels.situation import Situation
from sa_zoo.models.attention import Attention
from sa_zoo.models.norm import is_plain
from sa_zoo.models.terms import Taps

Lattice = tuple[range, range]  # of displacements, down and across


def can_read_taps(layer: Attention, X: Tensor, now: Situation) -> bool:
    """Whether each head reads one pixel, and this is known, or cheap to find out and the same in the next call.

    Numbers of parameters are read on a CPU only, and not for a graph. Parameters that are being trained may move away.
    """
    term = layer.terms[0]
    if len(layer.terms) > 1 or layer.drops():
        return False
    if isinstance(term, Taps):
        return True
    moves = now.trains and any(parameter.requires_grad for parameter in term.parameters())
    return now.by_hand and not moves and len(term.taps()) > 0


def taps(layer: Attention, X: Tensor, now: Situation) -> Tensor:
    """The layer for heads that read one pixel each: (B, H, W, D) -> (B, H, W, D)"""
    offsets = layer.terms[0].taps()
    kernel = lattice_of(offsets)
    if kernel and is_plain(layer.W_val):
        return convolved(layer.W_val, kernel, X)
    down, across = (torch.tensor(axis, device=X.device) for axis in zip(*offsets, strict=True))

    def gathered(some: Tensor) -> Tensor:
        rows = read(down, some.shape[1])[:, None, :]  # (H, 1, N_h)
        columns = read(across, some.shape[2])[None, :, :]
        return layer.W_val(gather(some, rows, columns).flatten(3))

    return divided(gathered, now, layer.W_val.parameters(), X)


def read(offsets: Tensor, size: int) -> Tensor:
    """The pixel that each query reads at each offset, along one axis of `size` pixels: (K,) -> (size, K)"""
    queries = torch.arange(size, device=offsets.device)[:, None]
    return (queries + offsets).clamp(0, size - 1)


def gather(X: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The pixels of images at places that broadcast to any shape: (B, H, W, D) -> (B, *places, D)"""
    places = rows * X.shape[2] + columns
    return X.flatten(1, 2).index_select(1, places.flatten()).unflatten(1, places.shape)


def lattice_of(offsets: list[list[int]]) -> Lattice | None:
    """The kernel whose pixels, row by row, are the offsets; None if they are not those of one."""
    down, across = (_axis(sorted(set(axis))) for axis in zip(*offsets, strict=True))
    kernel = [[row, column] for row, column in product(down, across)]
    return (down, across) if offsets == kernel else None


def _axis(places: list[int]) -> range:
    step = math.gcd(*(place - places[0] for place in places)) or 1
    return range(places[0], places[-1] + 1, step)


def convolved(W_val: nn.Linear, kernel: Lattice, X: Tensor) -> Tensor:
    """The layer as a convolution of the image, whose border is repeated around it: (B, H, W, D) -> (B, H, W, D)"""
    padded = [
        torch.arange(axis[0], size + axis[-1], device=X.device).clamp(0, size - 1)
        for axis, size in zip(kernel, X.shape[1:3], strict=True)
    ]
    X = gather(X, padded[0][:, None], padded[1])
    size = [len(axis) for axis in kernel]
    weight = W_val.weight.unflatten(1, [*size, -1]).permute(0, 3, 1, 2)  # (D_out, D, *size)
    steps = [axis.step for axis in kernel]
    return conv2d(X.permute(0, 3, 1, 2), weight, W_val.bias, dilation=steps).permute(0, 2, 3, 1)
