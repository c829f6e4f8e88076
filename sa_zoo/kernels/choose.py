"""Which evaluation of attention is used when, and why.

Importing models/ gives the definition; `install` puts the routes of this folder behind its hooks. All of them compute
the same numbers up to rounding. docs/benchmarks.md has the measurements.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from sa_zoo.kernels.absorbed import absorbed, can_absorb
from sa_zoo.kernels.fused import can_fuse, fused
from sa_zoo.kernels.portions import divided
from sa_zoo.kernels.recomputed import axes_pay, can_recompute, recomputed
from sa_zoo.kernels.situation import Situation, situation
from sa_zoo.kernels.taps import can_read_taps, taps
from sa_zoo.models.attention import Attention
from sa_zoo.models.network import Block

Route = Callable[[Attention, Tensor, Situation], Tensor]  # (B, H, W, D) -> (B, H, W, D)

ROUTES: dict[str, Route] = {
    "definition": lambda layer, X, now: layer.definition(X),
    "by axes": lambda layer, X, now: layer.by_axes(X),
    "as published": lambda layer, X, now: layer.cheaper(X),
    "fused": fused,
    "absorbed": absorbed,
    "recomputed": recomputed,
    "taps": taps,
}
# Above so many pixels (16x16), training that keeps all heads takes less time and memory by the factors of P by axis
# than by P itself. On GPUs this is an estimate for training and inference, not measured yet.
KEPT_AXES_FROM = 256


class Row(NamedTuple):
    """A route, when it is taken, and why."""

    route: str
    condition: Callable[[Attention, Tensor, Situation], bool]
    reason: str


# The first row whose condition holds is taken.
ROWS = (
    Row(
        "definition",
        lambda layer, X, now: now.watched,
        "calls every module, once and with the whole batch",
    ),
    Row(
        "taps", can_read_taps, "reads one pixel per head: a convolution, or a gather and a product"
    ),
    Row(
        "as published",
        lambda layer, X, now: now.fixed_graph,
        "asks nothing about the batch, any of which the graph has to take",
    ),
    Row("absorbed", can_absorb, "builds neither queries nor keys"),
    Row("fused", can_fuse, "never builds the tensor of all heads"),
    Row(
        "recomputed", can_recompute, "keeps the tensor of all heads neither whole nor for gradients"
    ),
    Row(
        "by axes",
        # With fewer channels than pixels, mixing by P costs more than W_val, and the factors pay earlier.
        lambda layer, X, now: axes_pay(layer, X, min(X.shape[3], KEPT_AXES_FROM)),
        "costs O(T (H + W)) instead of O(T^2)",
    ),
    Row("definition", lambda layer, X, now: True, "is as fast for small images"),
)

_only: list[str] = []


def choose(layer: Attention, X: Tensor) -> tuple[str, Situation]:
    """Name of the route for X (B, H, W, D), and the situation that it is chosen in."""
    now = situation(layer.children(), X, *layer.parameters())
    if _only:
        return _only[-1], now
    return next(row.route for row in ROWS if row.condition(layer, X, now)), now


# `self` has no type in these two: TorchScript would compile its class instead of the module.
def evaluator(self, X: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    """Eq. 10 by the chosen route: (B, H, W, D) -> (B, H, W, D)"""
    if not torch.jit.is_scripting():
        route, now = choose(self, X)
        return ROUTES[route](self, X, now)
    return self.cheaper(X)


def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    """`Block.rest` for as many images at a time as attention takes: (B, H, W, D), twice -> (B, H, W, D)"""
    if not torch.jit.is_scripting():
        return _rest(self, x, attended)
    return self.rest(x, attended)


def _rest(block: Block, x: Tensor, attended: Tensor) -> Tensor:
    if _only:
        return block.rest(x, attended)
    others = [module for module in block.children() if module is not block.attn]
    parameters = [parameter for module in others for parameter in module.parameters()]
    return divided(block.rest, situation(others, x, attended), parameters, x, attended)


@contextmanager
def only(route: str) -> Iterator[None]:
    """Evaluate every layer by this route, for tests and benchmarks. Raises ValueError for a name not in ROUTES."""
    if route not in ROUTES:
        raise ValueError(f"route: got {route!r}, expected one of {', '.join(ROUTES)}")
    _only.append(route)
    try:
        yield
    finally:
        _only.pop()


def install() -> None:
    """Let the networks of models/ be evaluated by `choose`."""
    Attention.evaluator = evaluator
    Block.after_attention = after_attention
