"""Measures of attention heads, defined in docs/heads.md. Symbols: models/attention.py."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from sa_zoo.analysis.maps import LayerMaps
from sa_zoo.convolution.convolutional import ConvolutionalAttention
from sa_zoo.convolution.theorem import spread_matrices
from sa_zoo.models.attention import Attention
from sa_zoo.models.positions import ONE_HOT

LARGEST = 2**22  # numbers in the maps of one layer; of larger layers, fewer queries are measured
MEASURES = {  # columns of the table with a mean per layer: title -> measure, format
    "inside {0} x {0}": ("share", "{:.1%}"),
    "reach": ("reach", "{:.2f}"),
    "distance": ("distance", "{:.2f}"),
    "varies": ("variation", "{:.0%}"),
}


@dataclass(frozen=True)
class Heads:
    """Measures of the heads of one layer, (N_h,) each. Lengths are in pixels of the layer's keys."""

    layer: str
    center: Tensor  # (N_h, 2), (row, column) from the query
    share: Tensor  # of attention inside the window around the query
    reach: Tensor  # mean distance from the query to the attended pixels
    distance: Tensor  # to the nearest convolution, from 0 to 2
    variation: Tensor  # share of attention that an image moves, from 0 to 1
    alpha: Tensor | None  # of Gaussian heads


@dataclass(frozen=True)
class Sample:
    """The maps of some queries of a layer, Q of them, keys in row-major order."""

    P: Tensor  # (B, N_h, Q, T), float64; B = 1 if positional
    delta: Tensor  # displacements k - q, (Q, T, 2), (row, column)
    inner: Tensor  # whether a query is in the inner half of both axes, (Q,)


def sample(layer: LayerMaps) -> Sample:
    """Maps of all queries, or of evenly spaced ones if the layer has too many of them."""
    images = 1 if layer.positional else len(layer.factors[0])
    per_query = images * layer.heads * math.prod(layer.keys)
    most = max(3, math.isqrt(LARGEST // per_query))  # per axis
    if math.prod(layer.grid) * per_query <= LARGEST:
        most = max(layer.grid)
    rows, columns = (evenly_spaced(size, most) for size in layer.grid)
    queries = list(product(rows, columns))
    grid = torch.tensor(layer.grid)
    at = torch.tensor(queries)
    inner = ((at >= grid // 4) & (at < grid - grid // 4)).all(dim=-1)
    P = torch.stack([layer.at(query).double().cpu().flatten(-2) for query in queries], dim=-2)
    keys = torch.cartesian_prod(*(torch.arange(size).double() for size in layer.keys))
    origins = torch.tensor([layer.origin(query) for query in queries])
    return Sample(P.reshape(-1, *P.shape[-3:]), keys - origins[:, None], inner)


def evenly_spaced(size: int, most: int) -> list[int]:
    """At most `most` indices below `size`, each in the middle of an equal part."""
    count = min(size, most)
    return [(2 * part + 1) * size // (2 * count) for part in range(count)]


def measure(layer: LayerMaps, window: int = 3) -> Heads:
    """The measures of a layer. `window`: K, an odd number of pixels.

    Raises ValueError for an even window.
    """
    if window < 1 or window % 2 == 0:
        raise ValueError(f"window: got {window}, expected an odd number of pixels")
    sampled = sample(layer)
    P = sampled.P.mean(dim=0)
    delta = sampled.delta
    inside = delta.abs().amax(dim=-1) <= window // 2
    alpha = None
    center = torch.einsum("hqk,qkd->hqd", P, delta)[:, sampled.inner].mean(dim=1)
    module = layer.module
    if isinstance(module, ConvolutionalAttention) and layer.positional:
        center = module.Delta.detach()
        alpha = module.alpha.detach()
    elif isinstance(module, Attention) and layer.kind in ("quadratic", "generalized"):
        (term,) = module.terms
        center = term.Delta.detach()
        S = spread_matrices(term.spread.detach().double())
        alpha = S.square().sum(dim=(1, 2)) / 4  # half of the mean eigenvalue of S S^T
    return Heads(
        layer.name,
        center,
        share=per_head(P * inside),
        reach=mean_distance(sampled),
        distance=distance_to_convolution(P, delta, layer.keys, window),
        variation=0.5 * per_head((sampled.P - P).abs()).mean(dim=0),
        alpha=alpha,
    )


def per_head(x: Tensor) -> Tensor:
    """Mean over queries of the sum over keys: (.., N_h, Q, T) -> (.., N_h)"""
    return x.sum(dim=-1).mean(dim=-1)


def mean_distance(sampled: Sample) -> Tensor:
    """sum_k P[q, k] |delta|, averaged over queries and images: (N_h,)

    Mean attention distance, after Dosovitskiy et al. (ICLR 2021, https://arxiv.org/abs/2010.11929, Figure 7).
    """
    return per_head(sampled.P.mean(dim=0) * sampled.delta.norm(dim=-1))


def distance_to_convolution(P: Tensor, delta: Tensor, keys: Sequence[int], K: int) -> Tensor:
    """Mean over q of d_h[q] = sum_k |P_h[q, k] - C_h[q, k]|, from 0 to 2: (N_h, Q, T) -> (N_h,)

    C_h is the map of a K x K convolution with replicate padding, one number c_h[a] per head and pixel of the kernel:

        C_h[q, k] = sum_a c_h[a] [k = q + a, moved to the border where it is outside]

    and c_h[a] the mean of P_h[q, q + a] over the queries whose window is inside. K is at most the size of the keys.
    """
    K = min(K, *(size - 1 + size % 2 for size in keys))
    around = torch.arange(K) - K // 2
    last = torch.tensor(keys) - 1
    pixels = -delta[:, 0, None].long() + torch.cartesian_prod(around, around)  # (Q, K^2, 2)
    targets = pixels.clamp(torch.zeros(2, dtype=torch.long), last)
    whole = (targets == pixels).all(dim=-1).all(dim=-1)
    index = (targets[..., 0] * keys[1] + targets[..., 1]).expand(len(P), -1, -1)
    c = P[:, whole].gather(2, index[:, whole]).mean(dim=1, keepdim=True)
    C = torch.zeros_like(P).scatter_add(2, index, c.expand(index.shape))
    return per_head((P - C).abs())


def heads_table(layers: Sequence[Heads], window: int) -> str:
    """Markdown with a row per head, and a row of means after each layer."""
    measured = [title.format(window) for title in MEASURES]
    names = ["layer", "head", "center", "alpha", *measured]
    rows = [names, ["---"] * len(names)]
    for heads in layers:
        for head, center in enumerate(heads.center):
            alpha = ""
            if heads.alpha is not None:
                alpha = f"{heads.alpha[head]:.3g}"
                if heads.alpha[head] >= ONE_HOT and torch.equal(center, center.round()):
                    alpha = "tap"
            place = "{:+.2f}, {:+.2f}".format(*center)
            rows.append([heads.layer, str(head + 1), place, alpha, *_means(heads, [head])])
        rows.append([heads.layer, "mean", "", "", *_means(heads, slice(None))])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _means(heads: Heads, some: list[int] | slice) -> list[str]:
    return [form.format(getattr(heads, name)[some].mean()) for name, form in MEASURES.values()]
