"""The score terms that depend on the content of pixels (Eqs. 2, 7 and 8). Legend: attention.py."""

from typing import Any

import torch
from torch import Tensor, nn

from .layout import Grid
from .positions import displacement_scores, resized_grid
from .terms import PEAK, RelativeTables, Term


class Content(RelativeTables):
    """(q . k + q . r_delta) / sqrt(D_h), D_h = D: the paper's "learned + content": Eq. 8 with q's bias as u and v.

    r_delta = concat(row[dx], col[dy]) is shared by the heads, D_row + D_col = D; W_qry, W_key: (N_h D, D).
    """

    def __init__(self, dim: int, num_heads: int, grid: Grid, **dd: Any) -> None:
        super().__init__(dim // 2, dim - dim // 2, grid, **dd)
        self.num_heads = num_heads
        self.W_qry = nn.Linear(dim, num_heads * dim, **dd)
        self.W_key = nn.Linear(dim, num_heads * dim, **dd)
        self.reset_parameters()

    @torch.no_grad()
    def start_as_kernel(self) -> None:
        """Keys start at zero; the query's bias, at its head's pixel."""
        bias = self.W_qry.bias
        for parameter in (self.row, self.col, bias, self.W_key.weight, self.W_key.bias):
            nn.init.zeros_(parameter)
        of_heads = bias.unflatten(0, [self.num_heads, -1])
        x, y = of_heads.split([self.row.shape[1], self.col.shape[1]], dim=1)
        self.write_peaks(x, y, PEAK * of_heads.shape[1] ** 0.5)

    def forward(self, X: Tensor) -> Tensor:
        """(B, N_h, T, T)"""
        query = split_heads(self.W_qry(X), self.num_heads) * X.shape[-1] ** -0.5
        key = split_heads(self.W_key(X), self.num_heads)
        query_x, query_y = query.split([self.row.shape[1], self.col.shape[1]], dim=-1)
        position = displacement_scores(query_x, query_y, self.row[:, None, :], self.col[:, None, :])
        return dot_scores(query, key) + position


class Relative(RelativeTables):
    """All four terms of Eq. 8 over sqrt(D_h), with D_h = D_p = D and r_delta = concat(row[dx], col[dy]) learned.

    W_qry, W_key and W_key_pos (the paper's What_key): (N_h D, D); u, v: (N_h, D).
    """

    positional_parameters = ("row", "col", "u", "v")

    def __init__(self, dim: int, num_heads: int, grid: Grid, **dd: Any) -> None:
        super().__init__(dim // 2, dim - dim // 2, grid, **dd)
        self.num_heads = num_heads
        # No biases: u is the query's; the key's would add a constant per query, which softmax ignores.
        self.W_qry = nn.Linear(dim, num_heads * dim, bias=False, **dd)
        self.W_key = nn.Linear(dim, num_heads * dim, bias=False, **dd)
        self.W_key_pos = nn.Linear(dim, num_heads * dim, bias=False, **dd)
        self.u = nn.Parameter(torch.empty(num_heads, dim, **dd))
        self.v = nn.Parameter(torch.empty(num_heads, dim, **dd))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        bound = self.u.shape[1] ** -0.5  # as the bias of nn.Linear(D, N_h D)
        nn.init.uniform_(self.u, -bound, bound)
        nn.init.uniform_(self.v, -bound, bound)

    def forward(self, X: Tensor) -> Tensor:
        """(B, N_h, T, T)"""
        query = split_heads(self.W_qry(X), self.num_heads)
        key = split_heads(self.W_key(X), self.num_heads)
        # What_key r_delta = What_row row[dx] + What_col col[dy], each (2 S - 1, N_h, D_h).
        sizes = [self.row.shape[1], self.col.shape[1]]
        What_row, What_col = self.W_key_pos.weight.split(sizes, dim=1)
        row = (self.row @ What_row.T).unflatten(1, [self.num_heads, -1])
        col = (self.col @ What_col.T).unflatten(1, [self.num_heads, -1])
        # (q + u) . k and (q + v) . What_key r_delta: the four terms, in two pairs.
        scale = X.shape[-1] ** -0.5
        to_content = (query + self.u[:, None, None, :]) * scale
        to_position = (query + self.v[:, None, None, :]) * scale
        return dot_scores(to_content, key) + displacement_scores(to_position, to_position, row, col)


class Absolute(Term):
    """(X + P) W_qry W_key^T (X + P)^T / sqrt(D_h), D_h = D: absolute encoding (Eq. 7). P: (H, W, D), learned."""

    any_grid = False
    positional_parameters = ("P",)

    def __init__(self, dim: int, num_heads: int, grid: Grid, **dd: Any) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.W_qry = nn.Linear(dim, num_heads * dim, **dd)
        self.W_key = nn.Linear(dim, num_heads * dim, **dd)
        self.P = nn.Parameter(torch.empty(*grid, dim, **dd))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.P)

    def resized(self, name: str, value: Tensor, grid: Grid) -> Tensor:
        return resized_grid(value, *grid)

    def forward(self, X: Tensor) -> Tensor:
        """(B, N_h, T, T)"""
        torch._assert(
            X.shape[1:3] == self.P.shape[:2], "image size: not the model's; call set_input_size"
        )
        query = split_heads(self.W_qry(X + self.P), self.num_heads)
        key = split_heads(self.W_key(X + self.P), self.num_heads)
        return dot_scores(query * X.shape[-1] ** -0.5, key)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, H, W, N_h D_h) -> (B, N_h, H, W, D_h)"""
    return x.unflatten(-1, [num_heads, -1]).permute(0, 3, 1, 2, 4)


def dot_scores(query: Tensor, key: Tensor) -> Tensor:
    """q . k for all pairs of pixels: (B, N_h, H, W, D_h), twice -> (B, N_h, T, T)"""
    return query.flatten(2, 3) @ key.flatten(2, 3).transpose(-1, -2)
