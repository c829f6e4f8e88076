"""Heads that read one pixel each: a convolution, or a gather and a product.

Outside the image, a head reads the nearest pixel of the border. If the pixels are all those of a kernel, dilated or
not, the image is padded that way and the layer is a convolution, without the tensor of all heads.
"""

import math
from contextlib import nullcontext
from itertools import product

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.nn.functional import conv2d, pad

from sa_zoo.models.attention import Attention
from sa_zoo.models.linear import is_plain

Offsets = list[list[int]]  # the displacement (row, column) of each head's pixel from the query
Lattice = tuple[range, range]  # of displacements, down and across


def taps_of(layer: Attention, X: Tensor) -> Offsets:
    """The pixels read by the heads; none if they read more, may learn to, or if values of tensors cannot be read here.

    On a GPU, which the CPU has to wait for, values are read only if they are frozen.
    """
    if len(layer.terms) > 1 or layer.drops():
        return []
    if torch.jit.is_tracing() or torch.compiler.is_compiling():
        return []
    term = layer.terms[0]
    learns = any(parameter.requires_grad for parameter in term.parameters())
    if learns and (torch.is_grad_enabled() or not X.is_cpu):
        return []
    offsets: Offsets = term.taps() if is_ordinary(X, *term.parameters()) else []
    return offsets


def is_ordinary(*tensors: Tensor) -> bool:
    """Whether tensors are numbers in memory: no stand-ins of torch.func's transforms, subclasses or dual numbers."""
    try:
        for tensor in tensors:
            tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return all(
        type(tensor) in (Tensor, nn.Parameter) and unpack_dual(tensor).tangent is None
        for tensor in tensors
    )


def read_taps(W_val: nn.Linear, offsets: Offsets, X: Tensor) -> Tensor:
    """Eq. 10 for heads that read the pixels at these offsets: (B, H, W, D) -> (B, H, W, D_out)"""
    height, width = X.shape[1:3]
    # From any query, a pixel further away is beyond the same border.
    offsets = [
        [min(max(dy, 1 - height), height - 1), min(max(dx, 1 - width), width - 1)]
        for dy, dx in offsets
    ]
    kernel = lattice_of(offsets)
    if kernel and is_plain(W_val):
        return convolved(W_val, kernel, X)
    return W_val(gathered(offsets, X))


def gathered(offsets: Offsets, X: Tensor) -> Tensor:
    """The pixels read by all heads: (B, H, W, D) -> (B, H, W, N_h D)"""
    B, height, width, _ = X.shape
    rows = torch.arange(height, device=X.device)[:, None]
    columns = torch.arange(width, device=X.device)
    places = [
        (rows + dy).clamp(0, height - 1) * width + (columns + dx).clamp(0, width - 1)
        for dy, dx in offsets
    ]
    images = torch.arange(B, device=X.device)[:, None] * (height * width)
    index = images + torch.stack(places, dim=-1).flatten()
    # along the first axis, torch copies whole pixels, and on all threads
    return (
        X.flatten(0, 2)
        .index_select(0, index.flatten())
        .view(B, height, width, len(offsets) * X.shape[3])
    )


def lattice_of(offsets: Offsets) -> Lattice | None:
    """The kernel with these offsets as its pixels, row by row; None if there is none."""
    down, across = (_axis(sorted(set(axis))) for axis in zip(*offsets, strict=True))
    kernel = [[row, column] for row, column in product(down, across)]
    return (down, across) if offsets == kernel else None


def _axis(places: list[int]) -> range:
    step = math.gcd(*(place - places[0] for place in places)) or 1
    return range(places[0], places[-1] + 1, step)


def convolved(W_val: nn.Linear, kernel: Lattice, X: Tensor) -> Tensor:
    """The layer as a convolution: (B, H, W, D) -> (B, H, W, D_out)"""
    size = [len(axis) for axis in kernel]
    weight = W_val.weight.unflatten(1, [*size, -1]).permute(0, 3, 1, 2)  # (D_out, D, *size)
    steps = [axis.step for axis in kernel]
    image = padded(X.permute(0, 3, 1, 2), kernel)
    return conv2d(image, weight, W_val.bias, dilation=steps).permute(0, 2, 3, 1)


def padded(image: Tensor, kernel: Lattice) -> Tensor:
    """All that a kernel reads of images whose border is repeated outside: (B, D, H, W) -> (B, D, H', W')"""
    (top, bottom), (left, right) = ((max(0, -axis[0]), max(0, axis[-1])) for axis in kernel)
    device = image.device.type
    casts = torch.is_autocast_enabled(device)  # it would pad in float32
    with torch.autocast(device, enabled=False) if casts else nullcontext():
        image = pad(image, (left, right, top, bottom), mode="replicate")
    down, across = ((max(0, axis[0]), min(0, axis[-1])) for axis in kernel)
    if any((*down, *across)):  # the kernel lies to one side of its query
        height, width = image.shape[2:]
        image = image[:, :, down[0] : height + down[1], across[0] : width + across[1]]
    return image
