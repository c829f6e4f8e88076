"""Convolutional attention as the paper defines it, in NumPy and float64, one query at a time."""

import numpy as np

PAD_MODES = {"zeros": "constant", "replicate": "edge", "reflect": "reflect", "circular": "wrap"}


def padded(x: np.ndarray, amounts: list[tuple[int, int]], mode: str) -> np.ndarray:
    """(B, C, *image) -> (B, C, *keys)"""
    return np.pad(x, [(0, 0), (0, 0), *amounts], mode=PAD_MODES[mode])


def probabilities(keys, queries, Delta, alpha, stride, center):
    """softmax_k(-alpha_h |k - q - Delta_h|^2) for query i at stride * i + center: (N_h, queries, keys)"""
    places = np.array(list(np.ndindex(*keys)))
    P = np.zeros((len(alpha), int(np.prod(queries)), len(places)))
    for head, (shift, sharpness) in enumerate(zip(Delta, alpha, strict=True)):
        for row, index in enumerate(np.ndindex(*queries)):
            q = np.array(index) * stride + center
            scores = -sharpness * ((places - q - shift) ** 2).sum(-1)
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
