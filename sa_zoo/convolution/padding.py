"""The keys of a convolutional layer: its padded image. Symbols: theorem.py."""

from collections.abc import Sequence
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn


class Keys(NamedTuple):
    """Keys, of which those that are zero need not be stored.

    stored: (B, D_in, *stored); per axis, before: index of the first stored key, and sizes: N.
    """

    stored: Tensor
    before: list[int]
    sizes: list[int]


def padded_sizes(image: list[int], amounts: list[int]) -> list[int]:
    """Sizes of an image padded by `amounts`, which are in F.pad's order."""
    sizes = [0] * len(image)
    for axis in range(len(image)):
        sizes[axis] = amounts[-2 * axis - 2] + image[axis] + amounts[-2 * axis - 1]
    return sizes


def padding_keys(x: Tensor, amounts: list[int], mode: str) -> Keys:
    """The keys of an image x (B, D_in, *image) padded by `amounts`, in F.pad's order and one of its modes."""
    sizes = padded_sizes(list(x.shape[2:]), amounts)
    if mode != "constant":
        return Keys(F.pad(x, amounts, mode), [0] * len(sizes), sizes)
    before = [0] * len(sizes)
    for axis in range(len(sizes)):
        before[axis] = amounts[-2 * axis - 2]
    return Keys(x, before, sizes)


class Padding(nn.Module):
    """Padding by fixed amounts, (before, after) per axis, in one of nn.Conv's padding modes."""

    def __init__(self, amounts: Sequence[tuple[int, int]], mode: str) -> None:
        super().__init__()
        self.before = [before for before, _ in amounts]
        self.after = [after for _, after in amounts]
        self.fixed = [amount for pair in reversed(amounts) for amount in pair]
        self.mode = "constant" if mode == "zeros" else mode

    def amounts(self, image: list[int]) -> list[int]:
        """For an image of this size, in F.pad's order: before and after the last axis, then the one before it, ..."""
        return self.fixed

    def keys(self, x: Tensor) -> Keys:
        return padding_keys(x, self.fixed, self.mode)

    def forward(self, x: Tensor) -> Tensor:
        """(B, D_in, *image) -> (B, D_in, *N)"""
        return F.pad(x, self.fixed, self.mode)


class SamePadding(nn.Module):
    """Padding with zeros so that ceil(size / stride) queries fit, like TensorFlow's 'SAME'.

    extent: last minus first key of a window, per axis.
    """

    def __init__(self, extent: Sequence[int], stride: Sequence[int]) -> None:
        super().__init__()
        self.extent = list(extent)
        self.stride = list(stride)

    def amounts(self, image: list[int]) -> list[int]:
        """For an image of this size, in F.pad's order: before and after the last axis, then the one before it, ..."""
        amounts: list[int] = []
        for axis in range(len(image) - 1, -1, -1):
            last = (image[axis] - 1) // self.stride[axis] * self.stride[axis]  # where the last query's window starts
            missing = max(last + self.extent[axis] + 1 - image[axis], 0)
            amounts += [missing // 2, missing - missing // 2]
        return amounts

    def keys(self, x: Tensor) -> Keys:
        return padding_keys(x, self.amounts(list(x.shape[2:])), "constant")

    def forward(self, x: Tensor) -> Tensor:
        """(B, D_in, *image) -> (B, D_in, *N)"""
        return F.pad(x, self.amounts(list(x.shape[2:])))
