"""Learning curves and errors of a model, and where its heads look, after Figures 3 and 4 of arXiv:1911.03584."""

import json
import math
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from safetensors.torch import load_file
from timm.utils import natural_key

from sa_zoo.metrics import read_metrics
from sa_zoo.model_folder import read_json, write_file

# Radius, in standard deviations, of the contour that encloses a share of a Gaussian in the plane -> line style.
CONTOURS = {math.sqrt(-2 * math.log(1 - share)): style for share, style in ((0.5, "solid"), (0.9, "dotted"))}
MOST = 0.8  # share of the heads whose contours fit into a figure

Layers = list[dict[str, np.ndarray]]


def draw_figures(folder: Path) -> list[Path]:
    """Draw what the folder has data for into folder/figures: learning_curve.png, confusion_matrix.png, reliability.png,
    and for attention by positions only, head_positions.png (Gaussian heads) or head_maps.png (learned ones).
    """
    history, weights, figures = folder / "history.jsonl", folder / "model.safetensors", {}
    if history.is_file() and (lines := history.read_text(encoding="utf-8").splitlines()):
        figures["learning_curve"] = learning_curve([json.loads(line) for line in lines])
    tensors = {key: value.float().numpy() for key, value in load_file(weights).items()} if weights.is_file() else {}
    if gaussian := layers_of(tensors, ("Delta", "spread")):
        figures["head_positions"] = head_positions(gaussian)
    elif learned := layers_of(tensors, ("row", "col", "w", "v")):
        figures["head_maps"] = head_maps(learned)
    if (test := read_metrics(folder).test) and test.confusion_matrix and test.calibration_curve:
        names = read_json(folder / "config.json").get("label_names") or range(len(test.confusion_matrix))
        figures["confusion_matrix"] = confusion_matrix(test.confusion_matrix, [str(name) for name in names])
        figures["reliability"] = reliability(**test.calibration_curve)
    drawn = []
    for name, figure in figures.items():
        (folder / "figures").mkdir(exist_ok=True)
        content = BytesIO()
        figure.savefig(content, format="png", dpi=120, metadata={"Software": None})  # the same bytes every time
        drawn.append(write_file(folder / "figures" / f"{name}.png", content.getvalue()))
    return drawn


def learning_curve(history: list[dict[str, Any]]) -> Figure:
    """Loss and accuracy after each epoch, on training images as augmented and, where there are any, held-out ones."""
    figure = Figure(figsize=(8, 3), layout="constrained")
    panels = figure.subplots(1, 2)
    marker = "o" if len(history) == 1 else ""
    epochs = [line["epoch"] for line in history]
    for axes, key, title, scale in zip(panels, ("loss", "top1"), ("loss", "accuracy, %"), (1, 100), strict=True):
        axes.plot(epochs, [scale * line[key] for line in history], marker=marker, label="training, augmented")
        if held_out := [(line["epoch"], scale * line["validation"][key]) for line in history if "validation" in line]:
            axes.plot(*zip(*held_out, strict=True), marker=marker, label="held out")
        axes.set(title=title, xlabel="epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False)
    return figure


def confusion_matrix(counts: list[list[int]], names: list[str]) -> Figure:
    """Images by true class (rows) and predicted class (columns), with their numbers up to 20 classes."""
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.subplots()
    axes.imshow(np.sqrt(counts), cmap="Blues")
    if len(names) <= 20:
        axes.set_xticks(range(len(names)), names, rotation=90)
        axes.set_yticks(range(len(names)), names)
        for (true, predicted), count in np.ndenumerate(counts):
            colour = "white" if true == predicted else "black"
            axes.text(predicted, true, str(count), ha="center", va="center", fontsize="small", color=colour)
    axes.set(xlabel="predicted", ylabel="true")
    return figure


def reliability(confidence: list[float], accuracy: list[float]) -> Figure:
    """Accuracy of the images in each interval of confidence, against their mean confidence."""
    figure = Figure(figsize=(3.5, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="gray", linewidth=1)
    axes.plot(confidence, accuracy, marker="o")
    axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1), aspect="equal")
    axes.grid(alpha=0.3)
    return figure


