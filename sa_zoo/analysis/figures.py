"""The figures of a model folder and its card, drawn from its files alone."""

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from sa_zoo.analysis.head_figures import Layers, head_depth, head_maps, head_paths, head_positions
from sa_zoo.analysis.heads import measure
from sa_zoo.analysis.maps import attention_layers
from sa_zoo.analysis.run_figures import confusion, learning_curves, reliability
from sa_zoo.folders.opened import Opened
from sa_zoo.folders.write import json_object, write_file
from sa_zoo.models.attention import Attention

Figures = dict[str, Figure]  # by name
WINDOW = 3  # pixels, of the figure over depth
MOST_LAYERS = 12  # in a figure with one panel per layer


def figure_files(opened: Opened) -> dict[str, bytes]:
    """figures/NAME.png for each figure with data in the model folder."""
    return {f"figures/{name}.png": png(figure) for name, figure in figures_of(opened).items()}


def png(figure: Figure) -> bytes:
    """A figure as PNG, with the same bytes every time."""
    content = BytesIO()
    figure.savefig(content, format="png", dpi=120, metadata={"Software": None})
    return content.getvalue()


def save_figure(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_file(path, png(figure))


def figures_of(opened: Opened) -> Figures:
    """The figures of one run, by name."""
    figures = {}
    history = opened.local_folder / "history.jsonl"
    lines = history.read_bytes().splitlines() if history.is_file() else []
    if lines:
        epochs = [json_object(line, str(history)) for line in lines]
        figures["learning_curve"] = learning_curves(epochs)
    weights = opened.network.state_dict()
    gaussian = gaussian_layers(weights)
    if 0 < len(gaussian) <= MOST_LAYERS:
        figures["head_positions"] = head_positions(gaussian)
    recorded = opened.tensors("heads.safetensors")  # sorted by name
    paths = gaussian_layers({name: recorded[name] for name in weights if name in recorded})
    if 0 < len(paths) <= MOST_LAYERS:
        figures["head_paths"] = head_paths(paths)
    if any(isinstance(module, Attention) for module in opened.network.modules()):
        figures |= _figures_of_maps(opened)
    test = opened.metrics.test
    if test and test.confusion_matrix:
        figures["confusion_matrix"] = confusion(
            test.confusion_matrix, opened.config.get("label_names")
        )
    if test and test.calibration_curve and "images" in test.calibration_curve:
        error = test.calibration_error or 0.0
        figures["reliability"] = reliability(test.calibration_curve, error)
    return figures


def _figures_of_maps(opened: Opened) -> Figures:
    """Maps of the middle pixel: computed, or recorded by the run if they depend on images."""
    network: Any = opened.network
    images = torch.zeros(1, *network.pretrained_cfg["input_size"])
    layers = attention_layers(network, images)
    if not all(layer.positional for layer in layers):
        recorded = opened.tensors("attention.safetensors")
        means = [recorded[layer.name] for layer in layers if layer.name in recorded]
        return {"head_maps": head_maps(means)} if means else {}
    middles = [layer.at([size // 2 for size in layer.grid]) for layer in layers]
    measured = [measure(layer, WINDOW) for layer in layers]
    return {"head_maps": head_maps(middles), "head_depth": head_depth(measured, WINDOW)}


def gaussian_layers(tensors: Mapping[str, Tensor]) -> Layers:
    """Delta and spread of each layer with several Gaussian heads, in the order of `tensors`; alpha = spread^2 / 2."""
    found = []
    for name in tensors:
        module, _, parameter = name.rpartition(".")
        if parameter != "Delta":
            continue
        Delta = tensors[name].double()
        spread = tensors.get(f"{module}.spread")
        alpha = tensors.get(f"{module}.alpha")
        if alpha is not None:
            spread = (2 * alpha.clamp(min=0)).sqrt()  # alpha below 0: heads look away from Delta
            Delta = Delta.reshape(*alpha.shape, -1)  # one vector in vision transformers
        if spread is None:
            continue
        heads, axes = Delta.shape[-2:]
        if heads > 1 and axes == 2:
            found.append({"Delta": Delta, "spread": spread.double()})
    return found
