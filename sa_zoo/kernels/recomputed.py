"""Heads that depend on positions only, a few images at a time, with a backward pass that builds them again.

    Y = b + sum_h P_h X W_h^T (Eq. 10);  with G_h = dY W_h:  dW_h = dY^T P_h X,  dX = sum_h P_h^T G_h,  dP_h = G_h X^T

P_h X of all heads is N_h times as large as X, but costs little next to the products with W. So it is not kept but built
again for dW, and autograd takes G through it. What remains are three large products, as many as a convolution has.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from sa_zoo.kernels.portions import images_in, in_portions, is_large
from sa_zoo.kernels.situation import Situation
from sa_zoo.models.attention import AXES_FROM, Attention, attend_by_axes
from sa_zoo.models.positions import at_least_float32

# Numbers in the images whose heads are built together: two of 16x16 pixels and 400 channels.
HEADS = 2 * 16 * 16 * 400


def factorizes(layer: Attention) -> bool:
    """Whether softmax(A) is a product of one factor per axis."""
    return layer.separable and not layer.drops()


def axes_pay(layer: Attention, X: Tensor) -> bool:
    """Whether P factorizes, and mixing by its factors is faster."""
    return factorizes(layer) and X.shape[1] * X.shape[2] > AXES_FROM


def can_recompute(layer: Attention, X: Tensor, now: Situation) -> bool:
    """Whether no term looks at X, W_val is a plain layer, and recomputing pays: on GPUs, in training only."""
    positional = all(term.positional for term in layer.terms)
    plain = type(layer.W_val) is nn.Linear and layer.W_val.bias is not None
    eager = now.ordinary and not now.compiling
    pays = is_large(X) if now.trains else now.on_cpu
    return positional and plain and eager and pays


def recomputed(layer: Attention, X: Tensor, now: Situation) -> Tensor:
    """The layer for terms that depend on positions only: (B, H, W, D) -> (B, H, W, D)"""
    weights = (layer.W_val.weight, layer.W_val.bias)
    if axes_pay(layer, X):
        return ProjectedHeads.apply(now.dtype, X, *weights, *layer.axis_probabilities(X))
    P = layer.attn_drop(layer.probabilities(X))
    return ProjectedHeads.apply(now.dtype, X.flatten(1, 2), *weights, P).unflatten(1, X.shape[1:3])


class ProjectedHeads(torch.autograd.Function):
    """concat_h[P_h X] W^T + b, computed in `dtype`, of which only the arguments are kept.

    X (B, *N, D), W (N_out, N_h D), b (N_out,), the factors of P, one (N_h, Q, N) per axis -> (B, *Q, N_out)
    """

    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, X: Tensor, W: Tensor, b: Tensor, *factors: Tensor
    ) -> Tensor:
        ctx.save_for_backward(X, W, b, *factors)
        ctx.dtype = dtype
        W = W.to(dtype)
        b = b.to(dtype)
        return in_portions(
            lambda some: linear(attend_by_axes([*factors], some.to(dtype)), W, b), X, numbers=HEADS
        )

    @staticmethod
    def backward(ctx: Any, dY: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return None, *differentiable_gradients(ctx, dY)
        X, W, _, *factors = ctx.saved_tensors
        half_W = W.to(ctx.dtype)
        dX = torch.empty_like(X)
        dW = torch.zeros_like(at_least_float32(W))
        db = at_least_float32(dY).flatten(0, -2).sum(0)
        # Leaves of small graphs, in which the gradients of all portions add up.
        factors = [P.detach().requires_grad_() for P in factors]
        images = images_in(HEADS, X)
        for some, dY_some, dX_some in zip(*(x.split(images) for x in (X, dY, dX)), strict=True):
            some = some.detach().requires_grad_()
            with torch.enable_grad():
                heads = attend_by_axes(factors, some.to(ctx.dtype))
            rows = dY_some.flatten(0, -2)  # (pixels, N_out)
            dW += at_least_float32(rows.T @ heads.detach().flatten(0, -2))
            heads.backward((rows @ half_W).view_as(heads))
            dX_some.copy_(some.grad)
        return None, dX, dW, db, *[P.grad for P in factors]


def differentiable_gradients(ctx: Any, dY: Tensor) -> list[Tensor | None]:
    """Gradients of all tensors that `ctx` holds, where they are to be differentiated again."""
    # Views, so that no gradient is followed to what a tensor was made of, which may be another of them.
    given = [x.view_as(x) for x in ctx.saved_tensors]
    X, W, b, *factors = (x.to(ctx.dtype) for x in given)
    wanted = [x for x in given if x.requires_grad]
    Y = linear(attend_by_axes(factors, X), W, b)
    found = iter(torch.autograd.grad(Y, wanted, dY, create_graph=True))
    return [next(found) if x.requires_grad else None for x in given]