def layers_of(weights: dict[str, np.ndarray], names: tuple[str, ...]) -> Layers:
    """The arrays called `names` of each module that has all of them, in the order of the layers."""
    modules = sorted({key.rpartition(".")[0] for key in weights}, key=natural_key)
    found = ({name: weights[key] for name in names if (key := f"{module}.{name}") in weights} for module in modules)
    return [layer for layer in found if len(layer) == len(names)]


def head_positions(layers: Layers) -> Figure:
    """Centres Delta of the heads and contours of half and nine tenths of their attention; one panel per layer.

    Attention is exp(-1/2 (delta - Delta)^T S S^T (delta - Delta)) where no border cuts it, with S the spread of the
    head, (N_h,) or (N_h, 2, 2), and Delta: (N_h, 2), (row, column). All panels have one scale, that of most heads:
    every centre is in the frame, and the contours of the widest heads leave it.
    """
    columns, rows = min(len(layers), 3), math.ceil(len(layers) / 3)
    figure = Figure(figsize=(2.1 * columns, 2.3 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    contours = [_contours(layer["Delta"], layer["spread"]) for layer in layers]
    centre = max(np.abs(layer["Delta"]).max() for layer in layers)
    reach = 1 + max(centre, np.quantile(np.concatenate([np.abs(each).max((1, 2, 3)) for each in contours]), MOST))
    for index, (axes, layer) in enumerate(zip(panels, layers, strict=False)):
        heads = len(layer["Delta"])
        colours = colormaps["tab10"](range(10)) if heads <= 10 else colormaps["turbo"](np.linspace(0, 1, heads))
        for (down, across), curves, colour in zip(layer["Delta"], contours[index], colours, strict=False):
            axes.plot(across, down, ".", color=colour, markersize=4)
            for curve, style in zip(curves, CONTOURS.values(), strict=True):
                axes.plot(curve[1], curve[0], linestyle=style, color=colour, linewidth=1)
        axes.add_patch(Rectangle((-0.5, -0.5), 1, 1, color="black", zorder=3))  # the query pixel
        axes.set(title=f"layer {index + 1}", xlim=(-reach, reach), ylim=(reach, -reach), aspect="equal")
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize="small")
    for axes in panels[len(layers) :]:
        axes.set_axis_off()
    figure.supxlabel("columns from the query pixel", fontsize="medium")
    figure.supylabel("rows from the query pixel", fontsize="medium")
    return figure


def head_maps(layers: Layers) -> Figure:
    """Attention over displacements, softmax(col . v) (x) softmax(row . w); one row per layer, one column per head.

    row, col: (2 W - 1, D), (2 H - 1, D); w, v: (N_h, D). The query pixel is in the middle of each map, and no border
    of the image cuts it.
    """
    heads = max(len(layer["w"]) for layer in layers)
    figure = Figure(figsize=(0.9 * heads + 0.4, 0.95 * len(layers) + 0.3), layout="constrained")
    grid = figure.subplots(len(layers), heads, squeeze=False)
    for index, (row, layer) in enumerate(zip(grid, layers, strict=True)):
        scores = (layer["v"] @ layer["col"].T)[:, :, None] + (layer["w"] @ layer["row"].T)[:, None, :]
        attention = np.exp(scores - scores.max((1, 2), keepdims=True))  # (N_h, 2 H - 1, 2 W - 1)
        for axes, shown in zip(row, attention / attention.sum((1, 2), keepdims=True), strict=True):
            axes.imshow(shown, cmap="viridis")
            axes.plot((shown.shape[1] - 1) / 2, (shown.shape[0] - 1) / 2, "s", color="white", markersize=1.5)
            axes.set(xticks=[], yticks=[])
        row[0].set_ylabel(f"layer {index + 1}")
    for head, axes in enumerate(grid[0]):
        axes.set_title(f"head {head + 1}", fontsize="medium")
    return figure


def _contours(Delta: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """Points (row, column) of the contours of each head, where |S^T (delta - Delta)| is a radius of CONTOURS.

    (N_h, 2) and (N_h,) or (N_h, 2, 2) -> (N_h, contours, 2, points).
    """
    S = spread if spread.ndim == 3 else spread[:, None, None] * np.eye(2)
    angles = np.linspace(0, 2 * np.pi, 101)
    outline = np.linalg.inv(S.transpose(0, 2, 1)) @ np.stack([np.cos(angles), np.sin(angles)])  # (N_h, 2, points)
    return Delta[:, None, :, None] + np.array(list(CONTOURS))[:, None, None] * outline[:, None]
