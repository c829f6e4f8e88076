"""Random convolutions for property-based tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


@contextmanager
def without_onednn() -> Iterator[None]:
    """oneDNN's bfloat16 convolutions for AMX return garbage for some strides and dilations (torch 2.15)."""
    torch.backends.mkldnn.enabled = False
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = True


@dataclass
class RandomLayer:
    """A convolution and a size of images that it takes."""

    conv: nn.Module
    image: list[int]
    seed: int

    def inputs(self, batch: int = 1) -> Tensor:
        """(batch, channels, *image), uniform in [-1, 1], in the convolution's type."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        shape = (batch, self.conv.in_channels, *self.image)
        noise = torch.rand(shape, generator=generator, dtype=torch.float64)
        return (2 * noise - 1).to(self.conv.weight.dtype)


@st.composite
def layers(draw: st.DrawFn) -> RandomLayer:
    """Convolutions of any kind that nn.Conv knows, on images of a few pixels."""
    axes = draw(st.integers(1, 3))

    def per_axis(low: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=axes, max_size=axes))

    largest = 4 if axes < 3 else 2  # the explicit softmax of all queries and keys shall stay small
    kernel_size, stride = per_axis(1, largest), per_axis(1, 3)
    dilation, padding = per_axis(1, largest - 1), per_axis(0, largest - 1)
    groups = draw(st.integers(1, 2))
    mode = draw(st.sampled_from(["zeros", "replicate", "reflect", "circular"]))
    channels = groups * draw(st.integers(1, 3)), groups * draw(st.integers(1, 3))
    seed = draw(st.integers(0, 10**6))
    options = {"padding_mode": mode, "bias": draw(st.booleans()), "dtype": torch.float64}
    geometry = kernel_size, stride, padding, dilation, groups
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        conv = CONVOLUTIONS[axes](*channels, *geometry, **options)
    needed = [
        1 + step * (size - 1) - 2 * pad
        for size, step, pad in zip(kernel_size, dilation, padding, strict=True)
    ]
    smallest = [pad + 1 if mode in ("reflect", "circular") else 1 for pad in padding]
    room = per_axis(0, 9 if axes < 3 else 3)
    image = [
        max(need, least) + extra for need, least, extra in zip(needed, smallest, room, strict=True)
    ]
    return RandomLayer(conv, image, seed)
