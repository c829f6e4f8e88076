"""python scripts/study.py taps RUN HARDENED CONTROL --data DATA | sizes NETWORK... --data DATA | vits

Measurements without training: docs/taps.json and docs/sizes.json of heads.md, docs/tables/vits.csv of vit.md.

taps: what becomes of a run if each head reads one pixel. HARDENED is what `sa-zoo harden RUN --out HARDENED` left, and
CONTROL the same without model.harden: at the same rates, and for as much work.

sizes: images of other sizes than networks were trained with: as they are, shrunk or enlarged to the size of training
first, and with heads scaled with the image. A CNN is converted for that: its heads are the pixels of its kernels.

vits: the vision transformers of timm that heads can be given to, and why others are refused.
"""

import copy
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import timm
import torch
import typer
from runs import ROOT
from timm.data import resolve_model_data_config
from torch import Tensor, nn
from torch.nn.functional import interpolate

import sa_zoo
from sa_zoo.analysis.figures import gaussian_layers, save_figure
from sa_zoo.analysis.head_figures import head_positions
from sa_zoo.convolution.convolutional import ConvolutionalAttention
from sa_zoo.folders.opened import open_folder
from sa_zoo.folders.write import read_json, write_file, write_json
from sa_zoo.models.network import SANet, attention_in
from sa_zoo.models.terms import Quadratic
from sa_zoo.training.config import data_of, load_config
from sa_zoo.verbs.heads import TestImages
from sa_zoo.vit.layers import attentions, grid_of

DOCS = ROOT / "docs"
SIZES = (24, 32, 40, 48)
SHARP = 20.0  # alpha of a converted CNN: its heads pay the other pixels nothing that counts
Data = Annotated[str, typer.Option(help="Where the data are, if not where they were.")]
app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)


def images_of(folder: Path, data: str) -> TestImages:
    """The test images of a run."""
    config = data_of(str(folder))
    return TestImages(open_folder(folder), config.model_copy(update={"name": data or config.name}))


@app.command()
def taps(run: Path, hardened: Path, control: Path, data: Data = "") -> None:
    """Add a row to docs/taps.json; of seed 0, also draw the pixels that are read."""
    network = open_folder(run).network
    test = images_of(hardened, data)
    accuracy = {"run": test.scores(network).top1}
    sa_zoo.harden(network)
    accuracy["untrained"] = test.scores(network).top1
    more = {}
    for name, folder in (("control", control), ("hardened", hardened)):
        opened = open_folder(folder)
        network = opened.network
        accuracy[name] = test.scores(network).top1
        trained = opened.metrics.train
        more[name] = {"epochs": trained.epochs, "pflop": trained.pflop}
    layers = attention_in(network.blocks).values()
    row = {
        "model": run.name,
        "seed": load_config(run / "train.toml").train.seed,
        "data": test.name,
        "images": len(test.split),
        "lr": load_config(hardened / "train.toml").optim.lr,
        "accuracy": accuracy,
        "trained on": more,
        "taps": [layer.terms[0].taps() for layer in layers],
    }
    write_json(DOCS / "taps.json", [*read_json(DOCS / "taps.json"), row])
    if row["seed"] == 0:
        figure = head_positions(gaussian_layers(network.state_dict()))
        save_figure(figure, DOCS / f"taps-{run.name}.png")


class Resized(nn.Module):
    """A network that is given images of another size, or of several in turn."""

    def __init__(self, network: nn.Module, *sizes: int) -> None:
        super().__init__()
        self.network = network
        self.sizes = sizes

    def forward(self, images: Tensor) -> Tensor:
        for size in self.sizes:
            images = interpolate(images, size, mode="bicubic", antialias=True)
        return self.network(images)


@torch.no_grad()
def scaled(network: nn.Module, ratio: float) -> nn.Module:
    """A copy for images that are `ratio` times as large: each head covers the same part of the image."""
    if not isinstance(network, SANet):
        network, _ = sa_zoo.convert(network, alpha=SHARP)
    copied = copy.deepcopy(network)
    for module in copied.modules():
        if isinstance(module, ConvolutionalAttention):
            module.Delta.mul_(ratio)
            module.alpha.div_(ratio**2)
        elif isinstance(module, Quadratic):
            module.Delta.mul_(ratio)
            module.spread.div_(ratio)
    return copied


@app.command()
def sizes(folders: list[Path], data: Data = "") -> None:
    """Write docs/sizes.json."""
    networks = {folder.name: open_folder(folder).network.eval() for folder in folders}
    first = networks[folders[0].name]
    test = images_of(folders[0], data)
    trained = resolve_model_data_config(first)["input_size"][-1]
    accuracy = {}
    for name, network in networks.items():
        ways = {
            "as trained": lambda network, size: Resized(network, size),
            "shrunk or enlarged to its size first": lambda network, size: Resized(
                network, size, trained
            ),
            "heads scaled": lambda network, size: Resized(scaled(network, size / trained), size),
        }
        for way, changed in ways.items():
            found = [test.scores(changed(network, size)).top1 for size in SIZES]
            accuracy.setdefault(name, {})[way] = found
            print(name, way, found, flush=True)
    content = {"images": len(test.split), "trained": trained, "sizes": SIZES, "accuracy": accuracy}
    write_json(DOCS / "sizes.json", content)


def why_not(name: str) -> str:
    """Why functions for vision transformers refuse this one of timm; "accepted" if they do not."""
    with torch.device("meta"):
        vit = timm.create_model(name)
    try:
        attentions(vit)
        grid_of(vit)
    except ValueError as error:
        return str(error).partition(",")[0].partition(" in block")[0].removeprefix("vit: got ")
    return "accepted"


@app.command()
def vits() -> None:
    """Write docs/tables/vits.csv."""
    names = defaultdict(list)
    for name in timm.list_models("vit_*"):
        names[why_not(name)].append(name)
    lines = [f"`vit_*` of timm {timm.__version__},such as,networks"]
    for kind, some in sorted(names.items(), key=lambda row: -len(row[1])):
        lines.append(f"{kind},`{min(some, key=len)}`,{len(some)}")
    write_file(DOCS / "tables" / "vits.csv", "\n".join(lines) + "\n")


if __name__ == "__main__":
    app()
