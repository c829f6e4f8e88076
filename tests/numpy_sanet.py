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


def positional(X: np.ndarray, num_heads: int, score) -> np.ndarray:
    """(N_h, T, T) of score(head, dy, dx), key minus query."""
    return pairwise(X[:1], num_heads, lambda h, x_q, x_k, dy, dx: score(h, dy, dx))[0]


def pairwise(X: np.ndarray, num_heads: int, score) -> np.ndarray:
    """(B, N_h, T, T) of score(head, x_q, x_k, dy, dx)."""
    batch, height, width, _ = X.shape
    T = height * width
    scores = np.zeros((batch, num_heads, T, T))
    for b, h, q, k in np.ndindex(*scores.shape):
        (qy, qx), (ky, kx) = divmod(q, width), divmod(k, width)
        scores[b, h, q, k] = score(h, X[b, qy, qx], X[b, ky, kx], ky - qy, kx - qx)
    return scores


def quadratic(p: dict, X: np.ndarray) -> np.ndarray:
    return generalized(p | {"spread": p["spread"][:, None, None] * np.eye(2)}, X)


def generalized(p: dict, X: np.ndarray) -> np.ndarray:
    def score(h, dy, dx):
        distance = np.array([dy, dx]) - p["Delta"][h]
        return -0.5 * distance @ (p["spread"][h] @ p["spread"][h].T) @ distance

    return positional(X, len(p["spread"]), score)


def learned(p: dict, X: np.ndarray) -> np.ndarray:
    _, height, width, _ = X.shape

    def score(h, dy, dx):
        return p["row"][dx + width - 1] @ p["w"][h] + p["col"][dy + height - 1] @ p["v"][h]

    return positional(X, len(p["w"]), score)


def head(matrix: np.ndarray, h: int, dim: int) -> np.ndarray:
    """Rows of a projection (N_h D, ...) that belong to one head."""
    return matrix[h * dim : (h + 1) * dim]


def projected(p: dict, name: str, h: int, x: np.ndarray) -> np.ndarray:
    """x by the weight and the bias of one head."""
    return head(p[f"{name}.weight"], h, len(x)) @ x + head(p[f"{name}.bias"], h, len(x))


def content(p: dict, X: np.ndarray) -> np.ndarray:
    _, height, width, dim = X.shape

    def score(h, x_q, x_k, dy, dx):
        q = projected(p, "W_qry", h, x_q)
        k = projected(p, "W_key", h, x_k)
        r = np.concatenate([p["row"][dx + width - 1], p["col"][dy + height - 1]])
        return (q @ k + q @ r) / math.sqrt(dim)

    return pairwise(X, len(p["W_qry.bias"]) // dim, score)


def eq8(p: dict, X: np.ndarray) -> np.ndarray:
    _, height, width, dim = X.shape

    def score(h, x_q, x_k, dy, dx):
        W_qry, W_key = head(p["W_qry.weight"], h, dim), head(p["W_key.weight"], h, dim)
        What_key = head(p["W_key_pos.weight"], h, dim)
        r = np.concatenate([p["row"][dx + width - 1], p["col"][dy + height - 1]])
        first = (W_qry @ x_q) @ (W_key @ x_k)
        second = (W_qry @ x_q) @ (What_key @ r)
        third = p["u"][h] @ (W_key @ x_k)
        fourth = p["v"][h] @ (What_key @ r)
        return (first + second + third + fourth) / math.sqrt(dim)

    return pairwise(X, len(p["u"]), score)


def absolute(p: dict, X: np.ndarray) -> np.ndarray:
    def score(h, x_q, x_k, dy, dx):
        return projected(p, "W_qry", h, x_q) @ projected(p, "W_key", h, x_k) / math.sqrt(len(x_q))

    return pairwise(X + p["P"], len(p["W_qry.bias"]) // X.shape[-1], score)


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
    P = np.broadcast_to(P, (batch, *P.shape[-3:]))
    heads = [
        np.einsum("bqk,bkd->bqd", P[:, h], X.reshape(batch, -1, dim)) for h in range(P.shape[1])
    ]
    mixed = np.concatenate(heads, axis=-1).reshape(batch, height, width, -1)
    values = linear(p, "W_val", mixed)
    if "W_out.bn.weight" in p:
        return batch_norm(below(p, "W_out.bn."), values)
    return linear(p, "W_out", values) if "W_out.weight" in p else values


def max_pooled(X: np.ndarray) -> np.ndarray:
    batch, height, width, dim = X.shape
    maxima = np.zeros((batch, height // 2, width // 2, dim))
    for y, x in pixels(height // 2, width // 2):
        square = X[:, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2]
        maxima[:, y, x] = square.max(axis=(1, 2))
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
