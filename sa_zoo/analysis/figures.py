"""The figures of a model folder and its card, drawn from its files alone."""

from collections.abc import Mapping
from io import BytesIO
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from sa_zoo.analysis.head_figures import Layers, head_maps, head_paths, head_positions
from sa_zoo.analysis.maps import attention_layers
from sa_zoo.analysis.run_figures import confusion, learning_curves
from sa_zoo.folders.write import json_object
from sa_zoo.models.attention import Attention
from sa_zoo.opened import Opened

Figures = dict[str, Figure]  # by name
MOST_LAYERS = 12  # in a figure with one panel per layer


def figure_files(opened: Opened) -> dict[str, bytes]:
    """figures/NAME.png for each figure with data in the model folder."""
    return {f"figures/{name}.png": png(figure) for name, figure in figures_of(opened).items()}


def png(figure: Figure) -> bytes:
    """A figure as PNG, with the same bytes every time."""
    content = BytesIO()
    figure.savefig(content, format="png", dpi=120, metadata={"Software": None})
    return content.getvalue()


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
    maps = _maps_of_middle_pixel(opened)
    if maps:
        figures["head_maps"] = head_maps(maps)
    test = opened.metrics.test
    if test and test.confusion_matrix:
        figures["confusion_matrix"] = confusion(
            test.confusion_matrix, opened.config.get("label_names")
        )
    return figures


def _maps_of_middle_pixel(opened: Opened) -> list[Tensor]:
    """Its attention in each layer, (N_h, H, W): computed, or recorded by the run if it depends on images."""
    network: Any = opened.network
    if not any(isinstance(module, Attention) for module in network.modules()):
        return []
    layers = attention_layers(network, torch.zeros(1, *network.pretrained_cfg["input_size"]))
    if all(layer.positional for layer in layers):
        return [layer.at([size // 2 for size in layer.grid]) for layer in layers]
    recorded = opened.tensors("attention.safetensors")
    return [recorded[layer.name] for layer in layers if layer.name in recorded]


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
            spread = (2 * alpha.clamp(min=0)).sqrt()  # alpha below 0: heads attend away from Delta
            Delta = Delta.reshape(*alpha.shape, -1)  # one vector in vision transformers
        if spread is None:
            continue
        heads, axes = Delta.shape[-2:]
        if heads > 1 and axes == 2:
            found.append({"Delta": Delta, "spread": spread.double()})
    return found
