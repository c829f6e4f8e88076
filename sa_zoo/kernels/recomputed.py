"""Heads that depend on positions only, one at a time, with a backward pass that builds them again.

    Y = b + sum_h P_h X W_h^T (Eq. 10);  with G_h = dY W_h:  dW_h = dY^T P_h X,  dX = sum_h P_h^T G_h,  dP_h = G_h X^T

P_h X of all heads is N_h times as large as X, but costs little next to the products with W. So it is not kept but built
again for dW. What remains are three large products, as many as a convolution has. One head of a few images at a time
stays in a CPU's caches from one product to the next, and each product reads it in the order in which it was written.
"""

from typing import Any

import torch
from torch import Tensor, nn

from sa_zoo.kernels.portions import is_large, portions
from sa_zoo.kernels.situation import Situation
from sa_zoo.models.attention import AXES_FROM, Attention
from sa_zoo.models.positions import at_least_float32


def factorizes(layer: Attention) -> bool:
    """Whether softmax(A) is a product of one factor per axis."""
    return layer.separable and not layer.drops()


def axes_pay(layer: Attention, X: Tensor, pixels: int = AXES_FROM) -> bool:
    """Whether P factorizes, and mixing by its factors is faster, as X has more than so many pixels."""
    return factorizes(layer) and X.shape[1] * X.shape[2] > pixels


def can_recompute(layer: Attention, X: Tensor, now: Situation) -> bool:
    """Whether no term looks at X, W_val is a plain layer, and recomputing pays: on GPUs, in training only."""
    positional = all(term.positional for term in layer.terms)
    plain = type(layer.W_val) is nn.Linear and layer.W_val.bias is not None
    eager = now.ordinary and not now.compiling
    pays = is_large(X) if now.trains else now.on_cpu
    return positional and plain and eager and pays


def recomputed(layer: Attention, X: Tensor, now: Situation) -> Tensor:
    """The layer for terms that depend on positions only: (B, H, W, D) -> (B, H, W, D)"""
    if axes_pay(layer, X):
        pixels = X
        factors = layer.axis_probabilities(X)
    else:
        pixels = X.flatten(1, 2)
        factors = [layer.attn_drop(layer.probabilities(X))]
    others = (x.to(now.dtype) for x in (layer.W_val.weight, layer.W_val.bias, *factors))
    return ProjectedHeads.apply(pixels, *others).view_as(X)


class ProjectedHeads(torch.autograd.Function):
    """concat_h[P_h X] W^T + b in the type of W, of which only the arguments are kept.

    X (B, *N, D), W (N_out, N_h D), b (N_out,), the factors of P, one (N_h, N, N) per axis -> (B, *N, N_out)
    """

    @staticmethod
    def forward(ctx: Any, X: Tensor, W: Tensor, b: Tensor, *factors: Tensor) -> Tensor:
        ctx.save_for_backward(X, W, *factors)
        heads = by_head(W, *factors)
        Y = b.expand(*X.shape[:-1], -1).clone()
        for some, Y_some in portions(X, Y):
            some = some.to(W.dtype)
            for W_h, *P_h in heads:
                *_, head = mixed(P_h, some)
                Y_some.flatten(0, -2).addmm_(head.flatten(0, -2), W_h.T)
        return Y

    @staticmethod
    def backward(ctx: Any, dY: Tensor) -> tuple[Tensor, ...]:
        X, W, *factors = ctx.saved_tensors
        heads = by_head(W, *factors)
        dX, dW, *dP = (torch.zeros_like(at_least_float32(x)) for x in (X, W, *factors))
        dW_h = dW.unflatten(1, [len(heads), -1]).movedim(1, 0)
        for some, dY_some, dX_some in portions(X, dY, dX):
            some = some.to(W.dtype)
            rows = dY_some.flatten(0, -2)  # (pixels, N_out)
            for h, (W_h, *P_h) in enumerate(heads):
                *before, head = mixed(P_h, some)
                dW_h[h] += rows.T @ head.flatten(0, -2)
                G = (rows @ W_h).view_as(head)
                for axis in reversed(range(len(P_h))):
                    dP[axis][h] += (lines(G, axis) @ lines(before[axis], axis).mT).sum(0)
                    G = along(axis, P_h[axis].T, G)
                dX_some += G
        return dX, dW, at_least_float32(dY).flatten(0, -2).sum(0), *dP


def by_head(W: Tensor, *factors: Tensor) -> list[tuple[Tensor, ...]]:
    """W_h (N_out, D) and the factors of P_h, (N, N) per axis, of each head."""
    W_h = W.unflatten(1, [len(factors[0]), -1]).movedim(1, 0)
    return list(zip(W_h, *factors, strict=True))


def mixed(P_h: list[Tensor], X: Tensor) -> list[Tensor]:
    """X (B, *N, D) by the factors of no axis, of the first, of the first two, ..., of all: P_h X comes last."""
    found = [X]
    for axis, P in enumerate(P_h):
        found.append(along(axis, P, found[-1]))
    return found


def along(axis: int, P: Tensor, X: Tensor) -> Tensor:
    """P (N, N) X along one axis of X (B, *N, D)"""
    X_lines = lines(X, axis)
    return torch.bmm(P.expand(len(X_lines), -1, -1), X_lines).view_as(X)  # `@` would copy X


def lines(X: Tensor, axis: int) -> Tensor:
    """The lines of X (B, *N, D) along one axis: (axes before, N, axes after and D)"""
    return X.flatten(0, axis).flatten(2)
