"""Figures of a run: learning curves, confusion."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import color_sequences
from matplotlib.figure import Figure
from sklearn.metrics import ConfusionMatrixDisplay

from sa_zoo.analysis.head_figures import figure_of

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
        look: Any = {"color": COLOR, "linestyle": style, "label": name, "marker": "."}
        loss.plot(epochs, [line["loss"] for line in lines], **look)
        accuracy.plot(epochs, [100 * line["top1"] for line in lines], **look)
    for axes, title in ((loss, "loss, nats"), (accuracy, "accuracy, %")):
        axes.set(title=title, xlabel="epoch")
        axes.locator_params("x", integer=True, min_n_ticks=1)
        axes.grid(alpha=0.3)
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
