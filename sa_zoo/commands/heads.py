"""`sa-zoo heads`: measures of heads, and accuracy with attention replaced by convolutions.

Combines the measures of analysis/ and the evaluation of training/. docs/heads.md has the definitions.
"""

import copy
from functools import partial
from pathlib import Path
from statistics import median
from timeit import timeit
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from sa_zoo.analysis.figures import save_figure
from sa_zoo.analysis.head_figures import accuracy_by_heads, head_depth
from sa_zoo.analysis.heads import heads_table, layers_of, markdown, measure
from sa_zoo.analysis.maps import LayerMaps, attention_layers
from sa_zoo.commands.evaluate import data_for
from sa_zoo.convolution.nearest import NearestConvolution
from sa_zoo.folders.metrics import Scores
from sa_zoo.folders.opened import Opened, open_model
from sa_zoo.folders.write import write_file
from sa_zoo.models.network import SANet
from sa_zoo.training.config import DataConfig
from sa_zoo.training.device import open_accelerator
from sa_zoo.training.evaluate import open_test_split, score
from sa_zoo.vit.convolve import local_heads, most_local, replace_heads

MEASURED_IMAGES = 32  # test images to average content-dependent maps over
STEPS = 8  # from no heads of a vision transformer as convolutions to all
TURNS = 7  # rounds of a speed measurement; networks take turns


class TestImages:
    """The test split of a data set, as input of a network."""

    def __init__(self, opened: Opened, data: DataConfig) -> None:
        self.accelerator = open_accelerator()
        source, self.split = open_test_split(opened, data, self.accelerator)
        self.name = source.name

    def __str__(self) -> str:
        return f"{self.name}, {len(self.split)} images"

    def first(self, count: int) -> Tensor:
        """(count, C, H, W), normalized, on the CPU."""
        return self.split.first(count).cpu()

    def scores(self, network: nn.Module) -> Scores:
        network = network.to(self.accelerator.device)
        return score(network, self.split, self.accelerator)


def study_heads(
    model: str,
    data: str,
    window: int,
    convolve: str,
    out: Path | None,
    most: str,
    below: float | None,
) -> str:
    """The output of the command, as Markdown. Arguments as on the command line; without data, those of the run.

    Raises ValueError for inconsistent or unfit arguments, and the errors of `open_model`.
    """
    opened = open_model(model)
    network: Any = opened.network
    is_vit = isinstance(network, VisionTransformer)
    if (most or below is not None) and not (convolve and is_vit):
        raise ValueError(
            f"--most, --below: got {type(network).__name__}, expected --convolve and a vision transformer"
        )
    if most and below is not None:
        raise ValueError(f"--below: got {below} with --most {most}, expected one of the two")
    windows = _numbers("--convolve", convolve)
    if windows and is_vit:
        test = TestImages(opened, data_for(model, data))
        return _convolved_vit(network, test, windows, _numbers("--most", most), below, out)
    images = torch.zeros(1, *network.pretrained_cfg["input_size"])
    every = attention_layers(network, images)
    positional = all(layer.positional for layer in every)
    if windows or not positional:
        test = TestImages(opened, data_for(model, data))
        if not positional:
            images = test.first(MEASURED_IMAGES)
    layers = layers_of(network, images)
    if windows:
        return _written(out, "convolutions.md", _convolutions(network, layers, test, windows))
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
    """The whole numbers of an option; none if it is empty."""
    numbers = text.split(",") if text else []
    if not all(number.strip().isdecimal() for number in numbers):
        raise ValueError(f"{option}: got {text}, expected whole numbers, such as 3,5,7")
    return list(map(int, numbers))


def _convolutions(
    network: Any, layers: list[LayerMaps], test: TestImages, windows: list[int]
) -> str:
    """Accuracy with each layer, and with all layers, as nearest K x K convolutions, and the bound of each."""
    if not isinstance(network, SANet):
        raise ValueError(
            f"--convolve: got {type(network).__name__}, expected one of this package's attention networks"
        )
    nearest = {
        K: {
            layer.name: NearestConvolution(layer.module, layer.maps, layer.grid, K)  # type: ignore[arg-type]
            for layer in layers
        }
        for K in windows
    }
    header = ["layer"]
    rows = [[layer.name] for layer in layers] + [["all"]]
    for K, convolutions in nearest.items():
        header += [f"{K} x {K}: accuracy", "bound"]
        for row in rows:
            replaced = {row[0]: convolutions[row[0]]} if row[0] in convolutions else convolutions
            changed = copy.deepcopy(network)
            for name, convolution in replaced.items():
                changed.set_submodule(name, convolution)
            bound = f"{convolution.bound:.2g}" if row[0] in convolutions else ""
            row += [test.scores(changed).percent, bound]
    accuracy = test.scores(network).percent
    return f"{markdown(header, rows)}\n\nTest accuracy with attention: {accuracy} ({test})."


def _convolved_vit(
    network: VisionTransformer,
    test: TestImages,
    windows: list[int],
    most: list[int],
    below: float | None,
    out: Path | None,
) -> str:
    """Accuracy, bounds and speed of a vision transformer with its most local heads as depthwise convolutions."""
    images = test.first(MEASURED_IMAGES)
    curves: dict[int, list[tuple[int, float]]] = {}
    parts = []
    for K in windows:
        names = [
            f"heads as {K} x {K} convolutions",
            "largest distance",
            "accuracy",
            "images/s",
            "before",
            "bound of each layer",
        ]
        local = local_heads(network, images, K)
        total = sum(len(heads.distance) for heads in local)
        counts = most or [round(total * step / STEPS) for step in range(STEPS + 1)]
        if below is not None:
            counts = [sum(map(len, most_local(local, below=below)))]
        curves[K] = []
        rows = []
        for count in sorted({0, *counts}):
            chosen = most_local(local, count)
            changed = replace_heads(copy.deepcopy(network), local, chosen)
            scores = test.scores(changed)
            curves[K].append((count, scores.top1))
            distances = [0.0]
            bounds = []
            for layer, heads in zip(local, chosen, strict=True):
                distances += layer.distance[heads].tolist()
                bounds.append(f"{float(layer.bound[heads].sum()):.2g}")
            row = [f"{count} of {total}", f"{max(distances):.2f}", scores.percent]
            row += [f"{each:.0f}" for each in speeds([changed.cpu(), network], images)]
            rows.append([*row, ", ".join(bounds)])
        parts.append(markdown(names, rows))
    parts.append(f"Accuracy: {test}. Heads are measured on {len(images)} of them.")
    if out:
        save_figure(accuracy_by_heads(curves), out / "convolved_heads.png")
    return _written(out, "convolved_heads.md", "\n\n".join(parts))


@torch.inference_mode()
def speeds(networks: list[nn.Module], images: Tensor) -> list[float]:
    """Images per second of each network: the median over rounds; each round calls every network once."""
    calls = [partial(network.eval(), images) for network in networks]
    rounds = [[timeit(call, number=1) for call in calls] for _ in range(TURNS)]
    return [len(images) / median(seconds) for seconds in zip(*rounds[1:], strict=True)]


def _written(out: Path | None, name: str, text: str) -> str:
    """The text, also written into the folder `out`, if given."""
    if out:
        out.mkdir(parents=True, exist_ok=True)
        write_file(out / name, text + "\n")
    return text
