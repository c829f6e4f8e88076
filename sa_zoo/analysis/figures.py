"""Figures of run folders, drawn from their files alone: what a card shows, and what `sa-zoo plot` writes."""

import math
import re
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.utils import natural_key

from sa_zoo.analysis.head_figures import Layers, head_depth, head_maps, head_paths, head_positions
from sa_zoo.analysis.heads import layers_of, measure
from sa_zoo.analysis.maps import attention_layers
from sa_zoo.analysis.run_figures import (
    accuracy_against_work,
    confusion,
    learning_curves,
    reliability,
)
from sa_zoo.folders.metrics import read_metrics
from sa_zoo.folders.opened import load_model
from sa_zoo.folders.write import check_inside, json_object, read_json, write_file

WINDOW = 3  # pixels, of the figure over depth
MOST_LAYERS = 12  # that a figure with one panel per layer shows
MOST_PIXELS = 1024  # of a layer, up to which all its maps are computed for a figure


def draw_figures(folder: Path) -> list[Path]:
    """Draw what the folder has data for into folder/figures, as PNG."""
    drawn = figures_of(folder).items()
    return [
        path
        for name, figure in drawn
        for path in save_figure(figure, folder / "figures" / name, ["png"])
    ]


def plot(runs: Sequence[Path], out: Path | None = None) -> list[Path]:
    """Write the figures of each run, and of several also those that compare them, as PNG and SVG.

    Those of one run go to RUN/figures or, with `out`, to OUT/RUN; comparisons to `out` or to the current folder.
    Raises FileNotFoundError for a folder that holds no run, ValueError for runs of one name with `out`.
    """
    for run in runs:
        if not (run / "config.json").is_file():
            raise FileNotFoundError(f"run: got {run}, expected the folder of a finished run")
    if out and len({run.resolve().name for run in runs}) < len(runs):
        raise ValueError(
            f"runs: got {', '.join(map(str, runs))}, expected different names for the folders in {out}"
        )
    written = []
    for run in runs:
        folder = out / run.resolve().name if out else run / "figures"
        for name, figure in figures_of(run).items():
            written += save_figure(figure, folder / name, ["png", "svg"])
    for name, figure in (comparisons(runs) if len(runs) > 1 else {}).items():
        written += save_figure(figure, (out or Path()) / name, ["png", "svg"])
    return written


def save_figure(figure: Figure, path: Path, kinds: Sequence[str]) -> list[Path]:
    """Write path.KIND for each kind, with the same bytes every time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for kind in kinds:
        content, metadata = BytesIO(), {"png": {"Software": None}, "svg": {"Date": None}}[kind]
        with rc_context({"svg.hashsalt": path.name}):
            figure.savefig(content, format=kind, dpi=120, metadata=metadata)
        written.append(write_file(path.with_name(f"{path.name}.{kind}"), content.getvalue()))
    return written


def figures_of(folder: Path) -> dict[str, Figure]:
    """The figures of one run, by name. Raises ValueError if its `figures` is a link that leads out of the run."""
    check_inside(folder, "figures")
    figures, test = {}, read_metrics(folder).test
    if history := _history(folder):
        figures["learning_curve"] = learning_curves({"": [history]})
    weights, recorded = (_tensors(folder / f"{name}.safetensors") for name in ("model", "heads"))
    if 0 < len(gaussian := gaussian_layers(weights)) <= MOST_LAYERS:
        figures["head_positions"] = head_positions(gaussian)
    if 0 < len(paths := gaussian_layers(recorded)) <= MOST_LAYERS:
        figures["head_paths"] = head_paths(paths)
    if any(".attn.terms." in name for name in weights):
        figures |= _figures_of_maps(folder)
    if test and test.confusion_matrix:
        names = read_json(folder / "config.json").get("label_names")
        figures["confusion_matrix"] = confusion(test.confusion_matrix, names)
    if test and "images" in (test.calibration_curve or {}):
        figures["reliability"] = reliability(
            test.calibration_curve or {}, test.calibration_error or 0.0
        )
    return figures


def _figures_of_maps(folder: Path) -> dict[str, Figure]:
    """Maps of the pixel in the middle: computed, or as recorded by the run where they depend on images."""
    network = load_model(str(folder))
    images = torch.zeros(1, *network.pretrained_cfg["input_size"])  # type: ignore[index]
    layers = attention_layers(network, images)
    query = (layers[0].grid[0] // 2, layers[0].grid[1] // 2)
    if all(layer.positional for layer in layers):
        maps = [layer.at(query).numpy() for layer in layers]
        figures = {"head_maps": head_maps(maps, query)}
        if min(layers[0].grid) >= WINDOW and math.prod(layers[0].grid) <= MOST_PIXELS:
            heads = [
                head for layer in layers_of(network, images) for head in measure(layer, WINDOW)
            ]
            figures["head_depth"] = head_depth(heads, WINDOW)
        return figures
    recorded = _tensors(folder / "attention.safetensors")
    means = [recorded[layer.name] for layer in layers if layer.name in recorded]
    return {"head_maps": head_maps(means, query)} if means else {}


def gaussian_layers(tensors: dict[str, np.ndarray]) -> Layers:
    """Delta and spread of each layer with several Gaussian heads, in the order of the layers; alpha = spread^2 / 2."""
    found = []
    for module in sorted({name.rpartition(".")[0] for name in tensors}, key=natural_key):
        Delta, spread = (tensors.get(f"{module}.{name}") for name in ("Delta", "spread"))
        alpha = tensors.get(f"{module}.alpha")
        if spread is None and alpha is not None:
            spread = np.sqrt(2 * alpha)
        if (
            Delta is not None
            and spread is not None
            and Delta.shape[-2:] != (1, 2)
            and Delta.shape[-1] == 2
        ):
            found.append({"Delta": Delta, "spread": spread})
    return found


def comparisons(runs: Sequence[Path]) -> dict[str, Figure]:
    """Figures that compare runs; those that differ in their seed only are a group."""
    groups: dict[str, list[Path]] = {}
    for run in runs:
        recipe = re.sub(r"(?m)^seed = .*$", "", _text(run / "train.toml"))
        groups.setdefault(recipe or str(run), []).append(run)
    models = [read_metrics(group[0]).model for group in groups.values()]
    by_model = len(set(models)) == len(models)
    named = {
        str(models[i] if by_model else group[0]): group for i, group in enumerate(groups.values())
    }
    figures = {}
    curves = {
        name: [history for run in group if (history := _history(run))]
        for name, group in named.items()
    }
    if curves := {name: histories for name, histories in curves.items() if histories}:
        figures["learning_curves"] = learning_curves(curves)
    measured = {name: [read_metrics(run) for run in group] for name, group in named.items()}
    points = {
        name: [
            (each.train.pflop, each.test.top1)
            for each in group
            if each.test and each.train and each.train.pflop
        ]
        for name, group in measured.items()
    }
    if points := {name: each for name, each in points.items() if each}:
        figures["accuracy_against_work"] = accuracy_against_work(points)
    return figures


def _history(folder: Path) -> list[dict[str, Any]]:
    """The lines of history.jsonl; none if there is no such file."""
    path = folder / "history.jsonl"
    return (
        [json_object(line, str(path)) for line in path.read_bytes().splitlines()]
        if path.is_file()
        else []
    )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _tensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file; none if it is not there."""
    try:
        return (
            {name: each.float().numpy() for name, each in load_file(path).items()}
            if path.is_file()
            else {}
        )
    except SafetensorError as error:
        raise ValueError(f"{path}: got a truncated or damaged file: {error}") from error
