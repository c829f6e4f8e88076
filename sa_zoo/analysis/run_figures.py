"""Figures of a run: learning curves, confusion, calibration."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import color_sequences
from matplotlib.figure import Figure
from sklearn.calibration import CalibrationDisplay
from sklearn.metrics import ConfusionMatrixDisplay

from sa_zoo.analysis.head_figures import figure_of, over_whole_numbers

COLOR = color_sequences["petroff10"][0]
MOST_NUMBERS = 20  # classes; larger confusion matrices show no numbers

History = Sequence[dict[str, Any]]  # the lines of history.jsonl


def learning_curves(history: History) -> Figure:
    """Loss and accuracy after each epoch, on augmented training images and, if any, held-out images."""
    figure = figure_of((8, 3.2), columns=2)
    loss, accuracy = figure.axes
    held_out = [line | line["validation"] for line in history if "validation" in line]
    for name, style, lines in (("training, augmented", "--", history), ("held out", "-", held_out)):
        if not lines:
            continue
        epochs = [line["epoch"] for line in lines]
        marker = "o" if len(epochs) == 1 else None
        look: Any = {"color": COLOR, "linestyle": style, "label": name, "marker": marker}
        loss.plot(epochs, [line["loss"] for line in lines], **look)
        accuracy.plot(epochs, [100 * line["top1"] for line in lines], **look)
    over_whole_numbers(loss, "epoch", "loss, nats")
    over_whole_numbers(accuracy, "epoch", "accuracy, %")
    loss.legend(frameon=False)
    return figure


def confusion(counts: Sequence[Sequence[int]], classes: Sequence[str] | None) -> Figure:
    """Share of each true class (row) predicted as each class (column), in percent."""
    matrix = np.array(counts)
    percent = 100 * matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    few = len(matrix) <= MOST_NUMBERS
    side = 0.42 * len(matrix) + 1.6 if few else 7.0
    figure = figure_of((side + 0.4, side))
    (axes,) = figure.axes
    display = ConfusionMatrixDisplay(percent, display_labels=classes if few else None)
    display.plot(
        ax=axes,
        cmap="cividis",
        xticks_rotation="vertical",
        include_values=few,
        values_format=".0f",
        text_kw={"fontsize": 8},
    )
    if not few:
        axes.set(xticks=[], yticks=[])
    display.im_.set_clim(0, 100)
    title = "test images, % of each true class"
    axes.set(xlabel="predicted class", ylabel="true class", title=title)
    return figure


def reliability(curve: Mapping[str, Sequence[float]], error: float) -> Figure:
    """Accuracy and number of images per bin of confidence (Guo et al. 2017, arXiv:1706.04599)."""
    figure = figure_of((4.4, 4.8), rows=2, sharex=True, height_ratios=(3, 1))
    upper, lower = figure.axes
    confidence = np.array(curve["confidence"])
    display = CalibrationDisplay(np.array(curve["accuracy"]), confidence, confidence)
    display.plot(ax=upper, name="test images", color=COLOR)
    title = f"expected calibration error {100 * error:.1f} %"
    upper.set(title=title, ylabel="accuracy", xlabel="", ylim=(0, 1))
    upper.grid(alpha=0.3)
    lower.bar(confidence, curve["images"], width=0.04, color=COLOR)
    lower.set(xlabel="confidence: probability of the predicted class", ylabel="images", xlim=(0, 1))
    return figure
