"""A few images at a time: what lies between the products of a layer then fits a CPU's caches, and is small.

Attention builds N_h times as many numbers as its input holds. Without gradients they are written into memory that is
kept and reused, as memory fresh from the system can take as long as the product that fills it. With gradients, each
portion is evaluated once more in the backward pass, so that nothing but its input and output is kept.
"""

import math
import threading
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.utils.checkpoint import checkpoint

from sa_zoo.models.attention import Attention, attend_by_axes

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
        size, key = math.prod(shape), (name, dtype)
        if key not in self.held or self.held[key].numel() < size:
            with torch.inference_mode(
                False
            ):  # a tensor made in this mode cannot be written to outside of it
                self.held[key] = torch.empty(size, dtype=dtype, device="cpu")
        return self.held[key][:size].view(shape)


WORKSPACE = Workspace()


def images_in(numbers: float, X: Tensor) -> int:
    """How many images of X hold so many numbers, at least one."""
    return max(1, int(numbers) // max(1, X[:1].numel()))


def is_recomputed(X: Tensor) -> bool:
    """Whether training evaluates a batch X on a CPU again in the backward pass, rather than keeping all of it.

    Not in half precision, where products are so fast that recomputing costs more time than it is worth.
    """
    half = X.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled("cpu")
    return X.numel() > KEPT * PORTION and not half


def in_portions(
    function: Callable[..., Tensor], X: Tensor, *more: Tensor, factor: float = 1.0
) -> Tensor:
    """function(X, *more), on a CPU for a few images at a time if X holds more than `factor` portions."""
    images = images_in(factor * PORTION, X)
    one_call = (
        torch.compiler.is_compiling() or not X.is_cpu
    )  # compilers and accelerators make their own portions
    if one_call or images >= len(X) or (torch.is_grad_enabled() and not is_recomputed(X)):
        return function(X, *more)
    portions = zip(*(tensor.split(images) for tensor in (X, *more)), strict=True)
    if torch.is_grad_enabled():
        recomputed = partial(checkpoint, function, use_reentrant=False)
        return torch.cat([recomputed(*portion) for portion in portions])
    return _filled(len(X), (function(*portion) for portion in portions))


def _filled(images: int, parts: Iterable[Tensor]) -> Tensor:
    """torch.cat(parts), each part put in its place before the next one is computed."""
    whole, start = torch.empty(0), 0
    for part in parts:
        whole = whole if start else part.new_empty(images, *part.shape[1:])
        whole[start : start + len(part)] = part
        start += len(part)
    return whole


def portions(attention: Attention, X: Tensor) -> Tensor:
    """The layer for terms that depend on positions only: P or its factors once, then a few images at a time."""
    if not attention.separable or attention.drops():
        P = attention.attn_drop(attention.probabilities(X))
        return in_portions(partial(attention.values, P), X)
    factors = attention.axis_probabilities(X)
    if torch.is_grad_enabled() or not is_ordinary(X) or torch.is_autocast_enabled("cpu"):
        return in_portions(lambda some: attention.W_val(attend_by_axes(factors, some)), X)
    down, across = (P.to(X.dtype) for P in factors)
    # Larger portions for W_val, whose layout libraries change in each call; what is mixed at a time stays in caches.
    return in_portions(
        lambda some: _values_in_workspace(attention, down, across, some), X, factor=1.75
    )


def _values_in_workspace(
    attention: Attention, P_down: Tensor, P_across: Tensor, X: Tensor
) -> Tensor:
    """W_val of `attend_in_workspace`, in memory of its own also where W_val returns a view of its input."""
    heads = attend_in_workspace(P_down, P_across, X)
    values: Tensor = attention.W_val(heads)
    if values.untyped_storage().data_ptr() == heads.untyped_storage().data_ptr():
        return values.clone()
    return values


def attend_in_workspace(P_down: Tensor, P_across: Tensor, X: Tensor) -> Tensor:
    """`attend_by_axes` in two dimensions, without gradients, in memory that the next call overwrites."""
    (B, H, W, D), N_h, images = X.shape, len(P_down), images_in(PORTION / 2, X)
    heads = WORKSPACE.empty("heads", X.dtype, B, H, W, N_h, D)
    for some, place in zip(X.split(images), heads.split(images), strict=True):
        mixed = WORKSPACE.empty("mixed", X.dtype, len(some), H * N_h, W * D)
        torch.matmul(P_down.transpose(0, 1).flatten(0, 1), some.flatten(2), out=mixed)
        across = WORKSPACE.empty("across", X.dtype, len(some), H, N_h, W, D)
        torch.matmul(P_across, mixed.view(across.shape), out=across)
        place.copy_(across.transpose(2, 3))
    return heads.flatten(3)


def is_ordinary(*tensors: Tensor) -> bool:
    """Whether tensors are numbers in memory: no stand-ins of torch.func's transforms, subclasses or tangents."""
    try:
        for tensor in tensors:
            tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return all(
        type(tensor) in (Tensor, nn.Parameter) and unpack_dual(tensor).tangent is None
        for tensor in tensors
    )
