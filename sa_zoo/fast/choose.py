"""The choice between evaluations of attention, with reasons.

models/ alone evaluates by the definition or by axes; `install` adds the routes of this folder. All of them compute
the same numbers up to rounding. docs/benchmarks.md has the measurements.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from sa_zoo.fast.absorbed import absorbed, can_absorb
from sa_zoo.fast.deployed import deployed
from sa_zoo.fast.portions import all_axes_pay, divided, is_large
from sa_zoo.fast.recomputed import can_recompute, recomputed
from sa_zoo.fast.situation import Situation
from sa_zoo.fast.taps import can_read_taps, taps
from sa_zoo.models.attention import Attention
from sa_zoo.models.blocks import Block

Condition = Callable[[Attention, Tensor, Situation], bool]
Evaluation = Callable[[Attention, Tensor, Situation], Tensor]  # (B, H, W, D) -> (B, H, W, D)


class Route(NamedTuple):
    """A way to evaluate Eq. 10, its condition and its reason."""

    name: str
    condition: Condition
    evaluation: Evaluation
    reason: str


# The first route whose condition holds is taken.
ROUTES = (
    Route(
        "taps",
        can_read_taps,
        taps,
        "reads one pixel per head: a convolution, or a gather and a product",
    ),
    Route(
        "as published",
        lambda layer, X, now: now.fixed_graph,
        lambda layer, X, now: layer.cheaper(X),
        "asks nothing about the batch, any of which the graph has to take",
    ),
    Route("absorbed", can_absorb, absorbed, "builds neither queries nor keys"),
    Route(
        "recomputed",
        can_recompute,
        recomputed,
        "keeps the tensor of all heads neither whole nor for gradients",
    ),
    Route(
        "by axes",
        all_axes_pay,
        lambda layer, X, now: layer.by_axes(X),
        "costs O(T (H + W)) instead of O(T^2)",
    ),
    Route(
        "definition",
        lambda layer, X, now: True,
        lambda layer, X, now: layer.definition(X),
        "calls every module once, with the whole batch, and is as fast for small images",
    ),
)


def choose(layer: Attention, X: Tensor) -> tuple[Route, Situation]:
    """The route for X (B, H, W, D), and the situation of the choice."""
    now = Situation(layer.children(), X)
    if now.watched:
        return ROUTES[-1], now
    return next(route for route in ROUTES if route.condition(layer, X, now)), now


# `self` has no type in these two: TorchScript would compile its class instead of the module.
def evaluator(self, X: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    """Eq. 10 by the chosen route: (B, H, W, D) -> (B, H, W, D)"""
    if not torch.jit.is_scripting():
        route, now = choose(self, X)
        return route.evaluation(self, X, now)
    return self.cheaper(X)


def evaluate_block(self, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    """`Block.at_once`; in inference, large batches in portions that fit caches: (B, H, W, D) -> (B, H, W, D)"""
    if not torch.jit.is_scripting():  # noqa: SIM102  TorchScript compiles both sides of `and`
        if is_large(x) and not torch.is_grad_enabled() and not self.training:
            return divided(self.at_once, Situation(self.children(), x), [], x)
    return self.at_once(x)


@contextmanager
def only(name: str) -> Iterator[None]:
    """Evaluate every layer by this route, and blocks as written. Raises ValueError for an unknown name."""
    routes = {route.name: route for route in ROUTES}
    if name not in routes:
        raise ValueError(f"route: got {name!r}, expected one of {', '.join(routes)}")
    evaluation = routes[name].evaluation
    installed = (Attention.evaluator, Block.evaluate_block)
    Attention.evaluator = lambda self, X: evaluation(self, X, Situation(self.children(), X))
    Block.evaluate_block = Block.at_once
    try:
        yield
    finally:
        Attention.evaluator, Block.evaluate_block = installed


def install() -> None:
    """Evaluate the networks of models/ by `choose`, and let timm.utils.reparameterize_model deploy them."""
    Attention.evaluator = evaluator
    Attention.fuse = deployed  # type: ignore[assignment]  # mypy expects the type of self
    Block.evaluate_block = evaluate_block
