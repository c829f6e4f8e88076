"""What each attention head does, in numbers: docs/heads.md defines them. Symbols: models/attention.py."""

from collections.abc import Iterator
from dataclasses import dataclass

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
    """The layers of a network, averaged over images (B, C, H, W); positional layers look at the first one only.

    Raises ValueError for a network without attention among the pixels of one grid.
    """
    first = [layer for layer in attention_layers(model, images[:1]) if layer.grid == layer.keys]
    if not first:
        raise ValueError(f"model: got {type(model).__name__}, expected layers whose queries and keys are one grid")
    if all(layer.positional for layer in first):
        return [_layer(layer, layer.maps.double(), torch.zeros(layer.heads)) for layer in first]
    means = [torch.zeros(layer.heads, *[layer.grid[0] * layer.grid[1]] * 2, dtype=torch.float64) for layer in first]
    for mean, P in _maps(model, images, first, means):
        mean += P.sum(dim=0) / len(images)
    moved = [torch.zeros(layer.heads, dtype=torch.float64) for layer in first]
    for index, (mean, P) in enumerate(_maps(model, images, first, means)):
        moved[index % len(first)] += 0.5 * (P - mean).abs().sum(dim=-1).mean(dim=-1).sum(dim=0) / len(images)
    return [_layer(*parts) for parts in zip(first, means, moved, strict=True)]


def _maps(
    model: nn.Module, images: Tensor, first: list[LayerMaps], means: list[Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """For a few images at a time and each layer, its mean and its maps (B, N_h, T, T) or (1, N_h, T, T), float64."""
    names = {layer.name: mean for layer, mean in zip(first, means, strict=True)}
    for some in images.split(IMAGES_AT_ONCE):
        for layer in attention_layers(model, some):
            if layer.name in names:
                P = layer.maps.double()
                yield names[layer.name], P if P.ndim == 4 else P.expand(len(some), *P.shape)


def _layer(maps: LayerMaps, mean: Tensor, variation: Tensor) -> Layer:
    Delta, precision = None, None
    terms = getattr(maps.module, "terms", [])
    if len(terms) == 1 and hasattr(terms[0], "Delta"):
        Delta, spread = terms[0].Delta.detach().double(), terms[0].spread.detach().double()
        S = spread if spread.ndim == 3 else spread[:, None, None] * torch.eye(2).double()
        precision = S @ S.transpose(1, 2)
    return Layer(maps.name, maps.grid, mean, variation, Delta, precision)


def measure(layer: Layer, window: int = 3, least_sharpness: float = 1e-5, worst_condition: float = 1e3) -> list[Head]:
    """One row per head of a layer.

    Args:
        window: K, an odd number of pixels.
        least_sharpness, worst_condition: a Gaussian head is degenerate if the largest eigenvalue of its inverse
            covariance, in 1 / pixels^2, is below the first, or their ratio above the second. The defaults are those of
            the paper's code, find_degenerated_heads.
    """
    P, delta = layer.maps, displacements(layer.grid)
    away = distance(P, layer.grid, window).mean(dim=1)
    inside = (delta.abs().amax(dim=-1) <= window // 2).double()
    share, reach = (P * inside).sum(-1).mean(-1), (P * delta.norm(dim=-1)).sum(-1).mean(-1)
    overlap = torch.stack([torch.minimum(P, other).sum(-1).mean(-1) for other in P]).fill_diagonal_(-1)
    center = mean_displacement(layer) if layer.Delta is None else layer.Delta
    rows = []
    for head in range(len(P)):
        alpha = condition = None
        degenerate = ""
        if layer.precision is not None:
            smallest, largest = torch.linalg.eigvalsh(layer.precision[head]).tolist()
            alpha, condition = (smallest + largest) / 4, largest / max(smallest, torch.finfo(torch.float64).tiny)
            if condition > worst_condition:
                degenerate = "ill-conditioned"
            elif largest < least_sharpness:
                degenerate = "uniform"
        row, column = center[head].tolist()
        twin = int(overlap[head].argmax())
        rows.append(
            Head(
                layer=layer.name,
                head=head,
                center=(row, column),
                alpha=alpha,
                condition=condition,
                share=float(share[head]),
                reach=float(reach[head]),
                distance=float(away[head]),
                variation=float(layer.variation[head]),
                overlap=max(float(overlap[head, twin]), 0.0),  # -1: the only head
                twin=twin,
                degenerate=degenerate,
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
    delta = torch.einsum("hqk,qkd->hqd", layer.maps, displacements(layer.grid)).unflatten(1, (height, width))
    return delta[:, rows, columns].mean(dim=(1, 2))


def table(heads: list[Head], window: int) -> str:
    """Rows as Markdown."""
    names = ["layer", "head", "centre", "alpha", "condition", f"inside {window} x {window}", "reach"]
    names += ["distance", "varies", "most like", "degenerate"]
    lines = [names, ["---"] * len(names)]
    for row in heads:
        lines.append(
            [row.layer, str(row.head + 1), "{:+.2f}, {:+.2f}".format(*row.center)]
            + ["" if value is None else f"{value:.3g}" for value in (row.alpha, row.condition)]
            + [f"{row.share:.1%}", f"{row.reach:.2f}", f"{row.distance:.2f}", f"{row.variation:.0%}"]
            + [f"{row.twin + 1} ({row.overlap:.0%})", row.degenerate]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
