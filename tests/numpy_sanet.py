"""The paper's network once more, in NumPy float64 and plain loops over pixels: what the tests compare with.

Written from the equations, not from the package: scores one pair of pixels at a time, convolutions as sums.
"""

import math

import numpy as np


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def pixels(height: int, width: int) -> list[tuple[int, int]]:
    return [(y, x) for y in range(height) for x in range(width)]


def pairwise(X: np.ndarray, num_heads: int, score) -> np.ndarray:
    """(B, N_h, T, T) of score(query, key, h, dy, dx); query and key are (image, row, column, head)."""
    batch, height, width, _ = X.shape
    places = pixels(height, width)
    scores = np.zeros((batch, num_heads, len(places), len(places)))
    for b, h, i, j in np.ndindex(*scores.shape):
        q, k = places[i], places[j]
        scores[b, h, i, j] = score((b, *q, h), (b, *k, h), h, k[0] - q[0], k[1] - q[1])
    return scores


def quadratic(p: dict, X: np.ndarray) -> np.ndarray:
    return quadratic_gen(p | {"spread": p["spread"][:, None, None] * np.eye(2)}, X)


def quadratic_gen(p: dict, X: np.ndarray) -> np.ndarray:
    def score(q, k, h, dy, dx):
        distance = np.array([dy, dx]) - p["Delta"][h]
        return -0.5 * distance @ (p["spread"][h] @ p["spread"][h].T) @ distance

    return pairwise(X[:1], len(p["spread"]), score)


def learned(p: dict, X: np.ndarray) -> np.ndarray:
    def score(q, k, h, dy, dx):
        row = p["row"][dx + X.shape[2] - 1] @ p["w"][h]
        return row + p["col"][dy + X.shape[1] - 1] @ p["v"][h]

    return pairwise(X[:1], len(p["w"]), score)


def by_head(p: dict, name: str, x: np.ndarray, dim: int) -> np.ndarray:
    """(..., D) -> (..., N_h, dim)"""
    return linear(p, name, x).reshape(*x.shape[:-1], -1, dim)


def displacements(p: dict) -> np.ndarray:
    """r of all displacements, from the smallest on: (2 H - 1, 2 W - 1, D_p)"""
    shape = len(p["col"]), len(p["row"])
    r = [np.concatenate([p["row"][dx], p["col"][dy]]) for dy, dx in pixels(*shape)]
    return np.array(r).reshape(*shape, -1)


def content(p: dict, X: np.ndarray) -> np.ndarray:
    _, height, width, dim = X.shape
    Q, K, r = by_head(p, "W_qry", X, dim), by_head(p, "W_key", X, dim), displacements(p)

    def score(q, k, h, dy, dx):
        return Q[q] @ (K[k] + r[dy + height - 1, dx + width - 1]) / math.sqrt(dim)

    return pairwise(X, Q.shape[3], score)


def eq8(p: dict, X: np.ndarray) -> np.ndarray:
    _, height, width, dim = X.shape
    Q, K = by_head(p, "W_qry", X, dim), by_head(p, "W_key", X, dim)
    r = by_head(p, "W_key_pos", displacements(p), dim)

    def score(q, k, h, dy, dx):
        away = r[dy + height - 1, dx + width - 1, h]
        first, second = Q[q] @ K[k], Q[q] @ away
        third, fourth = p["u"][h] @ K[k], p["v"][h] @ away
        return (first + second + third + fourth) / math.sqrt(dim)

    return pairwise(X, Q.shape[3], score)


def absolute(p: dict, X: np.ndarray) -> np.ndarray:
    X = X + p["P"]
    Q, K = (by_head(p, name, X, X.shape[3]) for name in ("W_qry", "W_key"))
    return pairwise(X, Q.shape[3], lambda q, k, *_: Q[q] @ K[k] / math.sqrt(X.shape[3]))


def linear(p: dict, name: str, x: np.ndarray) -> np.ndarray:
    return x @ p[f"{name}.weight"].T + p.get(f"{name}.bias", 0.0)


def layer_norm(p: dict, name: str, x: np.ndarray) -> np.ndarray:
    centred = x - x.mean(axis=-1, keepdims=True)
    scale = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-12)
    return centred / scale * p[f"{name}.weight"] + p[f"{name}.bias"]


def batch_norm(p: dict, x: np.ndarray) -> np.ndarray:
    scale = p["weight"] / np.sqrt(p["running_var"] + 1e-5)
    return (x - p["running_mean"]) * scale + p["bias"]


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def below(p: dict, prefix: str) -> dict:
    return {
        name.removeprefix(prefix): value for name, value in p.items() if name.startswith(prefix)
    }


def attention(p: dict, X: np.ndarray, term) -> np.ndarray:
    batch, height, width, dim = X.shape
    P = softmax(term(below(p, "terms.0."), X))
    heads = np.einsum(
        "bhqk,bkd->bqhd", np.broadcast_to(P, (batch, *P.shape[1:])), X.reshape(batch, -1, dim)
    )
    values = linear(p, "W_val", heads.reshape(batch, height, width, -1))
    if "W_out.bn.weight" in p:
        return batch_norm(below(p, "W_out.bn."), values)
    return linear(p, "W_out", values) if "W_out.weight" in p else values


def max_pooled(X: np.ndarray) -> np.ndarray:
    batch, height, width, dim = X.shape
    maxima = np.zeros((batch, height // 2, width // 2, dim))
    for y, x in pixels(height // 2, width // 2):
        maxima[:, y, x] = X[:, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2].max(axis=(1, 2))
    return maxima


def block(p: dict, X: np.ndarray, term, pools: bool) -> np.ndarray:
    Y = attention(below(p, "attn."), X, term)
    if "norm1.weight" not in p:
        return gelu(batch_norm(below(p, "merge.1.bn."), max_pooled(Y)) if pools else Y)
    X = layer_norm(p, "norm1", X + Y)
    return layer_norm(p, "norm2", X + linear(p, "fc2", gelu(linear(p, "fc1", X))))


def network(p: dict, images: np.ndarray, term, patch: int, pooled_in=()):
    """Logits. Plain networks pool in the blocks `pooled_in`, and their stem has GELU."""
    kernel, bias = p["patch_embed.weight"], p["patch_embed.bias"]
    side = kernel.shape[-1]
    batch, _, height, width = images.shape
    height, width = ((size - side) // patch + 1 for size in (height, width))
    X = np.zeros((batch, height, width, len(bias)))
    for y, x in pixels(height, width):
        patches = images[:, :, y * patch : y * patch + side, x * patch : x * patch + side]
        X[:, y, x] = np.einsum("bcij,dcij->bd", patches, kernel) + bias
    X = gelu(X) if pooled_in else X
    depth = 1 + max(int(name.split(".")[1]) for name in p if name.startswith("blocks."))
    for index in range(depth):
        X = block(below(p, f"blocks.{index}."), X, term, index in pooled_in)
    return linear(p, "head", X.mean(axis=(1, 2)))
