"""Multi-head self-attention over pixels whose scores are a sum of terms.

After Cordonnier, Loukas, Jaggi, "On the Relationship between Self-Attention and Convolutional Layers"
(ICLR 2020, https://arxiv.org/abs/1911.03584). Every head sees all D channels, as in the paper's experiments:

    SelfAttention(X)_h = softmax(A_h) X                                              (Eq. 1, W_val of Eq. 3 below)
    MHSA(X) = concat_h[SelfAttention(X)_h] W_val W_out                               (Eq. 3)
    A = X W_qry W_key^T X^T + X W_qry What_key r_delta + u^T W_key X^T + v^T What_key r_delta    (Eq. 8)

and A is whatever the terms of a model (terms.py) add up to.

Legend, here and in every file of this folder:

    B     images in a batch                 q, k    query and key pixel
    H, W  height and width, in pixels       delta   k - q, displacement (row, column)
    T     H * W, pixels                     Delta   centre of attention of a head, a displacement
    N_h   number of heads                   alpha   sharpness of a head; alpha = spread^2 / 2
    D     channels (D_in = D_out = D)       r_delta relative positional encoding of delta
    D_h   query and key channels of a head  D_p     channels of r_delta

If every term is a sum of one score an axis, the softmax factorises, P[q, k] = P_down[y, y'] P_across[x, x'], and
T x T probabilities need never be built.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.functional import threshold

from .positions import wide

# Up to this many pixels one dense product with T x T probabilities beats two products with their factors
# (16x16 on two Xeon cores: 0.8x the time in bfloat16, equal in float32; more pixels favour the factors).
DENSE_PIXELS = 256


def probabilities_from(scores: Tensor) -> Tensor:
    """softmax over the last axis (Eq. 1), in at least float32, without what vanishes beside the rounding of the rest.

    Far from Delta a quadratic head gives denormal numbers, which add nothing, and with which a CPU's products take
    several times as long.
    """
    P = torch.softmax(wide(scores), dim=-1)
    return threshold(P, 1e-32 if P.dtype == torch.float64 else 1e-14, 0.0)  # the roundings, squared


def attend(P: Tensor, X: Tensor) -> Tensor:
    """concat_h[P_h X], explicitly: (N_h, T, T) or (B, N_h, T, T), and (B, H, W, D) -> (B, H, W, N_h D)"""
    P = P.to(X.dtype).transpose(-3, -2).flatten(-3, -2)  # (T N_h, T): the product comes out with its heads in place
    return (P @ X.flatten(1, 2)).reshape(X.shape[0], X.shape[1], X.shape[2], -1)


def attend_by_axes(P_down: Tensor, P_across: Tensor, X: Tensor) -> Tensor:
    """concat_h[P_h X] for P_h = P_down (x) P_across: (N_h, H, H), (N_h, W, W), (B, H, W, D) -> (B, H, W, N_h D)

    Exact, O(T (H + W)) where the explicit form costs O(T^2).
    """
    mixed = torch.einsum("hjl,bkld->bkjhd", P_across.to(X.dtype), X)
    return torch.einsum("hik,bkjhd->bijhd", P_down.to(X.dtype), mixed).flatten(3)


class Attention(nn.Module):
    """MHSA (Eq. 3) with A a sum of `terms`.

    W_val: Linear(N_h D, D), all heads' value matrices side by side; W_out: Linear(D, D), the dense layer that the
    paper's code adds behind them.

    Args:
        terms: classes of score terms, each called as term(dim, num_heads, grid).
        grid: (H, W) of the images expected. Learned encodings fit it alone; other terms take any size, and the
            grid only decides, once, which of two equal evaluations is the cheaper one.
        attn_drop: dropout on probabilities. Position-only probabilities are shared by the batch, and so is
            their dropout, as in the paper's code; it does not factorise by axes.
    """

    by_axes: Final[bool]

    def __init__(
        self,
        dim: int,
        num_heads: int,
        terms: Sequence[type[nn.Module]],
        grid: tuple[int, int],
        attn_drop: float = 0.0,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        self.terms = nn.ModuleList(term(dim, num_heads, grid, device=device, dtype=dtype) for term in terms)
        separable = all(hasattr(term, "axis_scores") for term in self.terms)
        self.by_axes = separable and grid[0] * grid[1] > DENSE_PIXELS
        self.attn_drop = nn.Dropout(attn_drop)
        self.W_val = nn.Linear(num_heads * dim, dim, device=device, dtype=dtype)
        self.W_out = nn.Linear(dim, dim, device=device, dtype=dtype)

    def probabilities(self, X: Tensor) -> Tensor:
        """Attention maps: (B, H, W, D) -> (N_h, T, T) if no term looks at X, else (B, N_h, T, T); float32 or wider."""
        scores = self.terms[0](X)
        for term in self.terms[1:]:
            scores = scores + term(X)
        return probabilities_from(scores)

    def axis_probabilities(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """The factors of `probabilities`, (N_h, H, H) and (N_h, W, W), for separable terms."""
        down, across = self.terms[0].axis_scores(X.shape[1], X.shape[2])
        for term in self.terms[1:]:
            more_down, more_across = term.axis_scores(X.shape[1], X.shape[2])
            down, across = down + more_down, across + more_across
        return probabilities_from(down), probabilities_from(across)

    def forward(self, X: Tensor) -> Tensor:
        """(B, H, W, D) -> (B, H, W, D)"""
        if self.by_axes and not (self.training and self.attn_drop.p > 0.0):
            P_down, P_across = self.axis_probabilities(X)
            heads = attend_by_axes(P_down, P_across, X)
        else:
            heads = attend(self.attn_drop(self.probabilities(X)), X)
        return self.W_out(self.W_val(heads))
