"""Geometry of pixels: displacements, scores of displacements alone, and their exact factors.

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

# At an integer Delta, heads of this alpha miss their pixel by less than the rounding error of any type (Lemma 2).
ONE_HOT = 39.0


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in its own floating-point type, or in float32 if that is narrower; scores are computed in this type."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def pixels(count: int, device: torch.device) -> Tensor:
    """Positions along an axis of `count` pixels: (count,), float32, which is exact for any image."""
    return torch.arange(count, device=device, dtype=torch.float32)


def displacements(size: int, device: torch.device) -> Tensor:
    """delta[q, k] = k - q along one axis of `size` pixels: (size, size)."""
    position = pixels(size, device)
    return position - position[:, None]


def table_rows(table: Tensor, size: int) -> Tensor:
    """r_delta along one axis: (2 * largest - 1, D_p), from delta = -(largest - 1) on -> (size, size, D_p), [q, k]"""
    middle = table.shape[0] // 2
    torch._assert(size <= middle + 1, "image size: above the model's; call set_input_size")
    return table[displacements(size, table.device).long() + middle]


def quadratic_scores(Delta: Tensor, alpha: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """-alpha_h (delta - Delta_h)^2 along one axis (Eq. 9): (N_h,), (N_h,), (Q,), (N,) -> (N_h, Q, N), [h, q, k]

    Positions and Delta are in pixels, alpha (possibly infinite) in 1 / pixels^2. This centered form differs from
    v^T r_delta by -alpha |Delta|^2, which softmax over keys ignores, and keeps scores near their maximum small.
    """
    distance = keys - queries[:, None] - at_least_float32(Delta)[:, None, None]
    # exp(-1e30) is 0 as well, but 0 * inf has no value
    finite = at_least_float32(alpha).clamp(max=1e30)
    return -finite[:, None, None] * distance.square()


def one_hot_displacements(Delta: Tensor, alpha: Tensor) -> list[list[int]]:
    """The displacement (row, column) of each quadratic head if all read one pixel, else none: (N_h, 2), (N_h,)

    Reads the values of tensors: a CPU has to wait for an accelerator.
    """
    if alpha.is_meta or not all(value >= ONE_HOT for value in alpha.tolist()):
        return []
    centers = Delta.tolist()
    if not all(place.is_integer() for center in centers for place in center):
        return []
    return [[int(place) for place in center] for center in centers]


def generalized_quadratic_scores(Delta: Tensor, spread: Tensor, height: int, width: int) -> Tensor:
    """-1/2 (delta - Delta_h)^T S_h S_h^T (delta - Delta_h), S_h S_h^T the inverse covariance (appendix of the paper).

    Delta (N_h, 2), in pixels, spread S (N_h, 2, 2), in 1 / pixels -> (N_h, T, T), [h, q, k], pixels in row-major order.
    Written without a matrix product: autocast leaves it in float32.
    """
    Delta = at_least_float32(Delta)[:, :, None, None]
    S = at_least_float32(spread)[:, :, :, None, None]
    dy = displacements(height, Delta.device) - Delta[:, 0]  # (N_h, H, H)
    dx = displacements(width, Delta.device) - Delta[:, 1]  # (N_h, W, W)
    # The two components of S^T (delta - Delta): (N_h, T, T)
    first = outer_sum(S[:, 0, 0] * dy, S[:, 1, 0] * dx)
    second = outer_sum(S[:, 0, 1] * dy, S[:, 1, 1] * dx)
    return -0.5 * (first.square() + second.square())


def learned_axis_scores(table: Tensor, weight: Tensor, size: int) -> Tensor:
    """r_delta . w_h along one axis: (2 * largest - 1, D_p), (N_h, D_p) -> (N_h, size, size), indexed [h, q, k]"""
    # A sum of products, not a matrix product: autocast leaves it in float32.
    products = at_least_float32(table)[:, None, :] * at_least_float32(weight)[None, :, :]
    return table_rows(products.sum(dim=-1), size).permute(2, 0, 1)


def outer_sum(rows: Tensor, columns: Tensor) -> Tensor:
    """rows[h, y, y'] + columns[h, x, x'], pixels in row-major order: (.., Q, N), (.., Q', N') -> (.., Q Q', N N')"""
    scores = rows[..., :, None, :, None] + columns[..., None, :, None, :]  # (.., Q, Q', N, N')
    return scores.flatten(-2, -1).flatten(-3, -2)


def displacement_scores(query_x: Tensor, query_y: Tensor, row: Tensor, col: Tensor) -> Tensor:
    """q . r_delta where r_delta splits by axis: query_x . row[dx] + query_y . col[dy] (second term of Eq. 8).

    (B, N_h, H, W, D_row), (B, N_h, H, W, D_col), row (2 W - 1, N_h or 1, D_row) for dx, col (2 H - 1, N_h or 1, D_col)
    for dy -> (B, N_h, T, T). Costs O(T (H + W)) products; r_delta of every pair of pixels would cost O(T^2).
    """
    across = torch.einsum("bhijd,jlhd->bhijl", query_x, table_rows(row, query_x.shape[3]))
    down = torch.einsum("bhijd,ikhd->bhijk", query_y, table_rows(col, query_y.shape[2]))
    scores = down[..., :, None] + across[..., None, :]  # (B, N_h, H, W, H, W)
    return scores.flatten(4, 5).flatten(2, 3)


def resized_table(table: Tensor, size: int) -> Tensor:
    """Encodings of displacements, interpolated to `size` pixels: (2 * old_size - 1, D_p) -> (2 * size - 1, D_p)

    The extreme displacements stay extreme: the encodings scale with the image.
    """
    curve = at_least_float32(table).T[None]  # (1, D_p, 2 * old_size - 1)
    curve = interpolate(curve, size=2 * size - 1, mode="linear", align_corners=True)
    return curve[0].T.to(table.dtype).contiguous()


def resized_grid(encoding: Tensor, height: int, width: int) -> Tensor:
    """An absolute encoding (old_height, old_width, D), interpolated bilinearly to (height, width, D)."""
    surface = at_least_float32(encoding).permute(2, 0, 1)[None]
    surface = interpolate(surface, size=(height, width), mode="bilinear", align_corners=True)
    return surface[0].permute(1, 2, 0).to(encoding.dtype).contiguous()
