"""`sa-zoo heads`: what heads do, and what accuracy is left with convolutions in the place of attention.

Composes the measures of analysis/ with the one evaluation of training/. docs/heads.md has the definitions.
"""

import copy
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from sa_zoo.analysis.figures import save_figure
from sa_zoo.analysis.head_figures import accuracy_by_heads, head_depth
from sa_zoo.analysis.heads import heads_table, layers_of, markdown, measure
from sa_zoo.analysis.maps import LayerMaps, attention_layers
from sa_zoo.convolution.nearest import NearestConvolution
from sa_zoo.folders.opened import Opened, open_model
from sa_zoo.folders.write import write_file
from sa_zoo.models.network import SANet
from sa_zoo.training.config import DataConfig, data_of
from sa_zoo.training.device import open_accelerator
from sa_zoo.training.evaluate import open_test_split, score
from sa_zoo.vit.convolve import LocalHeads, local_heads, most_local, replace_heads

MEASURED_IMAGES = 32  # test images that maps which depend on content are averaged over
STEPS = 8  # of the number of heads of a vision transformer that become convolutions
TURNS = 7  # in which networks take turns when their speed is measured


class TestImages:
    """The test split of a data set as a network takes it."""

    def __init__(self, opened: Opened, data: DataConfig) -> None:
        self.accelerator = open_accelerator()
        source, self.split = open_test_split(opened, data, self.accelerator)
        self.name = source.name

    def first(self, count: int) -> Tensor:
        """(count, C, H, W), normalized, on the CPU."""
        images, *_ = next(iter(self.split.loader(count)))
        return self.split.input_format.normalize(images).cpu()

    def accuracy(self, network: nn.Module) -> float:
        network = network.to(self.accelerator.device)
        return score(network, self.split, self.accelerator).top1


def study(
    model: str,
    data: str = "",
    window: int = 3,
    convolve: str = "",
    out: Path | None = None,
    most: str = "",
    below: float | None = None,
) -> str:
    """What the command prints, as Markdown; arguments as the command's, `data` by default that of the run.

    Raises ValueError for arguments that do not fit each other or the model, and what `open_model` raises.
    """
    opened = open_model(model)
    network: Any = opened.network
    if convolve and isinstance(network, VisionTransformer):
        test = TestImages(opened, DataConfig(name=data) if data else data_of(model))
        return _convolved_vit(network, test, _numbers("--convolve", convolve), most, below, out)
    if most or below is not None:
        raise ValueError(
            f"--most, --below: got {type(network).__name__}, expected --convolve and a vision transformer"
        )
    images = torch.zeros(1, *network.pretrained_cfg["input_size"])
    every = attention_layers(network, images)
    positional = all(layer.positional for layer in every)
    if convolve or not positional:
        test = TestImages(opened, DataConfig(name=data) if data else data_of(model))
        if not positional:
            images = test.first(MEASURED_IMAGES)
    layers = layers_of(network, images)
    if convolve:
        text = _convolutions(network, layers, test, _numbers("--convolve", convolve))
        return _written(out, "convolutions.md", text)
    measured = [measure(layer, window) for layer in layers]
    text = heads_table(measured, window)
    left_out = ", ".join(layer.name for layer in every if layer.grid != layer.keys)
    if left_out:
        text += (
            f"\n\nNot shown, because their keys include padding or they have a stride: {left_out}."
        )
    if out:
        save_figure(head_depth(measured, window), out / "head_depth.png")
    return _written(out, "heads.md", text)


def _numbers(option: str, text: str) -> list[int]:
    """The whole numbers of an option."""
    if not all(number.strip().isdecimal() for number in text.split(",")):
        raise ValueError(f"{option}: got {text}, expected whole numbers, such as 3,5,7")
    return [int(number) for number in text.split(",")]


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
    names = ["layer"]
    for K in windows:
        names += [f"{K} x {K}: accuracy", "bound"]
    rows = []
    replaced = {layer.name: [layer.name] for layer in layers}
    for name, some in (replaced | {"all": list(replaced)}).items():
        rows.append([name])
        for K in windows:
            changed = copy.deepcopy(network)
            for each in some:
                changed.set_submodule(each, nearest[each, K])
            bound = f"{nearest[name, K].bound:.2g}" if name in replaced else ""
            rows[-1] += [f"{test.accuracy(changed):.2%}", bound]
    images = f"{test.name}, {len(test.split)} images"
    return f"{markdown(names, rows)}\n\nTest accuracy with attention: {accuracy:.2%} ({images})."


def _convolved_vit(
    network: VisionTransformer,
    test: TestImages,
    windows: list[int],
    most: str,
    below: float | None,
    out: Path | None,
) -> str:
    """Accuracy, bounds and speed of a vision transformer with its most local heads as depthwise convolutions."""
    if most and below is not None:
        raise ValueError(f"--below: got {below} with --most {most}, expected one of the two")
    images = test.first(MEASURED_IMAGES)
    curves: dict[int, list[tuple[int, float]]] = {}
    parts = []
    for K in windows:
        names = [f"heads as {K} x {K} convolutions", "largest distance", "accuracy"]
        names += ["images/s", "before", "bound of each layer"]
        local = local_heads(network, images, K)
        total = sum(len(heads.distance) for heads in local)
        counts = [round(total * step / STEPS) for step in range(STEPS + 1)]
        if most:
            counts = _numbers("--most", most)
        if below is not None:
            counts = [sum(map(len, most_local(local, below=below)))]
        curves[K] = []
        rows = []
        replaced = {count: most_local(local, count) for count in sorted({0, *counts})}
        for count, heads in replaced.items():
            changed = replace_heads(copy.deepcopy(network), local, heads)
            accuracy = test.accuracy(changed)
            curves[K].append((count, accuracy))
            speed = [f"{each:.0f}" for each in speeds([changed.cpu(), network], images)]
            farthest, bounds = _reached(local, heads)
            rows.append(
                [f"{count} of {total}", f"{farthest:.2f}", f"{accuracy:.2%}", *speed, bounds]
            )
        parts.append(markdown(names, rows))
    parts.append(
        f"Accuracy: {test.name}, {len(test.split)} images. Heads are measured on {len(images)} of them."
    )
    if out:
        save_figure(accuracy_by_heads(curves), out / "convolved_heads.png")
    return _written(out, "convolved_heads.md", "\n\n".join(parts))


def _reached(local: list[LocalHeads], heads: list[list[int]]) -> tuple[float, str]:
    """The largest distance of these heads of each layer, and the bounds of the layers, as text."""
    chosen = list(zip(local, heads, strict=True))
    distances = torch.cat([layer.distance[some] for layer, some in chosen])
    bounds = [f"{float(layer.bound[some].sum()):.2g}" for layer, some in chosen]
    return max(distances.tolist(), default=0.0), ", ".join(bounds)


@torch.inference_mode()
def speeds(networks: list[nn.Module], images: Tensor) -> list[float]:
    """Images per second of each network, the median of some rounds in which they take turns."""
    seconds: list[list[float]] = [[] for _ in networks]
    for _ in range(TURNS):
        for times, network in zip(seconds, networks, strict=True):
            start = time.perf_counter()
            network.eval()(images)
            times.append(time.perf_counter() - start)
    return [len(images) / statistics.median(times[1:]) for times in seconds]


def _written(out: Path | None, name: str, text: str) -> str:
    """The text, which is written into a folder if there is one."""
    if out:
        out.mkdir(parents=True, exist_ok=True)
        write_file(out / name, text + "\n")
    return text
