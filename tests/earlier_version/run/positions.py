"""Pure geometry of pixels: displacements, the scores that depend on nothing else, and their exact factors.

Two conventions are decided here and nowhere else:

* delta = k - q, the displacement from the query pixel q to the key pixel k;
* a vector of positions has the order (row, column) = (y, x), so `Delta[..., 0]` moves down and
  `Delta[..., 1]` moves right.

The symbols are those of Cordonnier, Loukas, Jaggi, "On the Relationship between Self-Attention and
Convolutional Layers" (ICLR 2020): see the legend in attention.py. Everything is computed in at least
float32, whatever the parameters' type: at alpha = 46 on a 32x32 grid the scores leave float16's range.
"""

import torch
from torch import Tensor
from torch.nn.functional import interpolate


def wide(x: Tensor) -> Tensor:
    """`x` in its own floating type, or in float32 if that is narrower: the type that scores are computed in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def displacements(size: int, device: torch.device) -> Tensor:
    """delta[q, k] = k - q along one axis of `size` pixels: (size, size), float32 (exact for any image)."""
    position = torch.arange(size, device=device, dtype=torch.float32)
    return position[None, :] - position[:, None]


def table_rows(table: Tensor, size: int) -> Tensor:
    """r_delta along one axis: row `delta + size - 1` of `table` for every query and key.

    Args:
        table: (2 * size - 1, D_p), one encoding a displacement, from -(size - 1) to size - 1.
        size: pixels along the axis.

    Returns:
        (size, size, D_p), indexed [q, k].
    """
    position = torch.arange(size, device=table.device)
    return table[position[None, :] - position[:, None] + (size - 1)]


def quadratic_axis_scores(Delta: Tensor, spread: Tensor, size: int) -> Tensor:
    """-s_h^2 / 2 (delta - Delta_h)^2 along one axis (Eq. 9 with alpha_h = s_h^2 / 2, centred form).

    The centred form differs from the paper's v^T r_delta by -alpha |Delta|^2, which no softmax over keys can
    see, and keeps every score near its maximum small.

    Args:
        Delta: (N_h,), centres along this axis, in pixels.
        spread: (N_h,), s_h, in 1 / pixels.
        size: pixels along the axis.

    Returns:
        (N_h, size, size), indexed [h, q, k].
    """
    distance = displacements(size, Delta.device) - wide(Delta)[:, None, None]
    return -0.5 * (wide(spread)[:, None, None] * distance).square()


def generalized_quadratic_scores(Delta: Tensor, spread: Tensor, height: int, width: int) -> Tensor:
    """-1/2 (delta - Delta_h)^T S_h S_h^T (delta - Delta_h), S_h S_h^T the inverse covariance (Section 4.1).

    Written without a matrix product, so that autocast leaves it in float32.

    Args:
        Delta: (N_h, 2), centres (row, column), in pixels.
        spread: (N_h, 2, 2), S_h, in 1 / pixels.

    Returns:
        (N_h, T, T) with T = height * width, pixels in row-major order, indexed [h, q, k].
    """
    Delta, S = wide(Delta)[:, :, None, None], wide(spread)[:, :, :, None, None, None, None]
    dy = (displacements(height, Delta.device) - Delta[:, 0])[:, :, None, :, None]  # (N_h, H, 1, H, 1)
    dx = (displacements(width, Delta.device) - Delta[:, 1])[:, None, :, None, :]  # (N_h, 1, W, 1, W)
    first = S[:, 0, 0] * dy + S[:, 1, 0] * dx  # (N_h, H, W, H, W), first component of S^T (delta - Delta)
    second = S[:, 0, 1] * dy + S[:, 1, 1] * dx
    return (-0.5 * (first.square() + second.square())).flatten(3, 4).flatten(1, 2)


def learned_axis_scores(table: Tensor, weight: Tensor, size: int) -> Tensor:
    """r_delta . w_h along one axis: one learned score a head and a displacement.

    Args:
        table: (2 * size - 1, D_p), learned encodings of the displacements.
        weight: (N_h, D_p), w_h.
        size: pixels along the axis.

    Returns:
        (N_h, size, size), indexed [h, q, k].
    """
    # A sum of products, not a matrix product: autocast leaves it in float32.
    score = (wide(table)[:, None, :] * wide(weight)[None, :, :]).sum(dim=-1)  # (2 * size - 1, N_h)
    return table_rows(score, size).permute(2, 0, 1)


def outer_sum(rows: Tensor, columns: Tensor) -> Tensor:
    """Scores of pixels from scores along the axes: rows[h, y, y'] + columns[h, x, x'].

    Args:
        rows: (..., H, H), columns: (..., W, W), with equal leading axes.

    Returns:
        (..., T, T) with T = H * W, pixels in row-major order.
    """
    scores = rows[..., :, None, :, None] + columns[..., None, :, None, :]  # (..., H, W, H, W)
    return scores.flatten(-2, -1).flatten(-3, -2)


def displacement_scores(query_x: Tensor, query_y: Tensor, row: Tensor, col: Tensor) -> Tensor:
    """q . r_delta where r_delta splits by axis: query_x . row[dx] + query_y . col[dy] (second term of Eq. 8).

    Costs O(T (H + W)) products, where a table of r_delta for every pair of pixels would cost O(T^2).

    Args:
        query_x: (B, N_h, H, W, D_row), query_y: (B, N_h, H, W, D_col).
        row: (2 W - 1, N_h or 1, D_row), encodings of dx; an axis of size 1 is shared by all heads.
        col: (2 H - 1, N_h or 1, D_col), encodings of dy.

    Returns:
        (B, N_h, T, T), indexed [b, h, q, k].
    """
    height, width = query_x.shape[2], query_x.shape[3]
    across = torch.einsum("bhijd,jlhd->bhijl", query_x, table_rows(row, width))
    down = torch.einsum("bhijd,ikhd->bhijk", query_y, table_rows(col, height))
    scores = down[..., :, None] + across[..., None, :]  # (B, N_h, H, W, H, W)
    return scores.flatten(4, 5).flatten(2, 3)


def add_by_displacement(scores: Tensor, across: Tensor, down: Tensor) -> Tensor:
    """scores[.., k] + across[.., dx] + down[.., dy], each query having scores of displacements.

    Args:
        scores: (B, T, N_h, T), indexed [b, q, h, k].
        across: (B, H, W, N_h, 2 W - 1), from dx = -(W - 1) to W - 1; down: (B, H, W, N_h, 2 H - 1).

    Returns:
        (B, T, N_h, T)
    """
    across = keys_of_axis(across.transpose(2, 3)).transpose(2, 3)  # (B, H, W, N_h, W)
    down = keys_of_axis(down.transpose(1, 3)).transpose(1, 3)  # (B, H, W, N_h, H)
    by_axis = scores.unflatten(3, [down.shape[-1], -1])
    total = by_axis + down.flatten(1, 2)[..., :, None] + across.flatten(1, 2)[..., None, :]
    return total.flatten(3)


def keys_of_axis(scores: Tensor) -> Tensor:
    """From displacements to keys along one axis of S pixels: (..., S, 2 S - 1) -> (..., S, S), [.., q, k]"""
    position = torch.arange(scores.shape[-2], device=scores.device)
    index = position[None, :] - position[:, None] + (scores.shape[-2] - 1)
    return scores.gather(-1, index.expand(scores.shape[:-1] + index.shape[-1:]))


def resized_table(table: Tensor, size: int) -> Tensor:
    """A table of displacement encodings, interpolated linearly from its own axis size to `size` pixels.

    The extreme displacements stay the extremes: the encodings scale with the image.

    Args:
        table: (2 * old_size - 1, D_p).

    Returns:
        (2 * size - 1, D_p), in the type of `table`.
    """
    curve = wide(table).T[None]  # (1, D_p, 2 * old_size - 1)
    curve = interpolate(curve, size=2 * size - 1, mode="linear", align_corners=True)
    return curve[0].T.to(table.dtype).contiguous()


def resized_grid(encoding: Tensor, height: int, width: int) -> Tensor:
    """An absolute encoding (old_height, old_width, D), interpolated bilinearly to (height, width, D)."""
    surface = wide(encoding).permute(2, 0, 1)[None]
    surface = interpolate(surface, size=(height, width), mode="bilinear", align_corners=True)
    return surface[0].permute(1, 2, 0).to(encoding.dtype).contiguous()
