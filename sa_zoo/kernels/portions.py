"""A few images at a time: what lies between the products of a layer then fits a CPU's caches, and is small."""

from collections.abc import Callable
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sa_zoo.kernels.situation import Situation

# Numbers in the images that a layer evaluates together: four of 16x16 pixels and 400 channels.
PORTION = 4 * 16 * 16 * 400
# Portions for which training keeps what lies between: evaluating a small network again costs a quarter of a step.
KEPT = 3


def images_in(numbers: int, X: Tensor) -> int:
    """How many images of X hold so many numbers, at least one; all of them on GPUs, which want large products."""
    if not X.is_cpu:
        return max(1, len(X))
    return max(1, numbers // max(1, X[:1].numel()))


def in_portions(
    function: Callable[..., Tensor], X: Tensor, *more: Tensor, numbers: int = PORTION
) -> Tensor:
    """function(X, *more) without gradients, for as many images at a time as hold so many numbers."""
    images = images_in(numbers, X)
    if images >= len(X):
        return function(X, *more)
    parts = map(function, *(tensor.split(images) for tensor in (X, *more)))
    first = next(parts)
    # torch.cat would hold all of the results twice.
    whole = first.new_empty(len(X), *first.shape[1:])
    for place, part in zip(whole.split(images), chain([first], parts), strict=True):
        place.copy_(part)
    return whole


def is_large(X: Tensor) -> bool:
    """Whether training gains from evaluating images of X again, rather than keeping what lies between."""
    return X.numel() > KEPT * PORTION


def divided(function: Callable[..., Tensor], now: Situation, X: Tensor, *more: Tensor) -> Tensor:
    """function(X, *more), for a few images at a time where that is possible and X holds many.

    In training, each portion is evaluated once more in the backward pass, so that only its inputs are kept.
    """
    if not now.by_hand or (now.trains and not is_large(X)):
        return function(X, *more)
    if not now.trains:
        return in_portions(function, X, *more)
    parts = (tensor.split(images_in(PORTION, X)) for tensor in (X, *more))
    return torch.cat(list(map(partial(checkpoint, function, use_reentrant=False), *parts)))
