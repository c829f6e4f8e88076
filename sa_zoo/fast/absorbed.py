"""Content scores without queries and keys.

Queries are linear in X: q = W_qry x + b_qry. So W_key^T and the encodings r_delta are multiplied with W_qry once for
all images, and one linear map of X remains before the product with X itself. Scores have the shape (B, T, N_h, T): the
heads of a query lie next to each other, as in `attend`.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from sa_zoo.fast.portions import divided
from sa_zoo.fast.situation import Situation
from sa_zoo.models.attention import Attention, probabilities_from
from sa_zoo.models.content import Absolute, Content, ContentKernel, Relative
from sa_zoo.models.norm import is_plain
from sa_zoo.models.positions import displacements
from sa_zoo.models.terms import RelativeTables, Term

Scores = Callable[[Tensor], Tensor]  # (B, H, W, D) -> (B, T, N_h, T)
LinearMap = tuple[Tensor, Tensor]  # weight and bias


def absorbed(layer: Attention, X: Tensor, now: Situation) -> Tensor:
    """Eq. 10 with content in some terms: (B, H, W, D) -> (B, H, W, D)"""
    content = [ABSORBED[type(term)](term) for term in layer.terms if not term.positional]
    # (T, N_h, T)
    positional = [term(X).transpose(0, 1) for term in layer.terms if term.positional]

    def values(some: Tensor) -> Tensor:
        A = content[0](some)
        for scores in content[1:]:
            A = A + scores(some)
        for scores in positional:
            A = A + scores
        P = layer.attn_drop(probabilities_from(A)).transpose(1, 2)
        return layer.values(P, some)

    return divided(values, now, layer.parameters(), X)


def can_absorb(layer: Attention, X: Tensor, now: Situation) -> bool:
    """Whether all content terms are known here and their projections are plain linear layers: no adapters."""
    content = [term for term in layer.terms if not term.positional]
    known = all(type(term) in ABSORBED and all(map(is_plain, term.children())) for term in content)
    return len(content) > 0 and known and now.ordinary


def absorbed_content(term: Content) -> Scores:
    """(q . k + q . r_delta) / sqrt(D_h)"""
    W_qry, b_qry = weights_of(term.W_qry, term.num_heads)
    W_key, b_key = weights_of(term.W_key, term.num_heads)
    row = pad(term.row, (0, term.col.shape[1])).expand(term.num_heads, -1, -1)
    # Every key has W_key's bias and every displacement one dy: the bias is added to the encodings of dy.
    col = pad(term.col, (term.row.shape[1], 0)) + b_key[:, None, :]
    encodings = torch.cat([row, col], dim=1).transpose(1, 2)  # (N_h, D_h, displacements)
    content = multiplied(W_key, b_qry, W_qry)
    position = multiplied(encodings, b_qry, W_qry)
    return relative_scores(term, content, position)


def absorbed_relative(term: Relative) -> Scores:
    """((q + u) . k + (q + v) . What_key r_delta) / sqrt(D_h)"""
    W_qry = term.W_qry.weight.unflatten(0, [term.num_heads, -1])
    W_key = term.W_key.weight.unflatten(0, [term.num_heads, -1])
    What_key = term.W_key_pos.weight.unflatten(0, [term.num_heads, -1]).mT  # (N_h, D_p, D_h)
    What_row, What_col = What_key.split([term.row.shape[1], term.col.shape[1]], dim=1)
    encodings = torch.cat([term.row @ What_row, term.col @ What_col], dim=1).transpose(1, 2)
    content = multiplied(W_key, term.u, W_qry)
    position = multiplied(encodings, term.v, W_qry)
    return relative_scores(term, content, position)


def absorbed_absolute(term: Absolute) -> Scores:
    """(x + P) W_qry W_key^T (x + P)^T / sqrt(D_h), and the biases"""
    W_qry, b_qry = weights_of(term.W_qry, term.num_heads)
    W_key, b_key = weights_of(term.W_key, term.num_heads)
    content = multiplied(W_key, b_qry, W_qry)
    all_keys = multiplied(b_key[:, :, None], b_qry, W_qry)

    def scores(X: Tensor) -> Tensor:
        X = X + term.P
        rows = linear(X, *content).unflatten(-1, [-1, X.shape[-1]])
        return products_with_pixels(rows, X) + linear(X, *all_keys).flatten(1, 2)[..., None]

    return scores


ABSORBED: dict[type[Term], Callable[..., Scores]] = {
    Content: absorbed_content,
    ContentKernel: absorbed_content,
    Relative: absorbed_relative,
    Absolute: absorbed_absolute,
}


def weights_of(layer: nn.Linear, num_heads: int) -> LinearMap:
    """Weight (N_h, D_h, D) and bias (N_h, D_h) of a projection for all heads."""
    return layer.weight.unflatten(0, [num_heads, -1]), layer.bias.unflatten(0, [num_heads, -1])


def multiplied(factor: Tensor, b_qry: Tensor, W_qry: Tensor) -> LinearMap:
    """Weight (N_h F, D) and bias (N_h F,) of the linear map from X to q . factor / sqrt(D_h).

    factor: (N_h, D_h, F), the factor of each head's queries; b_qry: (N_h, D_h), W_qry: (N_h, D_h, D).
    """
    factor = factor.transpose(1, 2) * factor.shape[1] ** -0.5
    return (factor @ W_qry).flatten(0, 1), (factor @ b_qry[:, :, None]).flatten()


def relative_scores(term: RelativeTables, content: LinearMap, position: LinearMap) -> Scores:
    """Scores from the linear maps to products of queries with keys, and with encodings of dx followed by dy.

    Positions are part of the same product: keys get the one-hot vectors of their column and row as further channels,
    queries their scores of each column and row. No sum over all pairs of pixels is left.
    """

    sizes = [len(term.row), len(term.col)]

    def scores(X: Tensor) -> Tensor:
        height, width, D = X.shape[1:]
        both = linear(X, *position).unflatten(-1, [-1, sum(sizes)])  # (B, H, W, N_h, ..)
        across, down = both.split(sizes, dim=-1)
        across = keys_of_axis(across.transpose(2, 3)).transpose(2, 3)  # (B, H, W, N_h, W)
        down = keys_of_axis(down.transpose(1, 3)).transpose(1, 3)  # (B, H, W, N_h, H)
        by_content = linear(X, *content).unflatten(-1, [-1, D])
        rows = torch.cat([by_content, across, down], dim=-1)  # (.., N_h, D + W + H)
        column = torch.eye(width, dtype=X.dtype, device=X.device)
        row = torch.eye(height, dtype=X.dtype, device=X.device)[:, None]
        column = column.expand(len(X), height, -1, -1)  # (B, H, W, W)
        row = row.expand(len(X), -1, width, -1)  # (B, H, W, H)
        return products_with_pixels(rows, torch.cat([X, column, row], dim=-1))

    return scores


def products_with_pixels(rows: Tensor, X: Tensor) -> Tensor:
    """rows_q . X_k of every head, for all pairs of pixels: (B, H, W, N_h, D), (B, H, W, D) -> (B, T, N_h, T)"""
    rows = rows.flatten(1, 2)  # (B, T, N_h, D)
    scores = rows.flatten(1, 2) @ X.flatten(1, 2).mT
    return scores.unflatten(1, rows.shape[1:3])


def keys_of_axis(scores: Tensor) -> Tensor:
    """From displacements to keys along one axis of S pixels: (..., S, 2 S - 1) -> (..., S, S), [.., q, k]"""
    size = scores.shape[-2]
    scores = scores.unflatten(-1, [2 * size - 1])  # raises RuntimeError for tables of another size
    index = displacements(size, scores.device).long() + (size - 1)
    return scores.gather(-1, index.expand(scores.shape[:-1] + index.shape[-1:]))
