"""`sa-zoo heads`: what heads do, and what accuracy is left with convolutions in the place of attention.

Composes the measures of analysis/ with the one evaluation of training/. docs/heads.md has the definitions.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sa_zoo.analysis.figures import save_figure
from sa_zoo.analysis.head_figures import head_depth
from sa_zoo.analysis.heads import layers_of, measure, table
from sa_zoo.analysis.maps import LayerMaps, attention_layers
from sa_zoo.convolution.nearest import NearestConvolution
from sa_zoo.folders.opened import open_model
from sa_zoo.folders.write import write_file
from sa_zoo.models.network import SANet
from sa_zoo.training.config import DataConfig, data_of
from sa_zoo.training.device import open_accelerator
from sa_zoo.training.evaluate import evaluate, open_test_split

IMAGES = 32  # test images that maps which depend on content are averaged over


class TestImages:
    """The test split of a data set as a network takes it."""

    def __init__(self, network: nn.Module, data: DataConfig) -> None:
        self.accelerator = open_accelerator()
        self.name, self.split, self.input_format = open_test_split(network, data, self.accelerator)

    def first(self, count: int) -> Tensor:
        """(count, C, H, W), normalized, on the CPU."""
        images, *_ = next(iter(self.split.loader(count)))
        return self.input_format.normalize(images).cpu()

    def accuracy(self, network: nn.Module) -> float:
        network = network.to(self.accelerator.device)
        return evaluate(network, self.split, self.input_format, self.accelerator).top1


def study(
    model: str, data: str = "", window: int = 3, convolve: str = "", out: Path | None = None
) -> str:
    """What the command prints, as Markdown; arguments as the command's, `data` by default that of the run.

    Raises ValueError for arguments that do not fit each other or the model, and what `open_model` raises.
    """
    opened = open_model(model)
    network: Any = opened.network
    images = torch.zeros(1, *network.pretrained_cfg["input_size"])
    every = attention_layers(network, images)
    positional = all(layer.positional for layer in every)
    if convolve or not positional:
        test = TestImages(network, DataConfig(name=data) if data else data_of(model))
        if not positional:
            images = test.first(IMAGES)
    layers = layers_of(network, images)
    if convolve:
        text = _convolutions(network, layers, test, _windows(convolve))
        return _written(out, "convolutions.md", text)
    measured = [measure(layer, window) for layer in layers]
    text = table(measured, window)
    left_out = ", ".join(layer.name for layer in every if layer.grid != layer.keys)
    if left_out:
        text += (
            f"\n\nNot shown, because their keys include padding or they have a stride: {left_out}."
        )
    if out:
        save_figure(head_depth(measured, window), out / "head_depth.png")
    return _written(out, "heads.md", text)


def _windows(sizes: str) -> list[int]:
    """The sizes of --convolve."""
    if not all(size.strip().isdecimal() for size in sizes.split(",")):
        raise ValueError(f"--convolve: got {sizes}, expected odd numbers, such as 3,5,7")
    return [int(size) for size in sizes.split(",")]


def _convolutions(
    network: Any, layers: list[LayerMaps], test: TestImages, windows: list[int]
) -> str:
    """Accuracy with each layer as its nearest K x K convolution, and with all of them, and the bound of each."""
    if not isinstance(network, SANet):
        raise ValueError(
            f"--convolve: got {type(network).__name__}, expected one of this package's attention networks"
        )
    nearest: dict[tuple[str, int], NearestConvolution] = {}
    for layer in layers:
        attention: Any = layer.module
        height, width = layer.grid
        for K in windows:
            nearest[layer.name, K] = NearestConvolution(attention, layer.maps, (height, width), K)
    accuracy = test.accuracy(network)
    lines = [
        "| layer |" + "".join(f" {K} x {K}: accuracy | bound |" for K in windows),
        "|---" * (1 + 2 * len(windows)) + "|",
    ]
    replaced = {layer.name: [layer.name] for layer in layers}
    replaced["all"] = list(replaced)
    for row, names in replaced.items():
        line = f"| {row} |"
        for K in windows:
            changed = copy.deepcopy(network)
            for name in names:
                changed.set_submodule(name, nearest[name, K])
            bound = f" {nearest[row, K].bound:.2g}" if row in names else ""
            line += f" {test.accuracy(changed):.2%} |{bound} |"
        lines.append(line)
    images = f"{test.name}, {len(test.split)} images"
    lines += ["", f"Test accuracy with attention: {accuracy:.2%} ({images})."]
    return "\n".join(lines)


def _written(out: Path | None, name: str, text: str) -> str:
    """The text, which is written into a folder if there is one."""
    if out:
        out.mkdir(parents=True, exist_ok=True)
        write_file(out / name, text + "\n")
    return text
