"""Positional heads of many images: one at a time, with a backward pass that recomputes them.

    Y = b + sum_h P_h X W_h^T (Eq. 10);  with G_h = dY W_h:  dW_h = dY^T P_h X,  dX = sum_h P_h^T G_h,  dP_h = G_h X^T

P_h X of all heads is N_h times as large as X, but cheap compared with the products with W. So it is recomputed for dW
instead of kept. Three large products remain, as many as in a convolution. One head of a few images at a time stays in a
CPU's caches from one product to the next, and each product reads it in the order of writing. In float32, inference
takes all heads of a few images instead, whose product with W is faster.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sa_zoo.fast.portions import divided, heads_fill_caches, portions
from sa_zoo.fast.product import attended
from sa_zoo.fast.situation import Situation
from sa_zoo.models.attention import Attention
from sa_zoo.models.norm import bias_of, is_plain
from sa_zoo.models.positions import at_least_float32


def can_recompute(layer: Attention, X: Tensor, now: Situation) -> bool:
    """Whether all terms are positional, W_val is plain, and their heads do not fit caches."""
    return (
        heads_fill_caches(X, now)
        and is_plain(layer.W_val)
        and all(term.positional for term in layer.terms)
        and now.ordinary
    )


def recomputed(layer: Attention, X: Tensor, now: Situation) -> Tensor:
    """Eq. 10 for positional terms: (B, H, W, D) -> (B, H, W, D)"""
    factors = (
        layer.axis_probabilities(X)
        if layer.axes_pay((X.shape[1], X.shape[2]))
        else [layer.attn_drop(layer.probabilities(X))]
    )
    return of_factors(layer.W_val, factors, X, now)


def of_factors(W_val: nn.Linear, factors: list[Tensor], X: Tensor, now: Situation) -> Tensor:
    """sum_h P_h X W_h + b for the factors of P: (B, H, W, D) -> (B, H, W, D)"""
    nothing = X.new_empty(0, 0)
    dtype = (nothing @ nothing).dtype  # autocast's, or that of X
    if dtype.itemsize > 2 and not now.trains:
        some = partial(attended, W_val, factors)
        return divided(some, now, W_val.parameters(), X, heads=len(factors[0]))
    others = (x.to(dtype) for x in (W_val.weight, bias_of(W_val), *factors))
    return ProjectedHeads.apply(X, *others)


class ProjectedHeads(torch.autograd.Function):
    """concat_h[P_h X] W^T + b in the type of W; only the arguments are kept.

    X (B, *N, D), W (N_out, N_h D), b (N_out,), the factors of P -> (B, *N, N_out). There is one factor (N_h, N, N) per
    axis of X, or per group of flattened axes.
    """

    @staticmethod
    def forward(ctx: Any, X: Tensor, W: Tensor, b: Tensor, *factors: Tensor) -> Tensor:
        ctx.save_for_backward(X, W, *factors)
        Y = b.expand(*X.shape[:-1], -1).clone()
        for some, Y_some in portions(X, Y):
            some = some.to(W.dtype)
            rows = Y_some.flatten(0, -2)  # (pixels, N_out)
            for W_h, *P_h in by_head(W, *factors):
                torch.addmm(rows, mixed(P_h, some)[0], W_h.T, out=rows)
        return Y

    @staticmethod
    def backward(ctx: Any, dY: Tensor) -> tuple[Tensor, ...]:
        X, W, *factors = ctx.saved_tensors
        dX, dW, *dP = (torch.zeros_like(at_least_float32(x)) for x in (X, W, *factors))
        for some, dY_some, dX_some in portions(X, dY, dX):
            some = some.to(W.dtype)
            rows = dY_some.flatten(0, -2)  # (pixels, N_out)
            for (W_h, *P_h), (dW_h, *dP_h) in zip(
                by_head(W, *factors), by_head(dW, *dP), strict=True
            ):
                head, inputs = mixed(P_h, some)
                dW_h += rows.T @ head
                G = rows @ W_h
                for P, lines, dP_axis in reversed([*zip(P_h, inputs, dP_h, strict=True)]):
                    G = G.view_as(lines)
                    dP_axis += (G @ lines.mT).sum(0)
                    G = times(P.T, G)
                dX_some += G.view_as(some)
        return dX, dW, dY.flatten(0, -2).sum(0), *dP


def by_head(W: Tensor, *factors: Tensor) -> Iterator[list[Tensor]]:
    """W_h (N_out, D) and the factors of P_h, (N, N) each, of each head."""
    W_h = W.unflatten(1, [len(factors[0]), -1]).movedim(1, 0)
    return ([x[h] for x in (W_h, *factors)] for h in range(len(W_h)))


def mixed(P_h: list[Tensor], X: Tensor) -> tuple[Tensor, list[Tensor]]:
    """P_h X (pixels, D), and the operand of each factor: the lines (.., N, ..) along its axis."""
    inputs = []
    heads = X
    before = len(X)
    for P in P_h:
        inputs.append(heads.reshape(before, len(P), -1))
        heads = times(P, inputs[-1])
        before *= len(P)
    return heads.view(-1, X.shape[-1]), inputs


def times(P: Tensor, lines: Tensor) -> Tensor:
    """P (Q, N) times (.., N, ..), without the copy made by `@`."""
    return torch.bmm(P.expand(len(lines), -1, -1), lines)
