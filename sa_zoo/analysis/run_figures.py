"""What runs reached: learning curves, accuracy against work, confusion, calibration."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import color_sequences
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from sklearn.calibration import CalibrationDisplay
from sklearn.metrics import ConfusionMatrixDisplay

COLORS = color_sequences["petroff10"]
MARKERS = "osD^vP*X<>"
MOST_NUMBERS = 20  # classes, up to which each cell of a confusion matrix shows its number

History = Sequence[dict[str, Any]]  # the lines of history.jsonl


def learning_curves(groups: Mapping[str, Sequence[History]]) -> Figure:
    """Loss and accuracy after each epoch, on training images as augmented and, where there are any, held-out ones.

    A group holds the runs of one recipe with several seeds: the line is their mean, the band from lowest to highest.
    """
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, key, title, scale in zip(
        panels, ("loss", "top1"), ("loss, nats", "accuracy, %"), (1, 100), strict=True
    ):
        for index, (name, runs) in enumerate(groups.items()):
            seeds = f", {len(runs)} seeds" if len(runs) > 1 else ""
            color, start = (
                COLORS[index % 10],
                f"{name}{seeds}: " if len(groups) > 1 or seeds else "",
            )
            training = [{line["epoch"]: scale * line[key] for line in run} for run in runs]
            held_out = [
                {
                    line["epoch"]: scale * line["validation"][key]
                    for line in run
                    if "validation" in line
                }
                for run in runs
            ]
            _band(axes, training, color=color, linestyle="--", label=f"{start}training, augmented")
            if all(held_out):
                _band(axes, held_out, color=color, linestyle="-", label=f"{start}held out")
        axes.set(title=title, xlabel="epoch")
        axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    if len(groups) > 1:
        figure.legend(
            *panels[0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=2,
            fontsize="small",
        )
    else:
        panels[0].legend(frameon=False)
    return figure


def _band(axes: Axes, runs: Sequence[Mapping[int, float]], **style: Any) -> None:
    """The mean of curves, over the epochs that all of them have, and the range between their extremes."""
    epochs = sorted(set.intersection(*(set(run) for run in runs)))
    values = np.array([[run[epoch] for epoch in epochs] for run in runs])
    axes.plot(epochs, values.mean(axis=0), marker="o" if len(epochs) == 1 else "", **style)
    if len(runs) > 1:
        axes.fill_between(
            epochs,
            values.min(axis=0),
            values.max(axis=0),
            color=style["color"],
            alpha=0.2,
            linewidth=0,
        )


def accuracy_against_work(groups: Mapping[str, Sequence[tuple[float, float]]]) -> Figure:
    """Test accuracy (a fraction) against the PFLOP of training, one marker per run; lines join the runs of a group."""
    figure = Figure(figsize=(6, 3.8), layout="constrained")
    axes = figure.subplots()
    for index, (name, runs) in enumerate(groups.items()):
        work, accuracy = zip(*sorted(runs), strict=True)
        percent = [100 * each for each in accuracy]
        axes.plot(
            work,
            percent,
            MARKERS[index % 10] + "-",
            color=COLORS[index % 10],
            markersize=7,
            label=name,
        )
    axes.set(xscale="log", xlabel="training, PFLOP", ylabel="test accuracy, %")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.3, which="both")
    axes.legend(frameon=False, fontsize="small")
    return figure


def confusion(counts: Sequence[Sequence[int]], classes: Sequence[str] | None = None) -> Figure:
    """Share of each true class (row) that is taken for each class (column), in percent."""
    matrix = np.array(counts)
    percent = 100 * matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    few = len(matrix) <= MOST_NUMBERS
    side = 0.42 * len(matrix) + 1.6 if few else 7.0
    figure = Figure(figsize=(side + 0.4, side), layout="constrained")
    axes = figure.subplots()
    display = ConfusionMatrixDisplay(percent, display_labels=classes if few else None)
    display.plot(
        ax=axes, include_values=few, cmap="cividis", values_format=".0f", xticks_rotation="vertical"
    )
    if not few:
        axes.set(xticks=[], yticks=[])
    for text in axes.texts:
        text.set_fontsize(8)
    display.im_.set_clim(0, 100)
    axes.set(
        xlabel="predicted class", ylabel="true class", title="test images, % of each true class"
    )
    return figure


def reliability(curve: Mapping[str, Sequence[float]], error: float) -> Figure:
    """Accuracy of the images of each bin of confidence, and how many there are (Guo et al. 2017, arXiv:1706.04599)."""
    figure = Figure(figsize=(4.4, 4.8), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    confidence = np.array(curve["confidence"])
    display = CalibrationDisplay(np.array(curve["accuracy"]), confidence, confidence)
    display.plot(ax=upper, name="test images", color=COLORS[0])
    upper.set(
        ylabel="accuracy",
        xlabel="",
        title=f"expected calibration error {100 * error:.1f} %",
        ylim=(0, 1),
    )
    upper.grid(alpha=0.3)
    lower.bar(confidence, curve["images"], width=0.04, color=COLORS[0])
    lower.set(xlabel="confidence: probability of the predicted class", ylabel="images", xlim=(0, 1))
    return figure


def convolved(
    accuracy: float, by_size: Mapping[int, Sequence[float]], all_layers: Mapping[int, float]
) -> Figure:
    """Test accuracies (fractions) with one layer, or all layers, as their nearest K x K convolutions.

    accuracy: of the network as it is; by_size: K -> one number per layer; all_layers: K -> with all of them replaced.
    """
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    one, every = figure.subplots(1, 2, width_ratios=(2, 1), sharey=True)
    for axes in (one, every):
        axes.axhline(100 * accuracy, color="black", linestyle=":", label="attention")
        axes.grid(alpha=0.3)
    for index, (K, values) in enumerate(by_size.items()):
        style, label = f"{MARKERS[index]}-", f"{K} x {K} convolution"
        one.plot(
            range(1, len(values) + 1),
            [100 * each for each in values],
            style,
            color=COLORS[index],
            label=label,
        )
        every.plot(
            [str(K)], [100 * all_layers[K]], MARKERS[index], color=COLORS[index], markersize=8
        )
    one.set(title="one layer replaced", xlabel="layer", ylabel="test accuracy, %")
    one.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    one.legend(frameon=False, fontsize="small")
    every.set(title="all layers replaced", xlabel="K")
    return figure
