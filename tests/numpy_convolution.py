"""Convolutional attention as the paper defines it, in NumPy and float64, one query at a time."""

import numpy as np

PAD_MODES = {"zeros": "constant", "replicate": "edge", "reflect": "reflect", "circular": "wrap"}


def padded(x: np.ndarray, amounts: list[tuple[int, int]], mode: str) -> np.ndarray:
    """(B, C, *image) -> (B, C, *keys)"""
    return np.pad(x, [(0, 0), (0, 0), *amounts], mode=PAD_MODES[mode])


def probabilities(keys, queries, Delta, alpha, stride, center, content=lambda head, q: 0.0):
    """softmax_k(content - alpha_h |k - q - Delta_h|^2) for query i at stride * i + center: (N_h, queries, keys)"""
    places = np.array(list(np.ndindex(*keys)))
    P = np.zeros((len(alpha), int(np.prod(queries)), len(places)))
    for head, (shift, sharpness) in enumerate(zip(Delta, alpha, strict=True)):
        for row, index in enumerate(np.ndindex(*queries)):
            q = np.array(index) * stride + center
            scores = content(head, q) - sharpness * ((places - q - shift) ** 2).sum(-1)
            weights = np.exp(scores - scores.max())
            P[head, row] = weights / weights.sum()
    return P


def attention(keys, queries, Delta, alpha, W_val, b_out, stride, center):
    """b_out + sum_h P_h X W_val_h: keys (B, D_in, *N), W_val (N_h, D_in, D_out) -> (B, D_out, *queries)"""
    P = probabilities(keys.shape[2:], queries, Delta, alpha, stride, center)
    out = sum(
        p @ keys.reshape(*keys.shape[:2], -1).swapaxes(1, 2) @ W
        for p, W in zip(P, W_val, strict=True)
    )
    return (out + b_out).swapaxes(1, 2).reshape(len(keys), -1, *queries)


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
