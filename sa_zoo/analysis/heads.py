"""Measures of attention heads, defined in docs/heads.md. Symbols: models/attention.py."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sa_zoo.analysis.maps import LayerMaps, Pixel, attention_layers
from sa_zoo.convolution.nearest import distance
from sa_zoo.convolution.theorem import spread_matrices
from sa_zoo.models.attention import Attention
from sa_zoo.models.positions import ONE_HOT
from sa_zoo.vit.layers import displacements_in

MAPS_AT_ONCE = 16  # images
MEASURES = {  # columns of the table with a mean per layer: title -> measure, format
    "inside {0} x {0}": ("share", "{:.1%}"),
    "reach": ("reach", "{:.2f}"),
    "distance": ("distance", "{:.2f}"),
    "varies": ("variation", "{:.0%}"),
}


@dataclass(frozen=True)
class Heads:
    """Measures of the heads of one layer, (N_h,) each. Lengths are in pixels of the layer's grid."""

    layer: str
    center: Tensor  # (N_h, 2), (row, column) from the query
    share: Tensor  # of attention inside the window around the query
    reach: Tensor  # mean distance from the query to the attended pixels
    distance: Tensor  # to the nearest convolution, from 0 to 2
    variation: Tensor | None  # as in LayerMaps
    overlap: Tensor  # with the most similar other head of the layer, from 0 to 1
    twin: Tensor  # that head
    alpha: Tensor | None = None  # of Gaussian heads, as is condition
    condition: Tensor | None = None


def layers_of(model: nn.Module, images: Tensor) -> list[LayerMaps]:
    """The layers of a network with mean maps over images (B, C, H, W), in float64, and their variation between images.

    Positional attention needs only one image. Raises ValueError for a network without attention among the pixels of one
    grid.
    """
    layers = {}
    means: dict[str, Any] = defaultdict(float)
    moved: dict[str, Any] = defaultdict(float)
    for layer, P in _maps(model, images):
        layers[layer.name] = layer
        means[layer.name] += P.sum(dim=0) / len(images)
    for layer, P in _maps(model, images):
        away = 0.5 * per_head((P - means[layer.name]).abs())  # (B, N_h)
        moved[layer.name] += away.sum(dim=0) / len(images)
    if not layers:
        raise ValueError(
            f"model: got {type(model).__name__}, expected layers whose queries and keys are one grid"
        )
    return [
        replace(layer, factors=(means[name],), variation=moved[name])
        for name, layer in layers.items()
    ]


def _maps(model: nn.Module, images: Tensor) -> Iterator[tuple[LayerMaps, Tensor]]:
    """Each layer with its maps of a few images at a time, (B, N_h, T, T), float64."""
    for some in images.split(MAPS_AT_ONCE):
        for layer in attention_layers(model, some):
            if layer.grid == layer.keys:
                P = layer.maps.double()
                yield layer, P.expand(len(some), *P.shape[-3:])


def measure(layer: LayerMaps, window: int = 3) -> Heads:
    """The measures of a layer of `layers_of`. `window`: K, an odd number of pixels."""
    P = layer.maps
    height, width = layer.grid
    delta = displacements_in((height, width)).double()
    inside = delta.abs().amax(dim=-1) <= window // 2
    overlaps = torch.stack([per_head(torch.minimum(P, other)) for other in P])
    overlap, twin = overlaps.fill_diagonal_(0).max(dim=-1)
    center = mean_displacement(P, delta, layer.grid)
    shape = {}
    if isinstance(layer.module, Attention) and layer.kind in ("quadratic", "generalized"):
        (term,) = layer.module.terms
        center = term.Delta.detach()
        S = spread_matrices(term.spread.detach().double())
        # The eigenvalues of S S^T are the squared singular values of S; their sum is that of the squared entries.
        shape["alpha"] = S.square().sum(dim=(1, 2)) / 4
        shape["condition"] = torch.linalg.cond(S).square()
    return Heads(
        layer.name,
        center,
        share=per_head(P * inside),
        reach=per_head(P * delta.norm(dim=-1)),
        distance=distance(P, (height, width), window).mean(dim=-1),
        variation=layer.variation,
        overlap=overlap,
        twin=twin,
        **shape,
    )


def per_head(x: Tensor) -> Tensor:
    """Mean over queries of the sum over keys: (.., N_h, T, T) -> (.., N_h)"""
    return x.sum(dim=-1).mean(dim=-1)


def mean_displacement(P: Tensor, delta: Tensor, grid: Pixel) -> Tensor:
    """Mean of delta over keys, and over the queries of the inner half of both axes, far from the border: (N_h, 2)"""
    rows, columns = (slice(size // 4, size - size // 4) for size in grid)
    mean = torch.einsum("hqk,qkd->hqd", P, delta)
    return mean.unflatten(1, grid)[:, rows, columns].mean(dim=(1, 2))


def heads_table(layers: Sequence[Heads], window: int) -> str:
    """Markdown with a row per head, and a row of means after each layer."""
    measured = [title.format(window) for title in MEASURES]
    names = ["layer", "head", "center", "alpha", "condition", *measured, "most like"]
    rows = []
    for heads in layers:
        for head, center in enumerate(heads.center):
            row = [heads.layer, str(head + 1), "{:+.2f}, {:+.2f}".format(*center), "", ""]
            if heads.alpha is not None and heads.condition is not None:
                row[3:] = [f"{heads.alpha[head]:.3g}", f"{heads.condition[head]:.3g}"]
                if heads.alpha[head] >= ONE_HOT and torch.equal(center, center.round()):
                    row[3] = "tap"
            twin = f"{heads.twin[head] + 1} ({heads.overlap[head]:.0%})"
            rows.append([*row, *_means(heads, [head]), twin])
        rows.append([heads.layer, "mean", "", "", "", *_means(heads, slice(None)), ""])
    return markdown(names, rows)


def markdown(names: list[str], rows: list[list[str]]) -> str:
    """A table."""
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _means(heads: Heads, some: list[int] | slice) -> list[str]:
    return [form.format(getattr(heads, name)[some].mean()) for name, form in MEASURES.values()]
