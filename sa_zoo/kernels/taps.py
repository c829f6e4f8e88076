"""Heads of one pixel each: one gather, and one product or convolution.

Outside the image, a head reads the nearest pixel of the border. If the taps are all pixels of a kernel, dilated or not,
the image is padded that way and the layer is a convolution, without the tensor of all heads.
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
from sa_zoo.models.stages import Grid

Lattice = tuple[range, range]  # of displacements, down and across


def can_read_taps(layer: Attention, X: Tensor, now: Situation) -> bool:
    """Whether each head reads one pixel, the same in the next call, and this is cheap to find out.

    Values of parameters are read on a CPU only, and not for a graph. Parameters in training may move away.
    """
    term = layer.terms[0]
    if len(layer.terms) > 1 or layer.drops() or not X.is_cpu:
        return False
    moves = now.trains and any(parameter.requires_grad for parameter in term.parameters())
    return not moves and not now.compiling and len(term.taps()) > 0 and now.by_hand


def taps(layer: Attention, X: Tensor, now: Situation) -> Tensor:
    """Eq. 10 for heads of one pixel each: (B, H, W, D) -> (B, H, W, D)"""
    offsets = layer.terms[0].taps()
    grid = (X.shape[1], X.shape[2])
    kernel = lattice_of(offsets)
    if kernel and is_plain(layer.W_val):
        return convolved(layer.W_val, kernel, X, padded_places(kernel, grid).to(X.device))
    places = read_places(offsets, grid).to(X.device)

    def gathered(some: Tensor) -> Tensor:
        return layer.W_val(gather(some, places).flatten(3))

    return divided(gathered, now, layer.W_val.parameters(), X)


def read_places(offsets: list[list[int]], grid: Grid) -> Tensor:
    """The pixel read by each query at each offset, counted row by row: (H, W, N_h)"""
    rows, columns = (
        (torch.arange(size)[:, None] + torch.tensor(axis)).clamp(0, size - 1)
        for size, axis in zip(grid, zip(*offsets, strict=True), strict=True)
    )
    return rows[:, None] * grid[1] + columns


def padded_places(kernel: Lattice, grid: Grid) -> Tensor:
    """The pixels, counted row by row, of an image with its border repeated for a kernel: (H', W')"""
    rows, columns = (
        torch.arange(axis[0], size + axis[-1]).clamp(0, size - 1)
        for axis, size in zip(kernel, grid, strict=True)
    )
    return rows[:, None] * grid[1] + columns


def gather(X: Tensor, places: Tensor) -> Tensor:
    """The pixels of images at places: (B, H, W, D) -> (B, *places, D)"""
    pixels = X.flatten(1, 2).index_select(1, places.flatten())
    return pixels.unflatten(1, places.shape)


def lattice_of(offsets: list[list[int]]) -> Lattice | None:
    """The kernel with these offsets as its pixels, row by row; None if there is none."""
    down, across = (_axis(sorted(set(axis))) for axis in zip(*offsets, strict=True))
    kernel = [[row, column] for row, column in product(down, across)]
    return (down, across) if offsets == kernel else None


def _axis(places: list[int]) -> range:
    step = math.gcd(*(place - places[0] for place in places)) or 1
    return range(places[0], places[-1] + 1, step)


def convolved(W_val: nn.Linear, kernel: Lattice, X: Tensor, places: Tensor) -> Tensor:
    """The layer as a convolution of the image with its `padded_places`: (B, H, W, D) -> (B, H, W, D)"""
    size = [len(axis) for axis in kernel]
    weight = W_val.weight.unflatten(1, [*size, -1]).permute(0, 3, 1, 2)  # (D_out, D, *size)
    steps = [axis.step for axis in kernel]
    image = gather(X, places).permute(0, 3, 1, 2)
    return conv2d(image, weight, W_val.bias, dilation=steps).permute(0, 2, 3, 1)
