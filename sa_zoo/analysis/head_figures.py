"""Centers and maps of attention heads, after the figures of Cordonnier, Loukas, Jaggi (ICLR 2020, arXiv:1911.03584).

Displacements have rows downwards and columns to the right, as in an image. A square marks the query pixel.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib import color_sequences, colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from sa_zoo.convolution.theorem import spread_matrices

MARGIN = 2  # pixels around all centers
SHARES = {0.5: "solid", 0.9: "dotted"}  # of attention inside a contour -> line style

Layers = Sequence[dict[str, Tensor]]
Color = Any  # of matplotlib


def figure_of(size: tuple[float, float], rows: int = 1, columns: int = 1, **options: Any) -> Figure:
    """A figure of (width, height) inches, with a grid of panels."""
    figure = Figure(figsize=size, layout="constrained")
    figure.subplots(rows, columns, **options)
    return figure


def head_colors(heads: int) -> Sequence[Color]:
    """Up to ten colors, distinct with color vision deficiencies too; a gradient for more heads."""
    if heads <= 10:
        return color_sequences["petroff10"][:heads]
    return list(colormaps["viridis"](np.linspace(0, 0.9, heads)))


def head_positions(layers: Layers) -> Figure:
    """Centers Delta of the heads and contours of half and nine tenths of their attention, one panel per layer (Fig. 4).

    Away from borders, attention is proportional to exp(-1/2 (delta - Delta)^T S S^T (delta - Delta)), with S the spread
    of the head, (N_h,) or (N_h, 2, 2), and Delta: (N_h, 2), (row, column). All panels have the same scale: all centers
    are inside.
    """
    outlines = torch.cat([_contours(layer["Delta"], layer["spread"]) for layer in layers])
    figure, heads = _heads_by_layer([layer["Delta"] for layer in layers])
    for (axes, color, center), contours in zip(heads, outlines, strict=True):
        row, column = center
        axes.plot(column, row, ".", color=color, markersize=5)
        for curve, style in zip(contours, SHARES.values(), strict=True):
            axes.plot(curve[1], curve[0], linestyle=style, color=color, linewidth=1)
    return figure


def head_paths(layers: Layers) -> Figure:
    """Centers of the heads from initialization (circle) to the last epoch (dot), one panel per layer (Fig. 3).

    Each layer has Delta: (epochs + 1, N_h, 2).
    """
    figure, heads = _heads_by_layer([layer["Delta"] for layer in layers])
    for axes, color, path in heads:
        down, across = path.T
        axes.plot(across[0], down[0], "o", color=color, markersize=4, fillstyle="none")
        axes.plot(across, down, "-o", color=color, markersize=4, linewidth=1, markevery=[-1])
    return figure


def _heads_by_layer(layers: Sequence[Tensor]) -> tuple[Figure, list[tuple[Axes, Color, Tensor]]]:
    """A square of displacements per layer, rows downwards, with the numbers of the heads at their last centers.

    Centers: (N_h, 2) or (epochs, N_h, 2). A square extends MARGIN pixels beyond all centers. Returns the figure, and
    the panel, color and centers of each head.
    """
    reach = MARGIN + max(float(centers.abs().max()) for centers in layers)
    columns = min(len(layers), 3)
    rows = math.ceil(len(layers) / columns)
    size = (max(2.5 * columns + 0.3, 3.6), max(2.6 * rows + 0.2, 3.6))
    figure = figure_of(size, rows, columns)
    heads = []
    for axes in figure.axes[len(layers) :]:
        axes.set_axis_off()
    for number, (axes, centers) in enumerate(zip(figure.axes, layers, strict=False), start=1):
        axes.add_patch(Rectangle((-0.5, -0.5), 1, 1, facecolor="0.85", edgecolor="black", zorder=1))
        axes.set(
            title=f"layer {number}", xlim=(-reach, reach), ylim=(reach, -reach), aspect="equal"
        )
        axes.locator_params(integer=True, nbins=6)
        axes.grid(alpha=0.3)
        for head, color in enumerate(head_colors(centers.shape[-2])):
            path = centers[..., head, :]
            row, column = path.reshape(-1, 2)[-1]
            axes.text(column, row, f" {head + 1}", fontsize=7, color=color, clip_on=True)
            heads.append((axes, color, path))
    figure.supxlabel("columns from the query, in pixels of the layer", fontsize="medium")
    figure.supylabel("rows from the query, in pixels of the layer", fontsize="medium")
    return figure, heads


def head_maps(layers: Sequence[Tensor]) -> Figure:
    """Attention of the middle pixel, one row per layer, one column per head (Figs. 5, 6). layers: (N_h, H, W) each.

    Each map has its own scale, from zero (dark) to its maximum (bright).
    """
    heads = max(map(len, layers))
    size = (0.9 * heads + 0.5, 0.95 * len(layers) + 0.3)
    figure = figure_of(size, len(layers), heads)
    for index, axes in enumerate(figure.axes):
        layer, head = divmod(index, heads)
        if layer == 0:
            axes.set_title(f"head {head + 1}", fontsize="medium")
        if head == 0:
            axes.set_ylabel(f"layer {layer + 1}")
        if head >= len(layers[layer]):
            axes.set_axis_off()
            continue
        axes.imshow(layers[layer][head].numpy(), cmap="cividis", vmin=0)
        axes.set(xticks=[], yticks=[])
        height, width = layers[layer].shape[1:]
        corner = (width // 2 - 0.5, height // 2 - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="red", linewidth=1.2))
    return figure


def _contours(Delta: Tensor, spread: Tensor) -> Tensor:
    """Points (row, column) of each head's contours: |S^T (delta - Delta)| equals the radius of one of SHARES.

    (N_h, 2) and (N_h,) or (N_h, 2, 2) -> (N_h, contours, 2, points).
    """
    S = spread_matrices(spread)
    S = S + 1e-9 * torch.eye(2)  # gives uniform heads a contour too, far outside
    angles = torch.linspace(0, 2 * math.pi, 101, dtype=S.dtype)
    circle = torch.stack([angles.cos(), angles.sin()])
    outline = torch.linalg.inv(S.mT) @ circle  # (N_h, 2, points)
    shares = torch.tensor(list(SHARES), dtype=S.dtype)
    radii = (-2 * torch.log1p(-shares)).sqrt()  # of a Gaussian in the plane
    return Delta[:, None, :, None] + radii[:, None, None] * outline[:, None]
