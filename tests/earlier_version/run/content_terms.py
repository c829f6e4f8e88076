"""Terms of attention scores that look at pixels (Eqs. 7 and 8). Legend: attention.py; what a term is: terms.py.

Beside its definition, each has the same scores without building queries or keys. They are linear in a query,
q = W_qry x + b_qry, so everything that a query meets, W_key^T and the encodings r_delta, is multiplied by W_qry once
for all images (`matrices`), and a linear map of X is left before the product with X itself (`scores`, which are
(B, T, N_h, T): so the heads of a pixel lie together, as what follows wants them).
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from .positions import add_by_displacement, displacement_scores, resized_grid
from .products import linear, product
from .terms import RelativeTables


class Content(RelativeTables):
    """(q . k + q . r_delta) / sqrt(D_h), D_h = D: the paper's "learned + content", Eq. 8 without u and v.

    r_delta = concat(row[dx], col[dy]) is shared by the heads, D_row + D_col = D; W_qry, W_key: (N_h D, D).
    """

    def __init__(self, dim: int, num_heads: int, grid: tuple[int, int], device=None, dtype=None) -> None:
        super().__init__(dim // 2, dim - dim // 2, grid, device=device, dtype=dtype)
        self.num_heads = num_heads
        self.W_qry = nn.Linear(dim, num_heads * dim, device=device, dtype=dtype)
        self.W_key = nn.Linear(dim, num_heads * dim, device=device, dtype=dtype)
        self.reset_parameters()

    def forward(self, X: Tensor) -> Tensor:
        """(B, N_h, T, T)"""
        query = split_heads(self.W_qry(X), self.num_heads) * X.shape[-1] ** -0.5
        key = split_heads(self.W_key(X), self.num_heads)
        query_x, query_y = query.split([self.row.shape[1], self.col.shape[1]], dim=-1)
        position = displacement_scores(query_x, query_y, self.row[:, None, :], self.col[:, None, :])
        return dot_scores(query, key) + position

    def matrices(self) -> list[Tensor]:
        """What `scores` takes; see `multiplied`."""
        W_qry, b_qry = heads_of(self.W_qry, self.num_heads)
        W_key, b_key = heads_of(self.W_key, self.num_heads)
        row = pad(self.row, (0, self.col.shape[1])).expand(self.num_heads, -1, -1)
        # Every key has the bias of W_key, as every displacement has one dy.
        col = pad(self.col, (self.row.shape[1], 0)) + b_key[:, None, :]
        return multiplied(W_key, b_qry, W_qry) + multiplied(torch.cat([row, col], dim=1).transpose(1, 2), b_qry, W_qry)

    def scores(self, matrices: list[Tensor], X: Tensor) -> Tensor:
        """(B, T, N_h, T)"""
        return scores_of_products(matrices, X)


class Relative(RelativeTables):
    """All four terms of Eq. 8 over sqrt(D_h), with D_h = D_p = D and r_delta = concat(row[dx], col[dy]) learned.

    W_qry, W_key and W_key_pos (the paper's What_key): (N_h D, D); u, v: (N_h, D).
    """

    def __init__(self, dim: int, num_heads: int, grid: tuple[int, int], device=None, dtype=None) -> None:
        super().__init__(dim // 2, dim - dim // 2, grid, device=device, dtype=dtype)
        self.num_heads = num_heads
        # No biases: u is the query's, and the key's would add one score to all keys, which no softmax sees.
        self.W_qry = nn.Linear(dim, num_heads * dim, bias=False, device=device, dtype=dtype)
        self.W_key = nn.Linear(dim, num_heads * dim, bias=False, device=device, dtype=dtype)
        self.W_key_pos = nn.Linear(dim, num_heads * dim, bias=False, device=device, dtype=dtype)
        self.u = nn.Parameter(torch.empty(num_heads, dim, device=device, dtype=dtype))
        self.v = nn.Parameter(torch.empty(num_heads, dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        bound = self.u.shape[1] ** -0.5  # as the bias of nn.Linear(D, N_h D)
        nn.init.uniform_(self.u, -bound, bound)
        nn.init.uniform_(self.v, -bound, bound)

    def forward(self, X: Tensor) -> Tensor:
        """(B, N_h, T, T)"""
        query, key = split_heads(self.W_qry(X), self.num_heads), split_heads(self.W_key(X), self.num_heads)
        # What_key r_delta = What_row row[dx] + What_col col[dy], each (2 S - 1, N_h, D_h).
        What_row, What_col = self.W_key_pos.weight.split([self.row.shape[1], self.col.shape[1]], dim=1)
        row = (self.row @ What_row.T).unflatten(1, [self.num_heads, -1])
        col = (self.col @ What_col.T).unflatten(1, [self.num_heads, -1])
        # (q + u) . k and (q + v) . What_key r_delta: the four terms, two by two.
        scale = X.shape[-1] ** -0.5
        to_content = (query + self.u[:, None, None, :]) * scale
        to_position = (query + self.v[:, None, None, :]) * scale
        return dot_scores(to_content, key) + displacement_scores(to_position, to_position, row, col)

    def matrices(self) -> list[Tensor]:
        """What `scores` takes; see `multiplied`."""
        W_qry, W_key = self.W_qry.weight, self.W_key.weight
        W_qry, W_key = W_qry.unflatten(0, [self.num_heads, -1]), W_key.unflatten(0, [self.num_heads, -1])
        What_key = self.W_key_pos.weight.unflatten(0, [self.num_heads, -1]).transpose(1, 2)  # (N_h, D_p, D_h)
        What_row, What_col = What_key.split([self.row.shape[1], self.col.shape[1]], dim=1)
        position = torch.cat([self.row @ What_row, self.col @ What_col], dim=1).transpose(1, 2)
        return multiplied(W_key, self.u, W_qry) + multiplied(position, self.v, W_qry)

    def scores(self, matrices: list[Tensor], X: Tensor) -> Tensor:
        """(B, T, N_h, T)"""
        return scores_of_products(matrices, X)


class Absolute(nn.Module):
    """(X + P) W_qry W_key^T (X + P)^T / sqrt(D_h), D_h = D: absolute encoding (Eq. 7). P: (H, W, D), learned."""

    def __init__(self, dim: int, num_heads: int, grid: tuple[int, int], device=None, dtype=None) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.W_qry = nn.Linear(dim, num_heads * dim, device=device, dtype=dtype)
        self.W_key = nn.Linear(dim, num_heads * dim, device=device, dtype=dtype)
        self.P = nn.Parameter(torch.empty(*grid, dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.P)

    @torch.jit.ignore
    def set_grid(self, grid: tuple[int, int]) -> None:
        """Interpolate the encoding to a grid of (H, W) pixels."""
        self.P = nn.Parameter(resized_grid(self.P.detach(), *grid))

    def forward(self, X: Tensor) -> Tensor:
        """(B, N_h, T, T)"""
        query = split_heads(self.W_qry(X + self.P), self.num_heads)
        key = split_heads(self.W_key(X + self.P), self.num_heads)
        return dot_scores(query * X.shape[-1] ** -0.5, key)

    def matrices(self) -> list[Tensor]:
        """What `scores` takes; see `multiplied`."""
        W_qry, b_qry = heads_of(self.W_qry, self.num_heads)
        W_key, b_key = heads_of(self.W_key, self.num_heads)
        return multiplied(W_key, b_qry, W_qry) + multiplied(b_key[:, :, None], b_qry, W_qry)

    def scores(self, matrices: list[Tensor], X: Tensor) -> Tensor:
        """(B, T, N_h, T)"""
        content, content_bias, same, same_bias = matrices
        X = X + self.P
        scores = dots(linear(X, content, content_bias), X)
        return scores + linear(X, same, same_bias).flatten(1, 2)[..., None]  # b_key gives all keys the same


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, H, W, N_h D_h) -> (B, N_h, H, W, D_h)"""
    return x.unflatten(-1, [num_heads, -1]).permute(0, 3, 1, 2, 4)


def dot_scores(query: Tensor, key: Tensor) -> Tensor:
    """q . k for all pairs of pixels: (B, N_h, H, W, D_h), twice -> (B, N_h, T, T)"""
    return query.flatten(2, 3) @ key.flatten(2, 3).transpose(-1, -2)


def heads_of(layer: nn.Linear, num_heads: int) -> tuple[Tensor, Tensor]:
    """Weight (N_h, D_h, D) and bias (N_h, D_h) of a projection for all heads."""
    return layer.weight.unflatten(0, [num_heads, -1]), layer.bias.unflatten(0, [num_heads, -1])


def multiplied(met: Tensor, b_qry: Tensor, W_qry: Tensor) -> list[Tensor]:
    """What queries become once they have met something, over sqrt(D_h).

    Args:
        met: (N_h, D_h, F), what each head's queries are multiplied with.
        b_qry: (N_h, D_h), W_qry: (N_h, D_h, D).

    Returns:
        Weight (N_h F, D) and bias (N_h F,) of the linear map from X to the products of queries and `met`.
    """
    met = met.transpose(1, 2) * met.shape[1] ** -0.5
    return [(met @ W_qry).flatten(0, 1), (met @ b_qry[:, :, None]).flatten()]


def scores_of_products(matrices: list[Tensor], X: Tensor) -> Tensor:
    """Scores from what queries become with keys, and with encodings of dx and then dy: (B, T, N_h, T)"""
    content, content_bias, position, position_bias = matrices
    sizes = [2 * X.shape[2] - 1, 2 * X.shape[1] - 1]
    displaced = linear(X, position, position_bias).unflatten(-1, [-1, sum(sizes)])  # (B, H, W, N_h, ..)
    across, down = displaced.split(sizes, dim=-1)
    return add_by_displacement(dots(linear(X, content, content_bias), X), across, down)


def dots(content: Tensor, X: Tensor) -> Tensor:
    """x_q . X_k of every head for all pairs of pixels: (B, H, W, N_h D), (B, H, W, D) -> (B, T, N_h, T)"""
    rows = content.flatten(1, 2).unflatten(2, [-1, X.shape[3]])  # (B, T, N_h, D)
    return product(rows.flatten(1, 2), X.flatten(1, 2).transpose(1, 2)).unflatten(1, rows.shape[1:3])
