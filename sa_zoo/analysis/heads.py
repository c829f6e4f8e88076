"""What each attention head does, in numbers: docs/heads.md defines them. Symbols: models/attention.py."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor, nn

from sa_zoo.analysis.maps import LayerMaps, attention_layers
from sa_zoo.convolution.nearest import distance

IMAGES_AT_ONCE = 16


@dataclass(frozen=True)
class Layer:
    """A layer of T = H * W pixels with its mean maps over some images."""

    name: str
    grid: tuple[int, int]  # (H, W)
    maps: Tensor  # (N_h, T, T), float64
    variation: Tensor  # (N_h,), share of attention that an image moves, from 0 (positional) to 1
    Delta: Tensor | None = None  # (N_h, 2), in pixels, of Gaussian heads
    precision: Tensor | None = None  # (N_h, 2, 2), their inverse covariance, in 1 / pixels^2


@dataclass(frozen=True)
class Head:
    """One row of the table. Lengths are in pixels of the layer's grid; None: not defined for this head."""

    layer: str
    head: int
    center: tuple[float, float]  # (row, column) from the query
    alpha: float | None
    condition: float | None
    share: float  # of attention inside the window around the query
    reach: float  # mean distance from the query to what is attended to
    distance: float  # to the nearest convolution, from 0 to 2
    variation: float
    overlap: float  # with the most similar other head of the layer, from 0 to 1
    twin: int  # that head
    degenerate: str  # why, by the paper's criteria; empty if it is not


def layers_of(model: nn.Module, images: Tensor) -> list[Layer]:
    """The layers of a network, averaged over images (B, C, H, W); for positional attention one image is enough.

    Raises ValueError for a network without attention among the pixels of one grid.
    """
    found: dict[str, LayerMaps] = {}
    means: dict[str, Tensor] = {}
    moved: dict[str, Tensor] = {}
    for layer, P in _maps(model, images):
        found[layer.name] = layer
        means[layer.name] = means.get(layer.name, 0) + P.sum(dim=0) / len(images)
    for layer, P in _maps(model, images):
        away = 0.5 * (P - means[layer.name]).abs().sum(dim=-1).mean(dim=-1)  # (B, N_h)
        moved[layer.name] = moved.get(layer.name, 0) + away.sum(dim=0) / len(images)
    if not found:
        raise ValueError(
            f"model: got {type(model).__name__}, expected layers whose queries and keys are one grid"
        )
    return [_layer(layer, means[name], moved[name]) for name, layer in found.items()]


def _maps(model: nn.Module, images: Tensor) -> Iterator[tuple[LayerMaps, Tensor]]:
    """Each layer with its maps of a few images at a time, (B, N_h, T, T), float64."""
    for some in images.split(IMAGES_AT_ONCE):
        for layer in attention_layers(model, some):
            if layer.grid == layer.keys:
                P = layer.maps.double()
                yield layer, P.expand(len(some), *P.shape[-3:])


def _layer(maps: LayerMaps, mean: Tensor, variation: Tensor) -> Layer:
    Delta, precision = None, None
    terms = getattr(maps.module, "terms", [])
    if len(terms) == 1 and hasattr(terms[0], "Delta"):
        Delta, spread = terms[0].Delta.detach().double(), terms[0].spread.detach().double()
        S = spread if spread.ndim == 3 else spread[:, None, None] * torch.eye(2).double()
        precision = S @ S.transpose(1, 2)
    return Layer(maps.name, maps.grid, mean, variation, Delta, precision)


def measure(
    layer: Layer, window: int = 3, least_sharpness: float = 1e-5, worst_condition: float = 1e3
) -> list[Head]:
    """One row per head of a layer.

    Args:
        window: K, an odd number of pixels.
        least_sharpness, worst_condition: a Gaussian head is degenerate if the largest eigenvalue of its inverse
            covariance, in 1 / pixels^2, is below the first, or their ratio above the second. The defaults are those of
            the paper's code, find_degenerated_heads.
    """
    P, delta = layer.maps, displacements(layer.grid)
    inside = (delta.abs().amax(dim=-1) <= window // 2).double()
    overlap = torch.stack([torch.minimum(P, other).sum(-1).mean(-1) for other in P]).fill_diagonal_(
        0
    )
    measures = {
        "share": (P * inside).sum(-1).mean(-1),
        "reach": (P * delta.norm(dim=-1)).sum(-1).mean(-1),
        "distance": distance(P, layer.grid, window).mean(-1),
        "variation": layer.variation,
        "overlap": overlap.amax(-1),
    }
    center = mean_displacement(layer) if layer.Delta is None else layer.Delta
    rows = []
    for head, (row, column) in enumerate(center.tolist()):
        numbers = {name: float(values[head]) for name, values in measures.items()}
        alpha, condition, why = None, None, ""
        if layer.precision is not None:
            smallest, largest = torch.linalg.eigvalsh(layer.precision[head]).tolist()
            alpha, condition = (
                (smallest + largest) / 4,
                largest / max(smallest, torch.finfo(torch.float64).tiny),
            )
            uniform = "uniform" if largest < least_sharpness else ""
            why = "ill-conditioned" if condition > worst_condition else uniform
        twin = int(overlap[head].argmax())
        rows.append(
            Head(
                layer.name,
                head,
                (row, column),
                alpha,
                condition,
                twin=twin,
                degenerate=why,
                **numbers,
            )
        )
    return rows


def displacements(grid: tuple[int, int]) -> Tensor:
    """delta = k - q of all pairs of pixels: (T, T, 2), (row, column), float64"""
    axes = [torch.arange(size, dtype=torch.float64) for size in grid]
    pixels = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 1)
    return pixels[None, :] - pixels[:, None]


def mean_displacement(layer: Layer) -> Tensor:
    """Mean of delta over keys, and over the queries of the inner half of both axes, far from the border: (N_h, 2)"""
    height, width = layer.grid
    rows, columns = (slice(size // 4, size - size // 4) for size in layer.grid)
    delta = torch.einsum("hqk,qkd->hqd", layer.maps, displacements(layer.grid)).unflatten(
        1, (height, width)
    )
    return delta[:, rows, columns].mean(dim=(1, 2))


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
    ]
    names += ["distance", "varies", "most like", "degenerate"]
    lines = [names, ["---"] * len(names)]
    for layer, group in groupby(heads, lambda row: row.layer):
        rows = list(group)
        for row in rows:
            position = ["{:+.2f}, {:+.2f}".format(*row.center)]
            position += [
                "" if value is None else f"{value:.3g}" for value in (row.alpha, row.condition)
            ]
            twin = f"{row.twin + 1} ({row.overlap:.0%})"
            lines.append(
                [layer, str(row.head + 1), *position, *_means([row]), twin, row.degenerate]
            )
        lines.append([layer, "mean", "", "", "", *_means(rows), "", ""])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _means(rows: list[Head]) -> list[str]:
    share, reach, distance, variation = np.mean(
        [(r.share, r.reach, r.distance, r.variation) for r in rows], axis=0
    )
    return [f"{share:.1%}", f"{reach:.2f}", f"{distance:.2f}", f"{variation:.0%}"]
