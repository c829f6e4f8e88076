"""python scripts/study.py taps RUN HARDENED CONTROL --data DATA | sizes NETWORK... --data DATA

Measurements of docs/heads.md on test images, without training; they are written to docs/taps.json and docs/sizes.json.

taps: what becomes of a run if each head reads one pixel. HARDENED is what `sa-zoo harden RUN --out HARDENED` left, and
CONTROL the same without model.harden: at the same rates, and for as much work.

sizes: images of other sizes than networks were trained with: CNNs as they are, and attention also with its heads scaled
with the image.
"""

import copy
from pathlib import Path
from typing import Annotated

import torch
import typer
from runs import ROOT
from timm.data import resolve_model_data_config
from torch import Tensor, nn
from torch.nn.functional import interpolate

import sa_zoo
from sa_zoo.analysis.figures import gaussian_layers, save_figure
from sa_zoo.analysis.head_figures import head_positions
from sa_zoo.folders.opened import open_folder
from sa_zoo.folders.write import read_json, write_json
from sa_zoo.models.network import SANet, attention_in
from sa_zoo.training.config import data_of, load_config
from sa_zoo.verbs.heads import TestImages

DOCS = ROOT / "docs"
SIZES = (24, 32, 40, 48)
Data = Annotated[str, typer.Option(help="Where the data are, if not where they were.")]
app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)


def images_of(folder: Path, network: nn.Module, data: str) -> TestImages:
    """The test images of a run."""
    config = data_of(str(folder))
    return TestImages(network, config.model_copy(update={"name": data or config.name}))


@app.command()
def taps(run: Path, hardened: Path, control: Path, data: Data = "") -> None:
    """Add a row to docs/taps.json; of seed 0, also draw the pixels that are read."""
    network = open_folder(run).network
    test = images_of(hardened, network, data)
    accuracy = {"run": test.accuracy(network)}
    sa_zoo.harden(network)
    accuracy["untrained"] = test.accuracy(network)
    more = {}
    for name, folder in (("control", control), ("hardened", hardened)):
        opened = open_folder(folder)
        network = opened.network
        accuracy[name] = test.accuracy(network)
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
    """A network that is given images of another size."""

    def __init__(self, network: nn.Module, size: int) -> None:
        super().__init__()
        self.network = network
        self.size = size

    def forward(self, images: Tensor) -> Tensor:
        return self.network(interpolate(images, self.size, mode="bicubic", antialias=True))


@torch.no_grad()
def scaled(network: SANet, ratio: float) -> SANet:
    """A copy for images that are `ratio` times as large: each head covers the same part of the image."""
    copied = copy.deepcopy(network)
    for layer in attention_in(copied.blocks).values():
        for term in layer.terms:
            term.Delta.mul_(ratio)
            term.spread.div_(ratio)
    return copied


@app.command()
def sizes(folders: list[Path], data: Data = "") -> None:
    """Write docs/sizes.json."""
    networks = {folder.name: open_folder(folder).network.eval() for folder in folders}
    first = networks[folders[0].name]
    test = images_of(folders[0], first, data)
    trained = resolve_model_data_config(first)["input_size"][-1]
    rows = []
    for size in SIZES:
        accuracy = {}
        for name, network in networks.items():
            found = {"as trained": test.accuracy(Resized(network, size))}
            if isinstance(network, SANet):
                larger = scaled(network, size / trained)
                found["with scaled heads"] = test.accuracy(Resized(larger, size))
            accuracy[name] = found
        rows.append({"size": size, "accuracy": accuracy})
        print(rows[-1], flush=True)
    write_json(DOCS / "sizes.json", {"images": len(test.split), "trained": trained, "rows": rows})


if __name__ == "__main__":
    app()
