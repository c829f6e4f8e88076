"""What runs reached: learning curves, confusion, calibration."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib import color_sequences
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.calibration import CalibrationDisplay
from sklearn.metrics import ConfusionMatrixDisplay

from sa_zoo.analysis.head_figures import over_whole_numbers

COLORS = color_sequences["petroff10"]
MOST_NUMBERS = 20  # classes, up to which each cell of a confusion matrix shows its number

History = Sequence[dict[str, Any]]  # the lines of history.jsonl


def learning_curves(groups: Mapping[str, Sequence[History]]) -> Figure:
    """Loss and accuracy after each epoch, on training images as augmented and, where there are any, held-out ones.

    A group holds the runs of one recipe with several seeds: the line is their mean, the band from lowest to highest.
    """
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    for color, (name, runs) in zip(cycle(COLORS), groups.items(), strict=False):
        seeds = f", {len(runs)} seeds" if len(runs) > 1 else ""
        start = f"{name}{seeds}: " if name else ""
        _curves(
            loss, accuracy, runs, color=color, linestyle="--", label=f"{start}training, augmented"
        )
        held_out = [
            [line | line["validation"] for line in run if "validation" in line] for run in runs
        ]
        if all(held_out):
            _curves(
                loss,
                accuracy,
                held_out,
                color=color,
                linestyle="-",
                label=f"{start}held out",
            )
    over_whole_numbers(loss, "epoch", "loss, nats")
    over_whole_numbers(accuracy, "epoch", "accuracy, %")
    for axes in (loss, accuracy):
        axes.spines[["top", "right"]].set_visible(False)
    if len(groups) > 1:
        lines = loss.get_lines()
        figure.legend(handles=lines, loc="outside lower center", ncols=2, fontsize="small")
    else:
        loss.legend(frameon=False)
    return figure


def _curves(loss: Axes, accuracy: Axes, runs: Sequence[History], **style: Any) -> None:
    """Means over runs of the same epochs, and the range between their extremes."""
    epochs = [line["epoch"] for line in runs[0]]
    marker = "o" if len(epochs) == 1 else ""
    for axes, key, scale in ((loss, "loss", 1), (accuracy, "top1", 100)):
        values = np.array([[scale * line[key] for line in run] for run in runs])
        axes.plot(epochs, values.mean(axis=0), marker=marker, **style)
        if len(runs) > 1:
            band = (values.min(axis=0), values.max(axis=0))
            axes.fill_between(epochs, *band, color=style["color"], alpha=0.2, linewidth=0)


def confusion(counts: Sequence[Sequence[int]], classes: Sequence[str] | None = None) -> Figure:
    """Share of each true class (row) that is taken for each class (column), in percent."""
    matrix = np.array(counts)
    percent = 100 * matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    few = len(matrix) <= MOST_NUMBERS
    side = 0.42 * len(matrix) + 1.6 if few else 7.0
    figure = Figure(figsize=(side + 0.4, side), layout="constrained")
    axes = figure.subplots()
    display = ConfusionMatrixDisplay(percent, display_labels=classes if few else None)
    numbers = {
        "include_values": few,
        "values_format": ".0f",
        "text_kw": {"fontsize": 8},
    }
    display.plot(ax=axes, cmap="cividis", xticks_rotation="vertical", **numbers)
    if not few:
        axes.set(xticks=[], yticks=[])
    display.im_.set_clim(0, 100)
    axes.set(xlabel="predicted class", ylabel="true class")
    axes.set_title("test images, % of each true class")
    return figure


def reliability(curve: Mapping[str, Sequence[float]], error: float) -> Figure:
    """Accuracy of the images of each bin of confidence, and how many there are (Guo et al. 2017, arXiv:1706.04599)."""
    figure = Figure(figsize=(4.4, 4.8), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    confidence = np.array(curve["confidence"])
    display = CalibrationDisplay(np.array(curve["accuracy"]), confidence, confidence)
    display.plot(ax=upper, name="test images", color=COLORS[0])
    upper.set_title(f"expected calibration error {100 * error:.1f} %")
    upper.set(ylabel="accuracy", xlabel="", ylim=(0, 1))
    upper.grid(alpha=0.3)
    lower.bar(confidence, curve["images"], width=0.04, color=COLORS[0])
    lower.set(xlabel="confidence: probability of the predicted class", ylabel="images", xlim=(0, 1))
    return figure
