"""The keys of a convolutional layer: its padded image, and query positions. Symbols: theorem.py."""

from collections.abc import Sequence
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn


class Keys(NamedTuple):
    """Keys; zeros of the padding need not be stored.

    stored: (B, D_in, *stored); per axis, before: index of the first stored key, and sizes: N.
    """

    stored: Tensor
    before: list[int]
    sizes: list[int]


class Padding(nn.Module):
    """Padding by fixed amounts before and after each axis, in one of nn.Conv's padding modes.

    center: the position of the first query among the keys, per axis.
    """

    def __init__(self, before: Sequence[int], after: Sequence[int], mode: str) -> None:
        super().__init__()
        self.before = list(before)
        self.after = list(after)
        self.mode = mode
        self.center = self.before

    def amounts(self, image: list[int]) -> tuple[list[int], list[int]]:
        """Keys added before and after each axis of an image of this size."""
        return self.before, self.after

    def sizes(self, image: list[int]) -> list[int]:
        """N, the number of keys along each axis."""
        before, after = self.amounts(image)
        return [before[axis] + image[axis] + after[axis] for axis in range(len(image))]

    def keys(self, x: Tensor) -> Keys:
        """The keys of images (B, D_in, *image); zeros are not stored."""
        image = list(x.shape[2:])
        if self.mode == "zeros":
            return Keys(x, self.amounts(image)[0], self.sizes(image))
        return Keys(self.forward(x), [0] * len(image), self.sizes(image))

    def forward(self, x: Tensor) -> Tensor:
        """(B, D_in, *image) -> (B, D_in, *N)"""
        before, after = self.amounts(list(x.shape[2:]))
        # In F.pad's order: before and after the last axis, then the one before it, ...
        amounts: list[int] = []
        for axis in range(len(before) - 1, -1, -1):
            amounts += [before[axis], after[axis]]
        return F.pad(x, amounts, "constant" if self.mode == "zeros" else self.mode)


class SamePadding(Padding):
    """Zero padding for ceil(size / stride) queries, like TensorFlow's 'SAME'.

    It depends on the image's size, but queries are always in the middle of their windows.
    extent: last minus first key of a window, per axis.
    """

    def __init__(self, extent: Sequence[int], stride: Sequence[int]) -> None:
        super().__init__([], [], "zeros")
        self.extent = list(extent)
        self.stride = list(stride)
        self.center = [size // 2 for size in extent]

    def amounts(self, image: list[int]) -> tuple[list[int], list[int]]:
        """Keys added before and after each axis of an image of this size."""
        # Of the last query's window, the first key and the (size - 1) % stride after it are in the image.
        missing = [
            max(self.extent[axis] - (image[axis] - 1) % self.stride[axis], 0)
            for axis in range(len(image))
        ]
        return [count // 2 for count in missing], [count - count // 2 for count in missing]
