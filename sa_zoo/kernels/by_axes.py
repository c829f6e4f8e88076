"""Attention whose probabilities factorise by axes, P[q, k] = P_down[y, y'] P_across[x, x'].

Exact, and O(T (H + W)) where the explicit form costs O(T^2): T x T probabilities are never built. Letters as in
attention.py.
"""

from functools import partial

import torch
from torch import Tensor

from sa_zoo.kernels.products import ROOM, images_at_once, in_portions, joined, rows_at_once, sum_over_heads

# Numbers in the images whose rows are mixed before their columns are: what lies between stays in a CPU's caches.
MIXED = 2 * 16 * 16 * 400
# Queries along a row that share the keys which they attend to.
BAND_QUERIES = 16

Band = tuple[Tensor, slice]  # probabilities of some queries, (N_h, Q, K), and the K keys that they are of


def attend_by_axes(P_down: Tensor, P_across: Tensor, X: Tensor) -> Tensor:
    """concat_h[P_h X]: (N_h, H, H), (N_h, W, W), (B, H, W, D) -> (B, H, W, N_h D)"""
    return attend_across(P_across, attend_down(P_down, X)).flatten(3)


def attend_down(P: Tensor, X: Tensor) -> Tensor:
    """P_h X along the first axis: (N_h, Q, H), (B, H, W, D) -> (B, Q, N_h, W, D)"""
    N_h, queries, _ = P.shape
    down = P.to(X.dtype).transpose(0, 1).flatten(0, 1)  # (Q N_h, H): one product for all heads
    return (down @ X.flatten(2)).unflatten(1, [queries, N_h]).unflatten(3, [X.shape[2], -1])


def attend_across(P: Tensor, mixed: Tensor) -> Tensor:
    """P_h along the second axis: (N_h, Q, W), (B, H, N_h, W, D) -> (B, H, Q, N_h, D)"""
    return (P.to(mixed.dtype) @ mixed).transpose(2, 3)


def bands(P: Tensor, queries: int) -> list[Band]:
    """Blocks of so many queries, and the keys to which any head gives a probability in them: (N_h, Q, K)

    Exact for any probabilities: what is left out is zero, and `probabilities_from` gives zeros no gradients. Heads of a
    quadratic encoding are narrow: they reach a few pixels of a row.
    """
    found = []
    for block in P.split(queries, dim=1):
        attended = block.detach().amax(dim=(0, 1)).nonzero()
        keys = slice(int(attended[0]), int(attended[-1]) + 1)
        found.append((block[:, :, keys], keys))
    return found


def attend_by_bands(down: Band, across: list[Band], X: Tensor) -> Tensor:
    """`attend_by_axes` for the queries of one band `down` and all bands `across`: (B, H, W, D) -> (B, Q, W, N_h D)"""
    P_down, rows = down
    images = []
    for some in X[:, rows].split(images_at_once(X, MIXED)):
        mixed = attend_down(P_down, some)
        images.append(joined([attend_across(P, mixed[:, :, :, keys]) for P, keys in across], dim=2))
    return joined(images, dim=0).flatten(3)


def attend_in_place(down: Band, across: list[Band], X: Tensor) -> Tensor:
    """What `attend_by_bands` gives, without gradients, with heads apart: (B, H, W, D) -> (B, N_h, Q, W, D)

    A few images after another, in memory that the next portion uses again.
    """
    P_down, rows = down
    N_h, Q, _ = P_down.shape
    B, _, W, D = X.shape
    images = images_at_once(X, MIXED)
    heads = ROOM.of("heads", X.dtype, B, N_h, Q, W, D)
    for some, places in zip(X[:, rows].split(images), heads.split(images), strict=True):
        mixed = ROOM.of("mixed", X.dtype, len(some), N_h * Q, W * D)
        torch.matmul(P_down.flatten(0, 1), some.flatten(2), out=mixed)
        queries = places.split([P.shape[1] for P, _ in across], dim=3)
        for (P, keys), place in zip(across, queries, strict=True):
            torch.matmul(P[:, None], mixed.view(-1, N_h, Q, W, D)[:, :, :, keys], out=place)
    return heads


def values_by_axes(P_down: Tensor, P_across: Tensor, X: Tensor, W_val: Tensor, b_val: Tensor | None) -> Tensor:
    """sum_h P_h X W_val_h^T + b_val on a CPU, without gradients.

    (N_h, H, H), (N_h, W, W), (B, H, W, D), (N, N_h D), (N,) -> (B, H, W, N)
    """
    across = bands(P_across.to(X.dtype), BAND_QUERIES)

    def values(down: Band, some: Tensor) -> Tensor:
        heads = attend_in_place(down, across, some)
        return sum_over_heads(heads.flatten(2, 3), W_val, b_val).unflatten(1, heads.shape[2:4])

    # Twice as many images as usual: for each portion oneDNN lays out W_val anew, and places stay in the caches.
    downs = bands(P_down.to(X.dtype), rows_at_once(X))
    return joined([in_portions(partial(values, down), X, times=2) for down in downs], dim=1)
