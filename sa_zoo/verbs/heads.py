"""`sa-zoo heads`: what heads do, whether layers are convolutions, and what pruning or resetting heads changes.

Composes the measures of analysis/ with the one evaluation of training/. docs/heads.md has the definitions.
"""

import copy
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timing import Run, in_turns
from torch import Tensor, nn

from sa_zoo.analysis.figures import save_figure
from sa_zoo.analysis.head_figures import head_depth
from sa_zoo.analysis.heads import Head, Layer, layers_of, measure, table
from sa_zoo.analysis.maps import attention_layers
from sa_zoo.analysis.run_figures import convolved
from sa_zoo.convolution.nearest import NearestConvolution
from sa_zoo.folders.cost import cost_of
from sa_zoo.folders.metrics import Baseline, Metrics, Scores
from sa_zoo.folders.opened import load_model
from sa_zoo.folders.write import check_new, write_file
from sa_zoo.interchange.pruned_heads import Heads, prune_heads, reset_heads, write_changed
from sa_zoo.models.network import SANet
from sa_zoo.training.config import DataConfig, data_of
from sa_zoo.training.device import open_accelerator
from sa_zoo.training.evaluate import BATCH_SIZE, evaluate, open_test_split
from sa_zoo.verbs.fit import finish_folder

IMAGES = 32  # test images that maps which depend on content are averaged over
TIMED_IMAGES, ROUNDS = 32, 5  # of the speed before and after


class TestImages:
    """The test split of a data set, or of a run's own where `data` is empty, as the network takes it."""

    def __init__(self, network: nn.Module, model: str, data: str) -> None:
        self.accelerator = open_accelerator()
        config = DataConfig(name=data) if data else data_of(model)
        self.name, self.split, self.input_format = open_test_split(
            network, config, self.accelerator
        )

    def first(self, count: int) -> Tensor:
        """(count, C, H, W), normalized, on the CPU."""
        return self.input_format.normalize(next(iter(self.split.loader(count)))[0]).cpu()

    def scores(self, network: nn.Module, detail: bool = False) -> Scores:
        loader = self.accelerator.prepare(self.split.loader(BATCH_SIZE))
        return evaluate(
            network.to(self.accelerator.device), loader, self.input_format, self.accelerator, detail
        )


def study(
    model: str,
    data: str = "",
    window: int = 3,
    convolve: str = "",
    prune: bool = False,
    reset: bool = False,
    sharpness: float = 1e-5,
    condition: float = 1e3,
    out: Path | None = None,
) -> str:
    """What the command prints, as Markdown; arguments as the command's.

    Raises ValueError for arguments that do not fit each other or the model, and what `load_model` raises.
    """
    if prune + reset + bool(convolve) > 1:
        raise ValueError("options: got several of --convolve, --prune and --reset, expected one")
    if prune or reset:
        if not out:
            raise ValueError("--out: got nothing, expected a new folder for the changed model")
        check_new(out)
    network: Any = load_model(model).eval()
    blank = torch.zeros(1, *network.pretrained_cfg["input_size"])
    every = attention_layers(network, blank)
    positional = all(layer.positional for layer in every)
    test = (
        None
        if positional and not (convolve or prune or reset)
        else TestImages(network, model, data)
    )
    layers = layers_of(network, test.first(IMAGES) if test and not positional else blank)
    if convolve and test:
        return _convolutions(network, layers, test, convolve, out)
    heads = [head for layer in layers for head in measure(layer, window, sharpness, condition)]
    if (prune or reset) and test and out:
        return _changed(network, heads, test, prune, out)
    text = table(heads, window)
    if left_out := [layer.name for layer in every if layer.grid != layer.keys]:
        text += f"\n\nNot shown, because their keys include padding or they have a stride: {', '.join(left_out)}."
    if out:
        out.mkdir(parents=True, exist_ok=True)
        write_file(out / "heads.md", text + "\n")
        save_figure(head_depth(heads, window), out / "head_depth", ["png", "svg"])
    return text


