"""The value matrices of convolutional attention, as a layer that adapters such as LoRA can wrap."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd


class ValueMatrices(_ConvNd):
    """W_h = W_val_h W_out_h of Eq. 10 (D_h = D_out), stored like the kernel of a convolution.

    weight: (D_out, D_in / groups, *K). With groups, W_val_h is block diagonal and only its blocks are stored.

    Attention reads the kernel; it never convolves images with it. The class is a convolution because peft wraps known
    layers only, and builds adapters of the same class. Its padding is K - 1, so that its response to an image of one
    pixel is the flipped kernel, and `kernel_of` needs nothing but a call.
    """

    def forward(self, images: Tensor | None = None, are_pixels: bool = False) -> Tensor:
        """The kernel; with images, their convolution, which is known if `are_pixels`: image c is a one in channel c."""
        if images is None:
            return self.weight
        if are_pixels:
            return self.weight.transpose(0, 1).flip(list(range(2, self.weight.dim())))
        return self._conv_forward(images, self.weight, self.bias)


class ValueMatrices1d(ValueMatrices, nn.Conv1d):
    pass


class ValueMatrices2d(ValueMatrices, nn.Conv2d):
    pass


class ValueMatrices3d(ValueMatrices, nn.Conv3d):
    pass


def values_from_kernel(weight: Tensor) -> ValueMatrices:
    """Value matrices that share the memory of a kernel (D_out, D_in / groups, *K)."""
    kinds: Any = {3: ValueMatrices1d, 4: ValueMatrices2d, 5: ValueMatrices3d}
    channels, inner, *size = weight.shape
    padding = [length - 1 for length in size]
    values: ValueMatrices = kinds[weight.dim()](
        inner, channels, size, padding=padding, bias=False, device="meta"
    )
    values.weight = nn.Parameter(weight)
    return values


def kernel_of(values: Any) -> Tensor:
    """The kernel (D_out, D_in / groups, *K) of ValueMatrices, or of an adapter around them."""
    if isinstance(values, ValueMatrices):
        return values()
    pixels = torch.eye(values.weight.shape[1]).to(values.weight)
    responses = values(pixels.view(*pixels.shape, *[1] * (values.weight.dim() - 2)), True)
    return responses.transpose(0, 1).flip(list(range(2, responses.dim())))
