"""Multi-head self-attention over pixels: the definition, and an exact, cheaper form by axes.

After Cordonnier, Loukas, Jaggi, "On the Relationship between Self-Attention and Convolutional Layers"
(ICLR 2020, https://arxiv.org/abs/1911.03584). Every head sees all D channels, as in the paper's experiments:

    Self-Attention_h(X) = softmax(A_h) X W_val_h                                   (Eq. 1)
    MHSA(X) = concat_h[Self-Attention_h(X)] W_out + b_out                          (Eq. 4)
            = b_out + sum_h softmax(A_h) X W_h,  W_h = W_val_h W_out_h             (Eq. 10)
    A = X W_qry W_key^T X^T + X W_qry What_key r_delta + u^T W_key X^T + v^T What_key r_delta    (Eq. 8)

A is the sum of a model's score terms (terms.py). `W_val` holds the merged matrices W_h of Eq. 10 for all heads; `W_out`
is one more linear layer after them, as in the paper's code.

Legend, here and in the whole package:

    B     images in a batch                 q, k     query and key pixel; Q, N: how many (T and T here)
    H, W  height and width, in pixels       delta    k - q, displacement (row, column)
    T     H * W, number of pixels           Delta    center of attention of a head, a displacement
    N_h   number of heads                   alpha    sharpness of a head; alpha = spread^2 / 2
    D     channels (D_in = D_out = D)       r_delta  relative positional encoding of delta, D_p channels
    D_h   query and key channels per head   P        probabilities, softmax(A)
"""

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.nn.functional import hardshrink

from .layout import Grid
from .linear import as_one_map
from .positions import at_least_float32
from .terms import Terms

# The factors of P by axis are never faster than P up to the first number of pixels, and always above the second.
AXES_FROM = 128
AXES_ALWAYS_FROM = 256


def total(scores: list[Tensor]) -> Tensor:
    """Their sum; TorchScript has no `sum` of tensors."""
    A = scores[0]
    for more in scores[1:]:
        A = A + more
    return A


def probabilities_from(scores: Tensor) -> Tensor:
    """softmax over the last axis (Eq. 1), in at least float32; negligible values are 0: denormals slow CPUs down."""
    P = torch.softmax(at_least_float32(scores), dim=-1)
    negligible = 1e-20 if P.dtype == torch.float64 else 1e-11  # 1e-4 of the type's rounding error
    return hardshrink(P, negligible)


def as_multiplied(x: Tensor) -> Tensor:
    """x in the type of its products, which is a narrower one under autocast."""
    nothing = x.new_empty(0, 0)
    return x.to((nothing @ nothing).dtype)


class CastForImages(torch.autograd.Function):
    """P in another type, for each of B images: (Q, N) -> (B, Q, N); their gradients are added up in the type of P."""

    generate_vmap_rule = True

    @staticmethod
    def forward(P: Tensor, B: int, dtype: torch.dtype) -> Tensor:
        return P.to(dtype).expand(B, -1, -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, dP: Tensor) -> tuple[Tensor | None, ...]:
        return dP.sum(0, dtype=ctx.dtype), None, None


def for_images(P: Tensor, X: Tensor) -> Tensor:
    """P in the type of X, for each image, without a copy of it per image: (Q, N), (B, ..) -> (B, Q, N)"""
    if not torch.jit.is_scripting():  # noqa: SIM102  TorchScript compiles both sides of `and`
        if P.dtype != X.dtype and P.requires_grad and torch.is_grad_enabled():  # noqa: SIM102
            # torch.compile takes no function with a forward derivative of its own
            if torch.compiler.is_compiling() or unpack_dual(P).tangent is None:
                cast: Tensor = CastForImages.apply(P, X.shape[0], X.dtype)
                return cast
    return P.to(X.dtype).expand(X.shape[0], -1, -1)


def attend(P: Tensor, X: Tensor) -> Tensor:
    """concat_h[P_h X]: (N_h, Q, N) or (B, N_h, Q, N), and (B, N, D) -> (B, Q, N_h D)"""
    X = as_multiplied(X)
    P = P.transpose(-3, -2)  # (.., Q, N_h, N)
    rows = P.flatten(-3, -2)
    # A P that images share is expanded, as training would else copy X.
    rows = for_images(rows, X) if rows.dim() == 2 else rows.to(X.dtype)
    heads = rows @ X  # (B, Q N_h, D)
    return heads.unflatten(1, [P.shape[-3], P.shape[-2]]).flatten(2)  # (B, Q, N_h D)


def attend_by_axes(factors: list[Tensor], X: Tensor) -> Tensor:
    """concat_h[P_h X] where P_h is a product of one factor per axis: n x (N_h, Q, N), (B, *N, D) -> (B, *Q, N_h D)

    Exact, and O(T (H + W)) in two dimensions, where `attend` is O(T^2).
    """
    X = as_multiplied(X)
    first = factors[0].transpose(0, 1)  # (Q, N_h, N)
    heads = for_images(first.flatten(0, 1), X) @ X.flatten(2)  # (B, Q N_h, the other axes and D)
    heads = heads.unflatten(1, [first.shape[0], first.shape[1]])  # (B, Q, N_h, ..)
    for P in factors[1:]:
        keys = heads.unflatten(-1, [P.shape[2], -1])  # (B, *Q so far, N_h, N, ..)
        heads = (P.to(X.dtype) @ keys).transpose(-3, -2)  # (B, *Q so far, Q, N_h, ..)
    return heads.flatten(-2)  # (B, *Q, N_h D)


