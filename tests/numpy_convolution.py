"""Convolutional attention as the paper defines it, in NumPy and float64, one query and one key at a time."""

import numpy as np

PAD_MODES = {"zeros": "constant", "replicate": "edge", "reflect": "reflect", "circular": "wrap"}


def padded(x: np.ndarray, amounts: list[tuple[int, int]], mode: str) -> np.ndarray:
    """(B, C, *image) -> (B, C, *keys)"""
    return np.pad(x, [(0, 0), (0, 0), *amounts], mode=PAD_MODES[mode])


def probabilities(keys: tuple, queries: tuple, Delta, alpha, stride, center) -> np.ndarray:
    """softmax_k(-alpha_h |k - q - Delta_h|^2) for query i at stride * i + center: (N_h, queries, keys)"""
    table = np.zeros((len(alpha), int(np.prod(queries)), int(np.prod(keys))))
    for head, (shift, sharpness) in enumerate(zip(Delta, alpha, strict=True)):
        for row, index in enumerate(np.ndindex(*queries)):
            q = np.array(index) * stride + center
            scores = np.array(
                [-sharpness * np.sum((np.array(k) - q - shift) ** 2) for k in np.ndindex(*keys)]
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