def _convolutions(
    network: Any, layers: list[Layer], test: TestImages, sizes: str, out: Path | None
) -> str:
    """Accuracy with each layer as its nearest K x K convolution, and with all of them, and certificate of each."""
    if not isinstance(network, SANet):
        raise ValueError(
            f"--convolve: got {type(network).__name__}, expected one of this package's attention networks"
        )
    if not all(size.strip().isdecimal() for size in sizes.split(",")):
        raise ValueError(f"--convolve: got {sizes}, expected odd numbers, such as 3,5,7")
    windows = [int(size) for size in sizes.split(",")]
    replaced = {K: [_nearest(network, layer, K) for layer in layers] for K in windows}
    accuracy, one, every = test.scores(network).top1, {}, {}
    for K, convolutions in replaced.items():
        one[K] = [
            test.scores(_with(network, {layer: conv})).top1
            for layer, conv in enumerate(convolutions)
        ]
        every[K] = test.scores(_with(network, dict(enumerate(convolutions)))).top1
    head = "| layer |" + "".join(f" {K} x {K}: accuracy | bound |" for K in windows)
    lines = [head, "|---" * (1 + 2 * len(windows)) + "|"]
    for index, layer in enumerate(layers):
        cells = (f" {one[K][index]:.2%} | {replaced[K][index].bound:.2g} |" for K in windows)
        lines.append(f"| {layer.name} |" + "".join(cells))
    lines.append("| all |" + "".join(f" {every[K]:.2%} | |" for K in windows))
    lines += [
        "",
        f"Test accuracy with attention: {accuracy:.2%} ({test.name}, {len(test.split)} images).",
    ]
    if out:
        out.mkdir(parents=True, exist_ok=True)
        write_file(out / "convolutions.md", "\n".join(lines) + "\n")
        save_figure(convolved(accuracy, one, every), out / "convolutions", ["png", "svg"])
    return "\n".join(lines)


def _nearest(network: Any, layer: Layer, K: int) -> NearestConvolution:
    return NearestConvolution(network.get_submodule(layer.name), layer.maps, layer.grid, K)


def _with(network: Any, convolutions: dict[int, NearestConvolution]) -> Any:
    """A copy of the network with other layers in the place of attention."""
    changed = copy.deepcopy(network)
    for index, convolution in convolutions.items():
        changed.blocks[index].attn = copy.deepcopy(convolution)
    return changed


def _changed(network: Any, heads: list[Head], test: TestImages, prune: bool, out: Path) -> str:
    """Write the network without its degenerate heads, or with new ones; the table of before and after."""
    names, chosen = list(dict.fromkeys(head.layer for head in heads)), Heads()
    for head in heads:
        if head.degenerate:
            chosen.setdefault(names.index(head.layer), []).append(head.head)
    if not chosen:
        raise ValueError(
            "heads: got none that is degenerate, expected some; --sharpness and --condition set the limits"
        )
    changed = (prune_heads if prune else reset_heads)(network, chosen)
    networks, size = (
        {"before": network, "after": changed},
        tuple(network.pretrained_cfg["input_size"]),
    )
    scores = {name: test.scores(each, detail=True) for name, each in networks.items()}
    images = test.first(TIMED_IMAGES)
    with torch.inference_mode():
        runs: dict[str, Run] = {
            name: partial(each.cpu(), images) for name, each in networks.items()
        }
        times = in_turns(runs, ROUNDS, torch.device("cpu"))
    lines = [
        "| | heads | parameters | MMACs | images/s on this CPU | test accuracy |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    counts = {"before": len(heads), "after": len(heads) - prune * sum(map(len, chosen.values()))}
    for name, each in networks.items():
        cost, speed = cost_of(each, size), len(images) / statistics.median(times[name])
        numbers = f"{counts[name]} | {cost.parameters:,} | {cost.macs / 1e6:,.2f} | {speed:,.0f}"
        lines.append(f"| {name} | {numbers} | {scores[name].top1:.2%} |")
    named = network.pretrained_cfg["architecture"]
    before = Baseline(
        model=f"{named}, before {'pruning' if prune else 'the reset'}", test=scores["before"]
    )
    parameters = sum(parameter.numel() for parameter in changed.parameters())
    metrics = Metrics(
        model=named, parameters=parameters, data=test.name, test=scores["after"], baseline=before
    )
    write_changed(changed, out, metrics)
    finish_folder(out)
    gone = ", ".join(f"{block + 1}.{head + 1}" for block, some in chosen.items() for head in some)
    lines += [
        "",
        f"{'Removed' if prune else 'Initialized again'}: layer.head {gone}. The model is in {out}.",
    ]
    return "\n".join(lines)
