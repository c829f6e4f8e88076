"""A few images at a time: what lies between the products of a layer then fits a CPU's caches, and is small.

Attention builds N_h times as many numbers as its input holds. Without gradients they are written into memory that is
kept and reused, as memory fresh from the system can take as long as the product that fills it. With gradients, each
portion is evaluated once more in the backward pass, so that nothing but its input and output is kept.
"""

import math
import threading
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sa_zoo.kernels.situation import Situation
from sa_zoo.models.attention import AXES_FROM, Attention, attend_by_axes

# Numbers in the images that a layer evaluates together: four of 16x16 pixels and 400 channels.
PORTION = 4 * 16 * 16 * 400
# Portions for which training keeps what lies between: evaluating a small network again costs a quarter of a step.
KEPT = 3


class Workspace(threading.local):
    """Memory that results are written to again and again, separately for each thread, for as long as it lives."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, torch.dtype], Tensor] = {}

    def empty(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """A tensor of this shape, in the place of the last one of that name."""
        size = math.prod(shape)
        key = (name, dtype)
        if key not in self.held or self.held[key].numel() < size:
            # A tensor made in inference mode cannot be written to outside of it.
            with torch.inference_mode(False):
                self.held[key] = torch.empty(size, dtype=dtype, device="cpu")
        return self.held[key][:size].view(shape)


WORKSPACE = Workspace()


def images_in(numbers: float, X: Tensor) -> int:
    """How many images of X hold so many numbers, at least one."""
    return max(1, int(numbers) // max(1, X[:1].numel()))


def is_divided(X: Tensor, now: Situation) -> bool:
    """Whether a batch X is evaluated in portions; where gradients are wanted, if recomputing them is worth it.

    Not in half precision, where products are so fast that recomputing costs more time than it is worth.
    """
    recomputed = X.numel() > KEPT * PORTION and not now.half
    return now.by_hand and (recomputed or not now.trains)


def in_portions(
    function: Callable[..., Tensor], now: Situation, X: Tensor, *more: Tensor, factor: float = 1.0
) -> Tensor:
    """function(X, *more), by hand for a few images at a time if X holds more than `factor` portions."""
    if not is_divided(X, now):
        return function(X, *more)
    images = images_in(factor * PORTION, X)
    if images >= len(X):
        return function(X, *more)
    portions = zip(*(tensor.split(images) for tensor in (X, *more)), strict=True)
    if now.trains:
        recomputed = partial(checkpoint, function, use_reentrant=False)
        return torch.cat([recomputed(*portion) for portion in portions])
    # torch.cat would hold all of the results twice.
    whole = torch.empty(0)
    start = 0
    for portion in portions:
        part = function(*portion)
        if start == 0:
            whole = part.new_empty(len(X), *part.shape[1:])
        whole[start : start + len(part)] = part
        start += len(part)
    return whole


def factorizes(layer: Attention) -> bool:
    """Whether softmax(A) is a product of one factor per axis."""
    return layer.separable and not layer.drops()


def is_plain_inference(layer: Attention, now: Situation) -> bool:
    """Whether no gradients are wanted, and W_val is just a weight and a bias: no adapter, no other precision."""
    return type(layer.W_val) is nn.Linear and not now.trains and not now.autocast


def can_divide(layer: Attention, X: Tensor, now: Situation) -> bool:
    """Whether P or its factors can be computed once, for all portions of X (B, H, W, D)."""
    positional = all(term.positional for term in layer.terms)
    return positional and is_divided(X, now)


def portions(layer: Attention, X: Tensor, now: Situation) -> Tensor:
    """The layer for terms that depend on positions only: P or its factors once, then a few images at a time."""
    if not factorizes(layer) or X.shape[1] * X.shape[2] <= AXES_FROM:
        P = layer.attn_drop(layer.probabilities(X))
        return in_portions(partial(layer.values, P), now, X)
    factors = layer.axis_probabilities(X)
    # Another projection than a plain one could return what it is given, which the next call overwrites.
    if not is_plain_inference(layer, now) or not now.by_hand:
        return in_portions(lambda some: layer.W_val(attend_by_axes(factors, some)), now, X)
    down, across = (P.to(X.dtype) for P in factors)

    def in_workspace(some: Tensor) -> Tensor:
        return layer.W_val(attend_in_workspace(down, across, some))

    # Larger portions for W_val, whose layout libraries change in each call; what is mixed at a time stays in caches.
    return in_portions(in_workspace, now, X, factor=1.75)


def attend_in_workspace(P_down: Tensor, P_across: Tensor, X: Tensor) -> Tensor:
    """`attend_by_axes` in two dimensions, without gradients, in memory that the next call overwrites."""
    B, H, W, D = X.shape
    N_h = len(P_down)
    images = images_in(PORTION / 2, X)
    heads = WORKSPACE.empty("heads", X.dtype, B, H, W, N_h, D)
    for some, place in zip(X.split(images), heads.split(images), strict=True):
        mixed = WORKSPACE.empty("mixed", X.dtype, len(some), H * N_h, W * D)
        torch.matmul(P_down.transpose(0, 1).flatten(0, 1), some.flatten(2), out=mixed)
        across = WORKSPACE.empty("across", X.dtype, len(some), H, N_h, W, D)
        torch.matmul(P_across, mixed.view(across.shape), out=across)
        place.copy_(across.transpose(2, 3))
    return heads.flatten(3)
