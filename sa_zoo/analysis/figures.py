"""Figures of a model folder, drawn from its files: learning curves, and where attention heads look.

After Figures 3 and 4 of Cordonnier, Loukas, Jaggi (ICLR 2020, https://arxiv.org/abs/1911.03584).
"""

import json
import math
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse, Rectangle
from safetensors.numpy import load_file

from sa_zoo.model_folder import write_file

# Share of a head's attention inside a contour -> how the contour is drawn.
CONTOURS = {0.5: "solid", 0.9: "dotted"}
PANEL = 2.1  # inches

Layers = list[dict[str, np.ndarray]]

MOST = 0.8  # share of the heads whose contours a figure has room for


def draw_figures(folder: Path) -> list[Path]:
    """Draw what the folder has data for into folder/figures: learning_curve.png, and where attention is by
    position alone head_positions.png (Gaussian heads) or head_maps.png (learned ones)."""
    drawn = []
    if (folder / "history.jsonl").is_file():
        lines = (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()
        if history := [json.loads(line) for line in lines]:
            drawn.append(_save(learning_curve(history), folder / "figures" / "learning_curve.png"))
    if (folder / "model.safetensors").is_file():
        weights = load_file(folder / "model.safetensors")
        if gaussian := layers_of(weights, ("Delta", "spread")):
            drawn.append(_save(head_positions(gaussian), folder / "figures" / "head_positions.png"))
        elif learned := layers_of(weights, ("row", "col", "w", "v")):
            drawn.append(_save(head_maps(learned), folder / "figures" / "head_maps.png"))
    return drawn


def learning_curve(history: list[dict[str, Any]]) -> Figure:
    """Loss and accuracy after each epoch, on training images as augmented and, where there are any, held-out ones."""
    figure = Figure(figsize=(8, 3), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, key, title, scale in zip(panels, ("loss", "top1"), ("loss", "accuracy, %"), (1, 100), strict=True):
        epochs = [line["epoch"] for line in history]
        marker = "o" if len(history) == 1 else ""
        axes.plot(epochs, [scale * line[key] for line in history], marker=marker, label="training, augmented")
        held_out = [(line["epoch"], scale * line["validation"][key]) for line in history if "validation" in line]
        if held_out:
            axes.plot(*zip(*held_out, strict=True), marker=marker, label="held out")
        axes.set(title=title, xlabel="epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False)
    return figure


def layers_of(weights: dict[str, np.ndarray], names: tuple[str, ...]) -> Layers:
    """The arrays called `names` of each module that has all of them, in the order of the layers."""
    modules = [key.rpartition(".")[0] for key in weights if key.endswith(f".{names[0]}")]
    modules = [module for module in modules if all(f"{module}.{name}" in weights for name in names)]
    modules.sort(key=lambda module: [int(part) if part.isdigit() else part for part in module.split(".")])
    return [{name: weights[f"{module}.{name}"] for name in names} for module in modules]


def head_positions(layers: Layers) -> Figure:
    """Centre Delta of each head and the contours that hold half and nine tenths of its attention; one panel a layer.

    Attention is exp(-1/2 (delta - Delta)^T S S^T (delta - Delta)) where no border cuts it, with S the spread of the
    head, (N_h,) or (N_h, 2, 2), and Delta: (N_h, 2), (row, column). All panels have one scale, that of most heads:
    every centre is in the frame, and the contours of the widest heads leave it.
    """
    figure, panels = _panels(len(layers))
    centres = np.concatenate([np.abs(layer["Delta"]).max(axis=1) for layer in layers])
    radii = np.concatenate([_radii(layer["spread"]).max(axis=1) for layer in layers])
    reach = 1 + max(float(centres.max()), float(np.quantile(centres + radii, MOST)))
    for index, (axes, layer) in enumerate(zip(panels, layers, strict=True)):
        for head, (centre, ellipses) in enumerate(_heads(layer)):
            colour = _colour(head, len(layer["Delta"]))
            axes.plot(*centre, ".", color=colour, markersize=4)
            for ellipse in ellipses:
                ellipse.set_edgecolor(colour)
                axes.add_patch(ellipse)
        axes.add_patch(Rectangle((-0.5, -0.5), 1, 1, color="black", zorder=3))  # the query pixel
        axes.set(title=f"layer {index + 1}", xlim=(-reach, reach), ylim=(reach, -reach), aspect="equal")
    figure.supxlabel("columns from the query pixel", fontsize="medium")
    figure.supylabel("rows from the query pixel", fontsize="medium")
    return figure


def head_maps(layers: Layers) -> Figure:
    """Attention over displacements, softmax(col . v) (x) softmax(row . w); a row a layer, a column a head.

    row, col: (2 W - 1, D), (2 H - 1, D); w, v: (N_h, D). The query pixel is in the middle of each map, and no border
    of the image cuts it.
    """
    heads = max(len(layer["w"]) for layer in layers)
    figure = Figure(figsize=(0.9 * heads + 0.4, 0.95 * len(layers) + 0.3), layout="constrained")
    grid = figure.subplots(len(layers), heads, squeeze=False)
    for index, (row, layer) in enumerate(zip(grid, layers, strict=True)):
        down, across = _softmax(layer["v"] @ layer["col"].T), _softmax(layer["w"] @ layer["row"].T)
        for head, axes in enumerate(row):
            shown = np.outer(down[head], across[head])
            axes.imshow(shown, cmap="viridis")
            axes.plot((shown.shape[1] - 1) / 2, (shown.shape[0] - 1) / 2, "s", color="white", markersize=1.5)
            axes.set(xticks=[], yticks=[])
        row[0].set_ylabel(f"layer {index + 1}")
    for head, axes in enumerate(grid[0]):
        axes.set_title(f"head {head + 1}", fontsize="medium")
    return figure


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    columns = min(count, 3)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(PANEL * columns, (PANEL + 0.2) * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels[count:]:
        axes.set_axis_off()
    for axes in panels[:count]:
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize="small")
    return figure, panels[:count]


def _heads(layer: dict[str, np.ndarray]) -> Iterator[tuple[tuple[float, float], list[Ellipse]]]:
    """Of each head its centre (x, y) and its contours."""
    for (down, across), axis_lengths, angle in zip(layer["Delta"], *_axes_of(layer["spread"]), strict=True):
        yield (
            (across, down),
            [
                Ellipse(
                    (across, down), *(2 * axis_lengths * _quantile(share)), angle=angle, fill=False, linestyle=style
                )
                for share, style in CONTOURS.items()
            ],
        )


def _axes_of(spread: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Standard deviations along the two axes of each head, (N_h, 2), and the angle of the first from x, in degrees."""
    if spread.ndim == 1:
        return np.abs(1 / spread)[:, None].repeat(2, axis=1), np.zeros(len(spread))
    covariance = np.linalg.inv(spread @ spread.transpose(0, 2, 1))
    variances, vectors = np.linalg.eigh(covariance)  # vectors[:, :, 0] is (row, column) of the first axis
    return np.sqrt(variances), np.degrees(np.arctan2(vectors[:, 0, 0], vectors[:, 1, 0]))


def _radii(spread: np.ndarray) -> np.ndarray:
    return _axes_of(spread)[0] * _quantile(max(CONTOURS))


def _quantile(share: float) -> float:
    """Radius, in standard deviations, that holds a share of a Gaussian in the plane."""
    return math.sqrt(-2 * math.log(1 - share))


def _softmax(scores: np.ndarray) -> np.ndarray:
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def _colour(head: int, heads: int) -> Any:
    return colormaps["tab10"](head) if heads <= 10 else colormaps["turbo"](head / (heads - 1))


def _save(figure: Figure, path: Path) -> Path:
    """Write as PNG: the same bytes for the same figure."""
    path.parent.mkdir(exist_ok=True)
    content = BytesIO()
    figure.savefig(content, format="png", dpi=120, metadata={"Software": None})
    return write_file(path, content.getvalue())
