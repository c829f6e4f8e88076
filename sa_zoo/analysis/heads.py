"""What each attention head does, in numbers: docs/heads.md defines them. Symbols: models/attention.py."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from sa_zoo.analysis.maps import LayerMaps, Pixel, attention_layers
from sa_zoo.convolution.nearest import distance

IMAGES_AT_ONCE = 16
SMALLEST = 1e-300  # of an eigenvalue that a condition is computed from


@dataclass(frozen=True)
class Head:
    """One row of the table. Lengths are in pixels of the layer's grid; None: not defined for this head."""

    layer: str
    head: int
    center: tuple[float, float]  # (row, column) from the query
    share: float  # of attention inside the window around the query
    reach: float  # mean distance from the query to what is attended to
    distance: float  # to the nearest convolution, from 0 to 2
    variation: float
    overlap: float  # with the most similar other head of the layer, from 0 to 1
    twin: int  # that head
    alpha: float | None = None
    condition: float | None = None


def layers_of(model: nn.Module, images: Tensor) -> list[LayerMaps]:
    """The layers of a network with their mean maps over images (B, C, H, W), in float64, and what images move of them.

    For positional attention one image is enough. Raises ValueError for a network without attention among the pixels of
    one grid.
    """
    layers: dict[str, LayerMaps] = {}
    means: dict[str, Any] = defaultdict(float)
    moved: dict[str, Any] = defaultdict(float)
    for layer, P in _maps(model, images):
        layers[layer.name] = layer
        means[layer.name] += P.sum(dim=0) / len(images)
    for layer, P in _maps(model, images):
        away = 0.5 * (P - means[layer.name]).abs().sum(dim=-1).mean(dim=-1)  # (B, N_h)
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
    for some in images.split(IMAGES_AT_ONCE):
        for layer in attention_layers(model, some):
            if layer.grid == layer.keys:
                P = layer.maps.double()
                yield layer, P.expand(len(some), *P.shape[-3:])


def measure(layer: LayerMaps, window: int = 3) -> list[Head]:
    """One row per head of a layer of `layers_of`. `window`: K, an odd number of pixels."""
    P = layer.maps
    height, width = layer.grid
    delta = displacements(layer.grid)
    inside = delta.abs().amax(dim=-1) <= window // 2
    overlap = torch.stack([torch.minimum(P, other).sum(dim=-1).mean(dim=-1) for other in P])
    overlap.fill_diagonal_(0)
    measures = {
        "share": (P * inside).sum(dim=-1).mean(dim=-1),
        "reach": (P * delta.norm(dim=-1)).sum(dim=-1).mean(dim=-1),
        "distance": distance(P, (height, width), window).mean(dim=-1),
        "variation": layer.variation,
        "overlap": overlap.amax(dim=-1),
    }
    center = mean_displacement(P, layer.grid)
    terms = getattr(layer.module, "terms", [])
    if len(terms) == 1 and terms[0].drawn in ("quadratic", "generalized"):
        center = terms[0].Delta
        measures |= _shape(terms[0].spread.detach().double())
    return [
        Head(
            layer.name,
            head,
            tuple(center[head].tolist()),
            twin=int(overlap[head].argmax()),
            **{name: float(values[head]) for name, values in measures.items()},
        )
        for head in range(layer.heads)
    ]


def _shape(spread: Tensor) -> dict[str, Tensor]:
    """alpha and condition of Gaussian heads, from the inverse covariance S S^T: (N_h,) or (N_h, 2, 2) -> (N_h,)"""
    S = spread
    if S.ndim == 1:
        S = torch.diag_embed(S[:, None].expand(-1, 2))
    smallest, largest = torch.linalg.eigvalsh(S @ S.transpose(1, 2)).unbind(dim=-1)
    return {
        "alpha": (smallest + largest) / 4,
        "condition": largest / smallest.clamp(min=SMALLEST),
    }


def displacements(grid: Pixel) -> Tensor:
    """delta = k - q of all pairs of pixels: (T, T, 2), (row, column), float64"""
    axes = [torch.arange(size, dtype=torch.float64) for size in grid]
    pixels = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 1)
    return pixels[None, :] - pixels[:, None]


def mean_displacement(P: Tensor, grid: Pixel) -> Tensor:
    """Mean of delta over keys, and over the queries of the inner half of both axes, far from the border: (N_h, 2)"""
    rows, columns = (slice(size // 4, size - size // 4) for size in grid)
    delta = torch.einsum("hqk,qkd->hqd", P, displacements(grid))
    return delta.unflatten(1, grid)[:, rows, columns].mean(dim=(1, 2))


def table(heads: list[Head], window: int) -> str:
    """Rows as Markdown, and after those of a layer their mean."""
    names = [
        "layer",
        "head",
        "center",
        "alpha",
        "condition",
        f"inside {window} x {window}",
        "reach",
        "distance",
        "varies",
        "most like",
    ]
    lines = [names, ["---"] * len(names)]
    for layer, group in groupby(heads, lambda row: row.layer):
        rows = list(group)
        for row in rows:
            center = "{:+.2f}, {:+.2f}".format(*row.center)
            twin = f"{row.twin + 1} ({row.overlap:.0%})"
            gaussian = [_number(row.alpha), _number(row.condition)]
            lines.append([layer, str(row.head + 1), center, *gaussian, *_means([row]), twin])
        lines.append([layer, "mean", "", "", "", *_means(rows), ""])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _means(rows: list[Head]) -> list[str]:
    share = fmean(row.share for row in rows)
    reach = fmean(row.reach for row in rows)
    distance = fmean(row.distance for row in rows)
    variation = fmean(row.variation for row in rows)
    return [f"{share:.1%}", f"{reach:.2f}", f"{distance:.2f}", f"{variation:.0%}"]
