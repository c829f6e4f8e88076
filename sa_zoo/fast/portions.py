"""How many images and heads a layer evaluates at a time, and from which sizes on.

A few images at a time fit a CPU's caches, with all intermediate results. On a GPU, few large products are
fastest instead. All sizes were measured.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sa_zoo.fast.situation import Situation, makes_graph
from sa_zoo.models.attention import AXES_FROM, Attention

# Numbers in the images of one portion: eight of 16x16 pixels and 400 channels.
PORTION = 8 * 16 * 16 * 400
# Numbers in X above which inference divides its heads. All heads at once are faster for six images of 16x16 pixels and
# 80 channels, or one of 400 channels, in float32 and bfloat16.
DIVIDED_FROM = 2**17
# The fewest images in a portion of all heads: with fewer, reading W_val takes too long.
LEAST = 4
# Numbers in the heads from which on, in float32, a 1x1 convolution is faster than nn.Linear.
CONVOLVED_FROM = 2**16
# Above this many pixels (16x16), where training keeps all heads, the factors of P by axis take less time and memory
# than P itself.
KEPT_AXES_FROM = 256
# The same two numbers for an H100, where a large product makes up for more work: 40x40 and 24x24 pixels.
AXES_FROM_ON_GPU = 1600
KEPT_AXES_FROM_ON_GPU = 576


def portion_of(X: Tensor, heads: int = 1) -> int:
    """How many images have as many bytes as PORTION in float32; all of them on GPUs, which need large products."""
    parts = ceil(heads * X.nbytes / (4 * PORTION)) if X.is_cpu else 1
    return max(LEAST if heads > 1 else 1, ceil(len(X) / max(1, parts)))


def portions(X: Tensor, *more: Tensor) -> Iterator[list[Tensor]]:
    """Equal parts, to be read or written."""
    images = portion_of(X)
    return ([x[i : i + images] for x in (X, *more)] for i in range(0, len(X), images))


def is_large(X: Tensor, heads: int = 1) -> bool:
    """Whether portions pay; the backward pass then recomputes intermediate results instead of keeping them.

    Not in a graph: portions fix its number of images.
    """
    return not makes_graph() and heads * X.numel() > PORTION


def heads_fill_caches(X: Tensor, now: Situation) -> bool:
    """Whether the heads of all images are slow together: on CPUs, where many do not fit caches."""
    if makes_graph() or not X.is_cpu:
        return False
    if now.trains:
        return is_large(X)
    return X.numel() > DIVIDED_FROM and X.shape[1] * X.shape[2] > AXES_FROM


def all_axes_pay(layer: Attention, X: Tensor, now: Situation) -> bool:
    """Whether the factors of P by axis are faster than P for all heads at once."""
    if not now.trains:
        least = axes_from(X)
    elif X.is_cpu:
        # With fewer channels than pixels, mixing by P costs more than W_val, and the factors pay earlier.
        least = max(AXES_FROM, min(X.shape[3], KEPT_AXES_FROM))
    else:
        least = KEPT_AXES_FROM_ON_GPU
    return layer.axes_pay((X.shape[1], X.shape[2]), least)


def axes_from(x: Tensor) -> int:
    """The number of pixels above which inference takes the factors of P by axis, on the device of x."""
    return AXES_FROM if x.is_cpu else AXES_FROM_ON_GPU


def convolution_pays(heads: Tensor) -> bool:
    """Whether a 1x1 convolution is faster than nn.Linear: for many numbers in float32 on a CPU, without gradients."""
    in_float32 = heads.is_cpu and heads.dtype == torch.float32
    return in_float32 and heads.numel() >= CONVOLVED_FROM and not torch.is_grad_enabled()


def divided(
    function: Callable[..., Tensor],
    now: Situation,
    parameters: Iterable[Tensor],
    X: Tensor,
    heads: int = 1,
) -> Tensor:
    """function(X), one portion at a time if X, in so many heads, is large and it is possible.

    In training, each portion is evaluated once more in the backward pass, so only its inputs are kept.
    parameters: of the function. If they are changed in between, the backward pass raises torch's error.
    """
    if not is_large(X, heads) or not now.by_hand:
        return function(X)
    if now.trains:
        function = partial(checkpoint, function, use_reentrant=False)
    # not slices: in the backward pass, each would fill a tensor of the size of X
    Y = torch.cat([function(part) for part in X.split(portion_of(X, heads))])
    return Unchanged.apply(Y, X, *parameters) if now.trains else Y


class Unchanged(torch.autograd.Function):
    """Y, made of other tensors. torch raises RuntimeError in the backward pass if they were changed in between."""

    @staticmethod
    def forward(ctx: Any, Y: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(*others)
        return Y.view_as(Y)

    @staticmethod
    def backward(ctx: Any, dY: Tensor) -> tuple[Tensor | None, ...]:
        return dY, *[None for _ in ctx.saved_tensors]