class Attention(nn.Module):
    """MHSA (Eq. 10) with A a sum of `terms`, followed by W_out.

    Args:
        dim, dim_out: D_in and D_out; by default the same.
        terms: classes of score terms (terms.py).
        grid: (H, W) of the expected images. Learned encodings fit this size only; other terms take any size.
        W_out: the class of the layer after W_val: linear, BatchNorm (as after a CNN's convolutions) or Identity.
        attn_drop: dropout on probabilities; where they depend on positions only, the batch shares them and their
            dropout, as in the paper's code.
    """

    separable: Final[bool]

    def __init__(
        self,
        dim: int,
        num_heads: int,
        terms: Terms,
        grid: Grid,
        dim_out: int | None = None,
        W_out: type[nn.Module] = nn.Linear,
        attn_drop: float = 0.0,
        **dd: Any,
    ) -> None:
        super().__init__()
        dim_out = dim_out or dim
        self.terms: Any = nn.ModuleList(term(dim, num_heads, grid, **dd) for term in terms)
        self.separable = all(term.separable for term in self.terms)
        self.grid = grid
        self.num_heads = num_heads
        # With fewer channels than pixels, mixing by P costs more than W_val.
        self.axes_from = max(AXES_FROM, min(dim, AXES_ALWAYS_FROM))
        self.attn_drop = nn.Dropout(attn_drop)
        self.W_val = nn.Linear(num_heads * dim, dim_out, **dd)
        sizes = (dim_out, dim_out) if W_out is nn.Linear else (dim_out,)
        self.W_out = W_out(*sizes, **dd)

    def probabilities(self, X: Tensor) -> Tensor:
        """softmax(A): (B, H, W, D) -> (N_h, T, T) if all terms are positional, else (B, N_h, T, T), at least float32"""
        scores: list[Tensor] = []
        for term in self.terms:
            scores.append(term(X))
        return probabilities_from(total(scores))

    def axis_probabilities(self, X: Tensor) -> list[Tensor]:
        """The factors of `probabilities`, (N_h, H, H) and (N_h, W, W), if all terms are separable."""
        down: list[Tensor] = []
        across: list[Tensor] = []
        for term in self.terms:
            scores = term.axis_scores(X.shape[1], X.shape[2])
            down.append(scores[0])
            across.append(scores[1])
        return [probabilities_from(total(down)), probabilities_from(total(across))]

    def drops(self) -> bool:
        """Whether P has dropout; P then does not factorize."""
        return self.training and self.attn_drop.p > 0.0

    def factorizes(self) -> bool:
        """Whether P, with its dropout, is a product of one factor per axis."""
        return self.separable and not self.drops()

    def axes_pay(self) -> bool:
        """Whether the factors of P are faster than P for the expected images, on a CPU."""
        return self.factorizes() and self.grid[0] * self.grid[1] > self.axes_from

    def values(self, P: Tensor, X: Tensor) -> Tensor:
        """sum_h P_h X W_h + b (Eq. 10): (N_h, T, T) or (B, N_h, T, T), and (B, H, W, D) -> (B, H, W, D)"""
        heads = attend(P, X.flatten(1, 2))  # (B, T, N_h D)
        Y = self.W_val(heads)  # (B, T, D)
        return Y.reshape(X.shape[0], X.shape[1], X.shape[2], Y.shape[2])

    def definition(self, X: Tensor) -> Tensor:
        """Eq. 10 as written: (B, H, W, D) -> (B, H, W, D)"""
        return self.values(self.attn_drop(self.probabilities(X)), X)

    def by_axes(self, X: Tensor) -> Tensor:
        """Eq. 10 for separable terms, where softmax(A) = P_down (x) P_across: (B, H, W, D) -> (B, H, W, D)"""
        return self.W_val(attend_by_axes(self.axis_probabilities(X), X))

    def cheaper(self, X: Tensor) -> Tensor:
        """Eq. 10 in the cheaper of the two forms: (B, H, W, D) -> (B, H, W, D)"""
        # TorchScript compiles the first form only for layers that have it.
        if self.separable and self.axes_pay():
            return self.by_axes(X)
        return self.definition(X)

    # fast/route.py replaces this method and `fuse`.
    evaluate = cheaper

    def forward(self, X: Tensor) -> Tensor:
        """(B, H, W, D) -> (B, H, W, D)"""
        return self.W_out(self.evaluate(X))

    def set_grid(self, grid: Grid) -> None:
        """Expect images of (H, W) pixels; learned encodings of another grid are interpolated."""
        if grid != self.grid:
            for term in self.terms:
                if not term.any_grid:
                    term.set_grid(grid)
        self.grid = grid

    @torch.no_grad()
    def fold(self) -> "Attention":
        """Fold W_out into W_val, in place: nothing lies between them."""
        weight, bias = as_one_map(self.W_val, self.W_out)
        if not isinstance(self.W_out, nn.Identity):
            self.W_val.weight.copy_(weight)
            self.W_val.bias.copy_(bias)
            self.W_out = nn.Identity()
        return self

    # timm.utils.reparameterize_model replaces the layer by the result.
    fuse = fold
