"""Heads of one pixel each: one gather, and one product or convolution.

Outside the image, a head reads the nearest pixel of the border. If the taps are all pixels of a kernel, dilated or not,
the image is padded that way and the layer is a convolution, without the tensor of all heads.
"""

import math
from contextlib import nullcontext
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

from sa_zoo.fast.portions import divided
from sa_zoo.fast.product import projected
from sa_zoo.fast.situation import Situation, makes_graph
from sa_zoo.models.attention import Attention
from sa_zoo.models.norm import is_plain
from sa_zoo.models.stages import Grid

Lattice = tuple[range, range]  # of displacements, down and across


def can_read_taps(layer: Attention, X: Tensor, now: Situation) -> bool:
    """Whether each head reads one pixel, the same in the next call, and this is cheap to find out.

    Values of parameters are not read for a graph, and on a GPU, which the CPU then has to wait for, only if they are
    frozen. Parameters in training may move away.
    """
    term = layer.terms[0]
    if len(layer.terms) > 1 or layer.drops() or now.compiling:
        return False
    learns = any(parameter.requires_grad for parameter in term.parameters())
    if learns and (now.trains or not X.is_cpu):
        return False
    return len(now.taps_of(term)) > 0 and now.as_written


def taps(layer: Attention, X: Tensor, now: Situation) -> Tensor:
    """Eq. 10 for heads of one pixel each: (B, H, W, D) -> (B, H, W, D)"""
    offsets = now.taps_of(layer.terms[0])
    grid = (X.shape[1], X.shape[2])
    kernel = lattice_of(offsets)
    if kernel and is_plain(layer.W_val):
        return convolved(layer.W_val.weight, layer.W_val.bias, kernel, X)
    places = read_places(offsets, grid).to(X.device)

    def gathered(some: Tensor) -> Tensor:
        return projected(layer.W_val, gather(some, places).flatten(3))

    return divided(gathered, now, layer.W_val.parameters(), X)


def read_places(offsets: list[list[int]], grid: Grid) -> Tensor:
    """The pixel read by each query at each offset, counted row by row: (H, W, N_h)"""
    rows, columns = (
        (torch.arange(size)[:, None] + torch.tensor(axis)).clamp(0, size - 1)
        for size, axis in zip(grid, zip(*offsets, strict=True), strict=True)
    )
    return rows[:, None] * grid[1] + columns


def gather(X: Tensor, places: Tensor) -> Tensor:
    """The pixels of images at places: (B, H, W, D) -> (B, *places, D)"""
    B, height, width, D = X.shape
    T = height * width
    images = torch.arange(0, B * T, T, device=X.device)
    # along the first axis, torch copies whole pixels, and on all threads
    pixels = X.flatten(0, 2).index_select(0, (images[:, None] + places.flatten()).flatten())
    return pixels.reshape(B, *places.shape, D)


def lattice_of(offsets: list[list[int]]) -> Lattice | None:
    """The kernel with these offsets as its pixels, row by row; None if there is none."""
    down, across = (_axis(sorted(set(axis))) for axis in zip(*offsets, strict=True))
    kernel = [[row, column] for row, column in product(down, across)]
    return (down, across) if offsets == kernel else None


def _axis(places: list[int]) -> range:
    step = math.gcd(*(place - places[0] for place in places)) or 1
    return range(places[0], places[-1] + 1, step)


def convolved(weight: Tensor, bias: Tensor | None, kernel: Lattice, X: Tensor) -> Tensor:
    """The layer with this W_val as a convolution: (B, H, W, D) -> (B, H, W, D_out)"""
    size = [len(axis) for axis in kernel]
    weight = weight.unflatten(1, [*size, -1]).permute(0, 3, 1, 2)  # (D_out, D, *size)
    steps = [axis.step for axis in kernel]
    image = padded(X.permute(0, 3, 1, 2), kernel)
    return conv2d(image, weight, bias, dilation=steps).permute(0, 2, 3, 1)


def padded(image: Tensor, kernel: Lattice) -> Tensor:
    """What a kernel reads of images whose border is repeated outside: (B, D, H, W) -> (B, D, H', W')"""
    (top, bottom), (left, right) = ((max(0, -axis[0]), max(0, axis[-1])) for axis in kernel)
    # autocast would pad in float32; graphs would keep the context
    with nullcontext() if makes_graph() else torch.autocast(image.device.type, enabled=False):
        image = pad(image, (left, right, top, bottom), mode="replicate")
    down, across = ((max(0, axis[0]), min(0, axis[-1])) for axis in kernel)
    if any((*down, *across)):  # the kernel lies to one side of its query
        height, width = image.shape[2:]
        image = image[:, :, down[0] : height + down[1], across[0] : width + across[1]]
    return image
