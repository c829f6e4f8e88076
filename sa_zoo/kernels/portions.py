"""A few images at a time: what lies between the products of a layer then fits a CPU's caches, and is small."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sa_zoo.kernels.situation import Situation, makes_graph

# Numbers in the images that a layer evaluates together: eight of 16x16 pixels and 400 channels.
PORTION = 8 * 16 * 16 * 400


def portions(X: Tensor, *more: Tensor) -> Iterator[list[Tensor]]:
    """As many images at a time as X has PORTION numbers in; all of them on GPUs, which want large products."""
    images = max(1, len(X))
    if X.is_cpu:
        images = max(1, PORTION * len(X) // max(1, X.numel()))
    return ([x[i : i + images] for x in (X, *more)] for i in range(0, len(X), images))


def is_large(X: Tensor) -> bool:
    """Whether portions pay: in training, images are then evaluated again instead of keeping what lies between.

    Not in a graph, which would then take as many images only.
    """
    return not makes_graph() and X.numel() > PORTION


def divided(
    function: Callable[..., Tensor],
    now: Situation,
    parameters: Iterable[Tensor],
    X: Tensor,
    *more: Tensor,
) -> Tensor:
    """function(X, *more), for one portion at a time where that is possible and X is large.

    In training, each portion is evaluated once more in the backward pass, so that only its inputs are kept.
    parameters: of the function. If they are changed in between, the backward pass raises torch's error.
    """
    if not is_large(X) or not now.by_hand:
        return function(X, *more)
    if now.trains:
        function = partial(checkpoint, function, use_reentrant=False)
    Y = torch.cat([function(*portion) for portion in portions(X, *more)])
    return Unchanged.apply(Y, X, *more, *parameters) if now.trains else Y


class Unchanged(torch.autograd.Function):
    """Y, made of other tensors. torch raises RuntimeError in the backward pass if they were changed in between."""

    @staticmethod
    def forward(ctx: Any, Y: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(*others)
        return Y.view_as(Y)

    @staticmethod
    def backward(ctx: Any, dY: Tensor) -> tuple[Tensor | None, ...]:
        return dY, *[None for _ in ctx.saved_tensors]
