"""Figures of run folders, drawn from their files alone: what a card shows, and what `sa-zoo plot` writes."""

import re
from collections.abc import Mapping, Sequence
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
from torch import Tensor

from sa_zoo.analysis.head_figures import Layers, head_depth, head_maps, head_paths, head_positions
from sa_zoo.analysis.heads import layers_of, measure
from sa_zoo.analysis.maps import attention_layers
from sa_zoo.analysis.run_figures import (
    confusion,
    learning_curves,
    reliability,
)
from sa_zoo.folders.opened import Opened, open_model
from sa_zoo.folders.write import check_inside, json_object, write_file
from sa_zoo.models.attention import Attention

Figures = dict[str, Figure]  # by name
Arrays = dict[str, np.ndarray]
WINDOW = 3  # pixels, of the figure over depth
MOST_LAYERS = 12  # that a figure with one panel per layer shows
MOST_PIXELS = 1024  # of a layer, up to which all its maps are computed for a figure


def draw_figures(opened: Opened) -> list[Path]:
    """Draw what the folder of a model has data for into its figures/, as PNG."""
    assert opened.folder
    return _save(figures_of(opened), opened.folder / "figures", ["png"])


def plot(runs: Sequence[Path], out: Path | None = None) -> list[Path]:
    """Write the figures of each run, and of several also those that compare them, as PNG and SVG.

    Those of one run go to RUN/figures or, with `out`, to OUT/RUN; comparisons to `out` or to the current folder.
    Raises FileNotFoundError for a folder that holds no run, ValueError for runs of one name with `out`.
    """
    if out and len({run.resolve().name for run in runs}) < len(runs):
        raise ValueError(
            f"runs: got {', '.join(map(str, runs))}, expected different names for the folders in {out}"
        )
    opened = [open_model(f"local-dir:{run}") for run in runs]
    written = []
    for run, model in zip(runs, opened, strict=True):
        folder = out / run.resolve().name if out else run / "figures"
        written += _save(figures_of(model), folder, ["png", "svg"])
    if len(runs) > 1:
        written += _save(comparisons(opened), out or Path(), ["png", "svg"])
    return written


def _save(figures: Figures, folder: Path, kinds: Sequence[str]) -> list[Path]:
    return [
        path
        for name, figure in figures.items()
        for path in save_figure(figure, folder / name, kinds)
    ]


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


def figures_of(opened: Opened) -> Figures:
    """The figures of one run, by name. Raises ValueError if its `figures` is a link that leads out of the run."""
    assert opened.folder
    check_inside(opened.folder, "figures")
    figures = {}
    history = _history(opened.folder)
    if history:
        figures["learning_curve"] = learning_curves({"": [history]})
    gaussian = gaussian_layers(_arrays(opened.network.state_dict()))
    if 0 < len(gaussian) <= MOST_LAYERS:
        figures["head_positions"] = head_positions(gaussian)
    paths = gaussian_layers(_tensors(opened.folder / "heads.safetensors"))
    if 0 < len(paths) <= MOST_LAYERS:
        figures["head_paths"] = head_paths(paths)
    if any(isinstance(module, Attention) for module in opened.network.modules()):
        figures |= _figures_of_maps(opened.network, opened.folder / "attention.safetensors")
    return figures | _figures_of_test(opened)


def _figures_of_maps(network: Any, recorded: Path) -> Figures:
    """Maps of the pixel in the middle: computed, or as recorded by the run where they depend on images."""
    images = torch.zeros(1, *network.pretrained_cfg["input_size"])
    layers = attention_layers(network, images)
    height, width = layers[0].grid
    query = (height // 2, width // 2)
    if not all(layer.positional for layer in layers):
        maps = _tensors(recorded)
        means = [maps[layer.name] for layer in layers if layer.name in maps]
        return {"head_maps": head_maps(means, query)} if means else {}
    figures = {"head_maps": head_maps([layer.at(query).numpy() for layer in layers], query)}
    if min(height, width) >= WINDOW and height * width <= MOST_PIXELS:
        heads = [head for layer in layers_of(network, images) for head in measure(layer, WINDOW)]
        figures["head_depth"] = head_depth(heads, WINDOW)
    return figures


def _figures_of_test(opened: Opened) -> Figures:
    """What was measured on test images: confusion of classes, and confidence against accuracy."""
    figures: Figures = {}
    test = opened.metrics.test
    if test is None:
        return figures
    if test.confusion_matrix:
        names = opened.config.get("label_names")
        figures["confusion_matrix"] = confusion(test.confusion_matrix, names)
    curve = test.calibration_curve or {}
    if "images" in curve:
        figures["reliability"] = reliability(curve, test.calibration_error or 0.0)
    return figures


def gaussian_layers(tensors: Arrays) -> Layers:
    """Delta and spread of each layer with several Gaussian heads, in the order of the layers; alpha = spread^2 / 2."""
    found = []
    for module in sorted({name.rpartition(".")[0] for name in tensors}, key=natural_key):
        Delta = tensors.get(f"{module}.Delta")
        spread = tensors.get(f"{module}.spread")
        alpha = tensors.get(f"{module}.alpha")
        if alpha is not None:
            spread = np.sqrt(2 * alpha)
        if Delta is None or spread is None:
            continue
        heads, axes = Delta.shape[-2:]
        if heads > 1 and axes == 2:
            found.append({"Delta": Delta, "spread": spread})
    return found


def comparisons(runs: Sequence[Opened]) -> Figures:
    """Figures that compare runs; those that differ in their seed only are a group."""
    curves = {}
    for name, group in _by_recipe(runs).items():
        histories = [_history(run.folder) for run in group if run.folder]
        found = [history for history in histories if history]
        if found:
            curves[name] = found
    return {"learning_curves": learning_curves(curves)} if curves else {}


def _by_recipe(runs: Sequence[Opened]) -> dict[str, list[Opened]]:
    """Runs that differ in their seed only, by the name of their model, or by the first folder if models repeat."""
    groups: dict[str, list[Opened]] = {}
    for run in runs:
        assert run.folder
        path = run.folder / "train.toml"
        recipe = path.read_text(encoding="utf-8") if path.is_file() else run.source
        groups.setdefault(re.sub(r"(?m)^seed = .*$", "", recipe), []).append(run)
    named = {str(group[0].metrics.model): group for group in groups.values()}
    if len(named) < len(groups):
        named = {str(group[0].folder): group for group in groups.values()}
    return named


def _history(folder: Path) -> list[dict[str, Any]]:
    """The lines of history.jsonl; none if there is no such file."""
    path = folder / "history.jsonl"
    if not path.is_file():
        return []
    return [json_object(line, str(path)) for line in path.read_bytes().splitlines()]


def _tensors(path: Path) -> Arrays:
    """The tensors of a file; none if it is not there."""
    if not path.is_file():
        return {}
    try:
        return _arrays(load_file(path))
    except SafetensorError as error:
        raise ValueError(f"{path}: got a truncated or damaged file: {error}") from error


def _arrays(tensors: Mapping[str, Tensor]) -> Arrays:
    return {name: tensor.float().numpy() for name, tensor in tensors.items()}
