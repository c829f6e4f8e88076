"""A bound on a layer's difference from its convolution, by parameters only. Symbols: theorem.py.

For |x| <= M, and Conv the convolution whose kernel slices are the layer's value matrices,

    |MHSA(x) - Conv(x)|_o <= 2 M sum_h (1 - P_h[q, target_h]) |W_val_h[:, o]|_1 + rounding_o

The first term is exact arithmetic: a probability vector and a one-hot one differ by 2 (1 - P[target]) in sum of
absolute values, and `missed_attention` bounds 1 - P[target] on any image, of any size, with any padding. The second
is the usual worst case for both layers: n u for a sum of n products in any order (Jeannerod and Rump 2013, "Improved
error bounds for inner products in floating-point arithmetic"), and half of the type's smallest number for each possible
underflow. It assumes gradual underflow, and for float16 and bfloat16 sums in float32, rounded where tensors are stored.
It does not cover TensorFloat-32 or Winograd convolutions, which round differently.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sa_zoo.convolution.convolutional import (
    ConvolutionalAttention,
    HardAttention,
    convolutional,
)

# Unit roundoff of float32, in which narrower types are summed.
SINGLE = torch.finfo(torch.float32).eps / 2


@dataclass(frozen=True)
class Certificate:
    """Bounds on |MHSA(x) - Conv(x)| for each of the D_out output channels, float64."""

    attention: Tensor  # attention to keys other than the target
    rounding: Tensor  # floating-point errors of the layer and of the convolution

    @property
    def bound(self) -> Tensor:
        return self.attention + self.rounding

    @property
    def worst(self) -> float:
        """The largest bound of all channels."""
        return float(self.bound.max())


def certificate(
    layer: ConvolutionalAttention, image: Sequence[int], magnitude: float = 1.0
) -> Certificate:
    """The bound for images of one size, in the type of the layer's weights.

    Args:
        layer: the result of attention_from_conv; its alpha and Delta may have been trained.
        image: size of the image, for example (height, width).
        magnitude: M, the largest absolute value in the layer's input.

    Raises ValueError for other modules and invalid sizes.
    """
    layer = convolutional("layer", layer)
    if isinstance(image, int) or len(image) != len(layer.kernel_size) or min(image) < 1:
        raise ValueError(f"image: got {image}, expected {len(layer.kernel_size)} positive sizes")
    kernel = layer.weight.detach().cpu().double().flatten(2)  # (D_out, D_in / groups, N_h)
    norms = kernel.abs().sum(dim=1)  # (D_out, N_h)
    largest = magnitude * norms.sum(dim=1)  # no partial sum of products exceeds it
    if layer.b_out is not None:
        largest = largest + layer.b_out.detach().cpu().double().abs()
    keys = layer.pad.sizes(list(image))
    of_both = _rounding_of_sum(kernel[0].numel() + 1, layer) + _layer_rounding(layer, keys)
    # Relative errors of consecutive roundings multiply: prod (1 + r) - 1 <= exp(sum r) - 1.
    relative = torch.tensor(of_both, dtype=torch.float64).expm1()
    return Certificate(
        attention=2 * magnitude * (norms @ layer.missed()),
        rounding=largest * relative + _underflow(layer, keys, magnitude, norms.sum(dim=1)),
    )


def _rounding_of_sum(terms: float, layer: ConvolutionalAttention) -> float:
    """n u: error of a sum of n products, relative to the sum of their absolute values, and of storing it."""
    stored = torch.finfo(layer.weight.dtype).eps / 2
    if stored > SINGLE:
        return terms * SINGLE + stored
    return terms * stored


def _layer_rounding(layer: ConvolutionalAttention, keys: list[int]) -> float:
    """Rounding of the layer's evaluation."""
    of_sum = partial(_rounding_of_sum, layer=layer)
    heads = len(layer.alpha)
    inner = layer.in_channels // layer.groups
    projected = of_sum(heads * inner + 1)
    if isinstance(layer, HardAttention):
        return projected
    Delta = layer.Delta.detach().cpu().double()
    offset = (Delta - Delta.round()).square().amax(dim=1)
    # A score's relative error of four roundings, as an error of exp(score), averaged over keys: E[alpha d^2] < 3/4
    # where Delta is a displacement, more by alpha f^2 where it is f off; twice, as the sum over keys has the same.
    alpha = layer.alpha.detach().cpu().double().clamp(max=1e30)
    score = float((8 * (alpha * offset + 0.75)).max())
    probability = sum(of_sum(score + 6 + size) for size in keys)
    return probability + sum(map(of_sum, keys)) + projected


def _underflow(
    layer: ConvolutionalAttention, keys: list[int], magnitude: float, norms: Tensor
) -> Tensor:
    """Absolute errors of results below the type's normal numbers, for the convolution and the layer: (D_out,)

    Each is at most half the smallest number; `norms` (D_out,), the sums of absolute weights, scale them.
    """
    limits = torch.finfo(layer.weight.dtype)
    heads = len(layer.alpha)
    inner = layer.in_channels // layer.groups
    results = 2 * (heads * inner + 2) + torch.zeros_like(norms)
    if not isinstance(layer, HardAttention):
        results += norms * (sum(keys) * (magnitude + 1) + len(keys))
    return results * limits.smallest_normal * limits.eps / 2
