"""Fewer heads for the same convolution: attention among patches of P x P pixels instead of pixels.

After Li et al., "Can Vision Transformers Perform Convolution?" (2021, https://arxiv.org/abs/2111.01353): the pixels
of a patch are channels of one token, (2 ceil((K - 1) / 2P) + 1)^n heads look at the patches around, and the value
matrices hold the kernel in blocks. Symbols: theorem.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def fold_patches(x: Tensor, patch: int) -> Tensor:
    """(B, C, *(P T)) -> (B, C P^n, *T), the pixels of a patch in row-major order after the channel."""
    axes = x.ndim - 2
    for axis in range(axes):
        x = x.unflatten(2 + 2 * axis, [-1, patch])  # (B, C, T, P, T, P, ...)
    order = [0, 1, *(3 + 2 * axis for axis in range(axes)), *(2 + 2 * axis for axis in range(axes))]
    return x.permute(order).flatten(1, 1 + axes)


def unfold_patches(x: Tensor, patch: int) -> Tensor:
    """(B, C P^n, *T) -> (B, C, *(P T)), the inverse of `fold_patches`."""
    axes = x.ndim - 2
    x = x.unflatten(1, [-1, *[patch] * axes])  # (B, C, P, P, ..., T, T, ...)
    order = [0, 1]
    for axis in range(axes):
        order += [2 + axes + axis, 2 + axis]
    x = x.permute(order)
    for axis in range(axes):
        x = x.flatten(2 + axis, 3 + axis)
    return x


def tap_places(size: int, dilation: int, patch: int) -> Tensor:
    """Where kernel pixel a of an axis connects pixels u and v of patches A apart: (K, heads, P, P), [a, A, u, v].

    One where dilation * (a - (K - 1) / 2) = P A + v - u, A counted from the first head.
    """
    extent = dilation * (size - 1)
    reach = -(-extent // (2 * patch))
    taps, heads, pixels = torch.arange(size), torch.arange(-reach, reach + 1), torch.arange(patch)
    displacement = patch * heads[:, None, None] + pixels[None, None, :] - pixels[None, :, None]
    return (dilation * taps[:, None, None, None] - extent // 2 == displacement).double()


def patch_kernel(kernel: Tensor, dilation: Sequence[int], patch: int) -> Tensor:
    """Kernel on patches that does what `kernel` does on pixels: (D_out, D_in, *K) -> (D_out P^n, D_in P^n, *heads)"""
    axes = kernel.ndim - 2
    blocks = kernel.double()
    for axis in range(axes):  # the first of the axes left becomes the last three: heads, u, v
        places = tap_places(kernel.shape[2 + axis], dilation[axis], patch)
        blocks = torch.einsum("oia...,ahuv->oi...huv", blocks, places.to(blocks.device))
    heads, u, v = ([2 + part + 3 * axis for axis in range(axes)] for part in range(3))
    return (
        blocks.permute([0, *u, 1, *v, *heads])
        .flatten(1 + axes, 1 + 2 * axes)
        .flatten(0, axes)
        .to(kernel.dtype)
    )


def pixel_kernel(
    blocks: Tensor, kernel_size: Sequence[int], dilation: Sequence[int], patch: int
) -> Tensor:
    """The kernel on pixels that `patch_kernel` made `blocks` of: (D_out P^n, D_in P^n, *heads) -> (D_out, D_in, *K)

    Where output pixels u of a patch have kernels of their own, the median of what each has on a tap.
    """
    axes = len(kernel_size)
    kernel = blocks.double().unflatten(0, [-1, *[patch] * axes])
    kernel = kernel.unflatten(1 + axes, [-1, *[patch] * axes])  # (D_out, *u, D_in, *v, *heads)
    heads, u, v = (range(first, first + axes) for first in (2 + 2 * axes, 1, 2 + axes))
    kernel = kernel.permute(
        [0, 1 + axes, *(place for axis in zip(heads, u, v, strict=True) for place in axis)]
    )
    for axis in range(axes):  # the first three, heads, u, v, become the last two: K, u
        places = tap_places(kernel_size[axis], dilation[axis], patch).to(kernel.device)
        kernel = torch.einsum("oihuv...,ahuv->oi...au", kernel, places)
    kernel = kernel.permute([0, 1, *range(2, 2 + 2 * axes, 2), *range(3, 3 + 2 * axes, 2)])
    return kernel.flatten(2 + axes).median(dim=-1).values.to(blocks.dtype)


class PatchAttention(nn.Module):
    """A convolution as attention among patches: fold, attend, unfold. Image sizes have to be multiples of P = `patch`.

    attention: of the patches' convolution; kernel_size, dilation: of the convolution on pixels.
    """

    def __init__(
        self, attention: nn.Module, kernel_size: Sequence[int], dilation: Sequence[int], patch: int
    ) -> None:
        super().__init__()
        self.attention = attention
        self.kernel_size, self.dilation, self.patch = list(kernel_size), list(dilation), patch

    def forward(self, x: Tensor) -> Tensor:
        """(B, D_in, *image) -> (B, D_out, *image)"""
        return unfold_patches(self.attention(fold_patches(x, self.patch)), self.patch)
