"""What each attention head does, in numbers: docs/heads.md defines them. Symbols: models/attention.py."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
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
class Layer:
    """A layer of T = H * W pixels with its mean maps over some images."""

    name: str
    grid: tuple[int, int]  # (H, W)
    maps: Tensor  # (N_h, T, T), float64
    variation: Tensor  # (N_h,), share of attention that an image moves, from 0 (positional) to 1
    center: Tensor  # (N_h, 2), (row, column) from the query: Delta of Gaussian heads
    precision: Tensor | None  # (N_h, 2, 2), inverse covariance of Gaussian heads, in 1 / pixels^2


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


def layers_of(model: nn.Module, images: Tensor) -> list[Layer]:
    """The layers of a network, averaged over images (B, C, H, W); for positional attention one image is enough.

    Raises ValueError for a network without attention among the pixels of one grid.
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
    return [_layer(layer, means[name], moved[name]) for name, layer in layers.items()]


def _maps(model: nn.Module, images: Tensor) -> Iterator[tuple[LayerMaps, Tensor]]:
    """Each layer with its maps of a few images at a time, (B, N_h, T, T), float64."""
    for some in images.split(IMAGES_AT_ONCE):
        for layer in attention_layers(model, some):
            if layer.grid == layer.keys:
                P = layer.maps.double()
                yield layer, P.expand(len(some), *P.shape[-3:])


def _layer(maps: LayerMaps, mean: Tensor, variation: Tensor) -> Layer:
    height, width = maps.grid
    grid = (height, width)
    terms = getattr(maps.module, "terms", [])
    if len(terms) != 1 or terms[0].drawn not in ("quadratic", "generalized"):
        center = mean_displacement(mean, grid)
        return Layer(
            maps.name,
            grid,
            mean,
            variation,
            center,
            None,
        )
    S = terms[0].spread.detach().double()
    if S.ndim == 1:
        S = torch.diag_embed(S[:, None].expand(-1, 2))
    Delta = terms[0].Delta.detach().double()
    return Layer(
        maps.name,
        grid,
        mean,
        variation,
        Delta,
        S @ S.transpose(1, 2),
    )


def measure(layer: Layer, window: int = 3) -> list[Head]:
    """One row per head of a layer. `window`: K, an odd number of pixels."""
    P = layer.maps
    delta = displacements(layer.grid)
    inside = delta.abs().amax(dim=-1) <= window // 2
    overlap = torch.stack([torch.minimum(P, other).sum(dim=-1).mean(dim=-1) for other in P])
    overlap.fill_diagonal_(0)
    measures = {
        "share": (P * inside).sum(dim=-1).mean(dim=-1),
        "reach": (P * delta.norm(dim=-1)).sum(dim=-1).mean(dim=-1),
        "distance": distance(P, layer.grid, window).mean(dim=-1),
        "variation": layer.variation,
        "overlap": overlap.amax(dim=-1),
    }
    if layer.precision is not None:
        smallest, largest = torch.linalg.eigvalsh(layer.precision).unbind(dim=-1)
        measures["alpha"] = (smallest + largest) / 4
        measures["condition"] = largest / smallest.clamp(min=SMALLEST)
    return [
        Head(
            layer.name,
            head,
            tuple(layer.center[head].tolist()),
            twin=int(overlap[head].argmax()),
            **{name: float(values[head]) for name, values in measures.items()},
        )
        for head in range(len(P))
    ]


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
