"""Convolutional attention as the paper defines it, in NumPy and float64, one query and one key at a time."""

import numpy as np

PAD_MODES = {"zeros": "constant", "replicate": "edge", "reflect": "reflect", "circular": "wrap"}


def padded(x: np.ndarray, amounts: list[tuple[int, int]], mode: str) -> np.ndarray:
    """(B, C, *image) -> (B, C, *keys)"""
    return np.pad(x, [(0, 0), (0, 0), *amounts], mode=PAD_MODES[mode])


def probabilities(
    keys: tuple, queries: tuple, Delta, alpha, stride, center, content=lambda head, q, k: 0.0
) -> np.ndarray:
    """softmax_k(content - alpha_h |k - q - Delta_h|^2) for query i at stride * i + center: (N_h, queries, keys)"""
    table = np.zeros((len(alpha), int(np.prod(queries)), int(np.prod(keys))))
    for head, (shift, sharpness) in enumerate(zip(Delta, alpha, strict=True)):
        for row, index in enumerate(np.ndindex(*queries)):
            q = np.array(index) * stride + center
            scores = np.array(
                [
                    content(head, q, k) - sharpness * np.sum((np.array(k) - q - shift) ** 2)
                    for k in np.ndindex(*keys)
                ]
            )
            weights = np.exp(scores - scores.max())
            table[head, row] = weights / weights.sum()
    return table


def attention(
    keys: np.ndarray, queries: tuple, Delta, alpha, W_val, b_out, stride, center
) -> np.ndarray:
    """b_out + sum_h P_h X W_val_h: keys (B, D_in, *N), W_val (N_h, D_in, D_out) -> (B, D_out, *queries)"""
    P = probabilities(keys.shape[2:], queries, Delta, alpha, stride, center)
    tokens = keys.reshape(*keys.shape[:2], -1)
    out = np.zeros((len(keys), len(b_out), P.shape[1])) + b_out[None, :, None]
    for batch in range(len(keys)):
        for head in range(len(P)):
            out[batch] += (P[head] @ tokens[batch].T @ W_val[head]).T
    return out.reshape(*out.shape[:2], *queries)


def nearest_convolution(P: np.ndarray, grid: tuple[int, int], K: int) -> tuple:
    """c, the mean of P over queries whose window lies in the image, and the maps of a convolution with it.

    (N_h, T, T) -> (N_h, K, K) and (N_h, T, T), pixel by pixel, moved to the border where it is outside.
    """
    (height, width), reach = grid, K // 2
    c, C = np.zeros((len(P), K, K)), np.zeros_like(P)
    for i, j in np.ndindex(K, K):
        seen = []
        for y, x in np.ndindex(*grid):
            row, column = y + i - reach, x + j - reach
            if reach <= y < height - reach and reach <= x < width - reach:
                seen.append(P[:, y * width + x, row * width + column])
        c[:, i, j] = np.mean(seen, axis=0)
        for y, x in np.ndindex(*grid):
            row, column = np.clip([y + i - reach, x + j - reach], 0, [height - 1, width - 1])
            C[:, y * width + x, row * width + column] += c[:, i, j]
    return c, C
