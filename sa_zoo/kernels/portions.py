"""A few images at a time: what lies between the products of a layer then fits a CPU's caches, and is small."""

from collections.abc import Callable
from functools import partial
from itertools import chain, starmap

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sa_zoo.kernels.situation import Situation

# Numbers in the images that a layer evaluates together: eight of 16x16 pixels and 400 channels.
PORTION = 8 * 16 * 16 * 400


def portions(X: Tensor, *more: Tensor) -> list[tuple[Tensor, ...]]:
    """As many images at a time as X has PORTION numbers in; all of them on GPUs, which want large products."""
    images = len(X)
    if X.is_cpu:
        images = PORTION // max(1, X[:1].numel())
    return list(zip(*(tensor.split(max(1, images)) for tensor in (X, *more)), strict=True))


def is_large(X: Tensor) -> bool:
    """Whether training gains from evaluating images of X again, rather than keeping what lies between."""
    return X.numel() > PORTION


def in_portions(function: Callable[..., Tensor], X: Tensor, *more: Tensor) -> Tensor:
    """function(X, *more) without gradients, for one portion at a time."""
    parts = starmap(function, portions(X, *more))
    first = next(parts)
    if len(first) == len(X):
        return first
    # torch.cat would hold all of the results twice.
    whole = first.new_empty(len(X), *first.shape[1:])
    for place, part in zip(whole.split(len(first)), chain([first], parts), strict=True):
        place.copy_(part)
    return whole


def divided(function: Callable[..., Tensor], now: Situation, X: Tensor, *more: Tensor) -> Tensor:
    """function(X, *more), for one portion at a time where that is possible and X is large.

    In training, each portion is evaluated once more in the backward pass, so that only its inputs are kept.
    """
    if not now.by_hand or (now.trains and not is_large(X)):
        return function(X, *more)
    if not now.trains:
        return in_portions(function, X, *more)
    again = partial(checkpoint, function, use_reentrant=False)
    return torch.cat(list(starmap(again, portions(X, *more))))
