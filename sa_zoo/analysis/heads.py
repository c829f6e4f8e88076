"""Measures of attention heads, defined in docs/heads.md. Symbols: models/attention.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from sa_zoo.analysis.maps import LayerMaps
from sa_zoo.convolution.convolutional import ConvolutionalAttention
from sa_zoo.convolution.theorem import spread_matrices

WINDOW = 3  # side of the window around a query, in pixels
MOST_QUERIES = 16  # per axis; in larger grids, evenly spaced queries are measured


@dataclass(frozen=True)
class Heads:
    """Measures of the heads of one layer, (N_h,) each. Lengths are in pixels of the layer's keys."""

    layer: str
    share: Tensor  # of attention inside the window around the query
    reach: Tensor  # mean attention distance (Dosovitskiy et al., ICLR 2021, arXiv:2010.11929)
    center: Tensor | None  # Delta, (N_h, 2), and alpha of Gaussian heads
    alpha: Tensor | None


def measure(layer: LayerMaps) -> Heads:
    """The measures of a layer, averaged over queries and images."""
    shares = []
    distances = []
    keys = torch.cartesian_prod(*(torch.arange(size).double() for size in layer.keys))
    for query in product(*(evenly_spaced(size) for size in layer.grid)):
        P = layer.at(query).double().cpu().flatten(-2)
        if not layer.positional:
            P = P.mean(dim=0)
        delta = keys - torch.tensor(layer.origin(query))
        inside = delta.abs().amax(dim=1) <= WINDOW // 2
        shares.append(P[:, inside].sum(dim=1))
        distances.append(P @ delta.norm(dim=1))
    center, alpha = _gaussian(layer)
    share = torch.stack(shares).mean(dim=0)
    reach = torch.stack(distances).mean(dim=0)
    return Heads(layer.name, share, reach, center, alpha)


def evenly_spaced(size: int) -> list[int]:
    """At most MOST_QUERIES indices below `size`, each in the middle of an equal part."""
    count = min(size, MOST_QUERIES)
    return [(2 * part + 1) * size // (2 * count) for part in range(count)]


def _gaussian(layer: LayerMaps) -> tuple[Tensor | None, Tensor | None]:
    """Delta and alpha of Gaussian heads; alpha is half of the mean eigenvalue of S S^T."""
    if layer.kind not in ("quadratic", "generalized"):
        return None, None
    if isinstance(layer.module, ConvolutionalAttention):
        return layer.module.Delta.detach(), layer.module.alpha.detach()
    term = layer.module.terms[0]
    S = spread_matrices(term.spread.detach().double())
    return term.Delta.detach(), S.square().sum(dim=(1, 2)) / 4


def heads_table(layers: Sequence[Heads]) -> str:
    """Markdown with a row per head, and a row of means after each layer."""
    names = ["layer", "head", "center", "alpha", f"inside {WINDOW} x {WINDOW}", "reach"]
    rows = [names, ["---"] * len(names)]
    for heads in layers:
        for head, (share, reach) in enumerate(zip(heads.share, heads.reach, strict=True)):
            center = alpha = ""
            if heads.center is not None and heads.alpha is not None:
                center = "{:+.2f}, {:+.2f}".format(*heads.center[head])
                alpha = f"{heads.alpha[head]:.3g}"
            rows.append([heads.layer, str(head + 1), center, alpha, f"{share:.1%}", f"{reach:.2f}"])
        means = [f"{heads.share.mean():.1%}", f"{heads.reach.mean():.2f}"]
        rows.append([heads.layer, "mean", "", "", *means])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
