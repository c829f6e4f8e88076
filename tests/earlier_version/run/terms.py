"""Terms of attention scores that know positions alone (Eq. 9 and Section 4.1 of the paper). Legend: attention.py.

A term is a module made by term(dim, num_heads, grid). Its forward is its definition, from X (B, H, W, D) to scores
(N_h, T, T), or (B, N_h, T, T) if it looks at X (content_terms.py). Beyond that, a term has

* `axis_scores` if it is a sum of one score an axis;
* `set_grid` if it holds learned encodings made for one grid of (H, W) pixels, to interpolate them to another.
"""

import torch
from torch import Tensor, nn

from .positions import (
    generalized_quadratic_scores,
    learned_axis_scores,
    outer_sum,
    quadratic_axis_scores,
    resized_table,
)


class Quadratic(nn.Module):
    """-1/2 s_h^2 |delta - Delta_h|^2: quadratic encoding (Eq. 9), isotropic. Delta: (N_h, 2), spread: (N_h,)."""

    def __init__(self, dim: int, num_heads: int, grid: tuple[int, int], device=None, dtype=None) -> None:
        super().__init__()
        self.Delta = nn.Parameter(torch.empty(num_heads, 2, device=device, dtype=dtype))
        self.spread = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.Delta, std=2.0)
        nn.init.normal_(self.spread, mean=1.0, std=0.01)

    def axis_scores(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Scores (N_h, H, H) down the rows and (N_h, W, W) across the columns."""
        down = quadratic_axis_scores(self.Delta[:, 0], self.spread, height)
        across = quadratic_axis_scores(self.Delta[:, 1], self.spread, width)
        return down, across

    def forward(self, X: Tensor) -> Tensor:
        """(N_h, T, T)"""
        down, across = self.axis_scores(X.shape[1], X.shape[2])
        return outer_sum(down, across)


class GeneralizedQuadratic(nn.Module):
    """-1/2 (delta - Delta_h)^T S_h S_h^T (delta - Delta_h): any covariance (Section 4.1). spread: S, (N_h, 2, 2)."""

    def __init__(self, dim: int, num_heads: int, grid: tuple[int, int], device=None, dtype=None) -> None:
        super().__init__()
        self.Delta = nn.Parameter(torch.empty(num_heads, 2, device=device, dtype=dtype))
        self.spread = nn.Parameter(torch.empty(num_heads, 2, 2, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.Delta, std=2.0)
        nn.init.normal_(self.spread, std=0.01)
        with torch.no_grad():
            self.spread.add_(torch.eye(2, device=self.spread.device, dtype=self.spread.dtype))

    def forward(self, X: Tensor) -> Tensor:
        """(N_h, T, T)"""
        return generalized_quadratic_scores(self.Delta, self.spread, X.shape[1], X.shape[2])


class RelativeTables(nn.Module):
    """Learned encodings of the displacements along each axis. row: (2 W - 1, D_row), col: (2 H - 1, D_col)."""

    def __init__(self, dim_row: int, dim_col: int, grid: tuple[int, int], device=None, dtype=None) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.empty(2 * grid[1] - 1, dim_row, device=device, dtype=dtype))
        self.col = nn.Parameter(torch.empty(2 * grid[0] - 1, dim_col, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.row)
        nn.init.normal_(self.col)

    @torch.jit.ignore
    def set_grid(self, grid: tuple[int, int]) -> None:
        """Interpolate the tables to a grid of (H, W) pixels."""
        self.row = nn.Parameter(resized_table(self.row.detach(), grid[1]))
        self.col = nn.Parameter(resized_table(self.col.detach(), grid[0]))


class Learned(RelativeTables):
    """row[dx] . w_h + col[dy] . v_h: learned relative encoding, the last term of Eq. 8 with one vector an axis.

    D_row = D_col = D; w and v: (N_h, D).
    """

    def __init__(self, dim: int, num_heads: int, grid: tuple[int, int], device=None, dtype=None) -> None:
        super().__init__(dim, dim, grid, device=device, dtype=dtype)
        self.w = nn.Parameter(torch.empty(num_heads, dim, device=device, dtype=dtype))
        self.v = nn.Parameter(torch.empty(num_heads, dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        bound = self.w.shape[1] ** -0.5  # as nn.Linear(D, N_h, bias=False)
        nn.init.uniform_(self.w, -bound, bound)
        nn.init.uniform_(self.v, -bound, bound)

    def axis_scores(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Scores (N_h, H, H) down the rows and (N_h, W, W) across the columns."""
        down = learned_axis_scores(self.col, self.v, height)
        across = learned_axis_scores(self.row, self.w, width)
        return down, across

    def forward(self, X: Tensor) -> Tensor:
        """(N_h, T, T)"""
        down, across = self.axis_scores(X.shape[1], X.shape[2])
        return outer_sum(down, across)
