"""python scripts/study.py taps RUN HARDENED CONTROL --data DATA | vits | figures

Measurements without training: docs/taps.json of heads.md, docs/tables/vits.csv of vit.md.

taps: what becomes of a run if each head reads one pixel. HARDENED is what `sa-zoo harden RUN --out HARDENED` left, and
CONTROL the same without model.harden: at the same rates, and for as much work.

vits: the vision transformers of timm that heads can be given to, and why others are refused.

figures: accuracies in results/ and docs/, drawn for vit.md, heads.md and conversions.md.
"""

from collections import defaultdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated

import timm
import torch
import typer
from matplotlib.figure import Figure
from runs import ROOT, Row, read_runs, rivals

import sa_zoo
from sa_zoo.analysis.figures import gaussian_layers, save_figure
from sa_zoo.analysis.head_figures import figure_of, head_colors, head_positions
from sa_zoo.commands.heads import TestImages
from sa_zoo.folders.opened import open_folder
from sa_zoo.folders.write import read_json, write_file, write_json
from sa_zoo.models.network import attention_in
from sa_zoo.training.config import data_of, load_config
from sa_zoo.vit.layers import attentions, grid_of

DOCS = ROOT / "docs"
# Top-1 at 16x16 and at 32x32 in percent, as published by Romero et al. (2022, arXiv:2110.08059).
PUBLISHED = {
    "FlexNet-7": (86.5, 82.7),
    "N-Jet": (86.4, 80.9),
    "3x3 convolutions": (85.3, 64.1),
    "ResNet-44": (85.8, 54.3),
}
Groups = dict[str, dict[str, list[float]]]  # group -> label -> numbers
Data = Annotated[str, typer.Option(help="Where the data are, if not where they were.")]
app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)


def images_of(folder: Path, data: str) -> TestImages:
    """The test images of a run."""
    config = data_of(folder)
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


@app.command()
def figures() -> None:
    """Draw docs/figures/{positions,sizes,corruptions}.png from the results."""
    lengths = {"all": "3 epochs", "20": "20 epochs"}
    found: Groups = {}
    for row in sorted(filter(Row.accuracies, rivals()), key=lambda row: -fmean(row.accuracies())):
        _, _, length = row.recipe.rpartition("_")
        if length in lengths:
            group = found.setdefault(lengths[length], {})
            group[row.says.replace("`", "")] = row.accuracies()
    save_figure(dots(found), DOCS / "figures" / "positions.png")

    found = {"trained at 16x16": {}, "at 32x32": {}}
    says = {row.name: row.says for row in read_runs()}
    for run, top1 in read_json(DOCS / "sizes.json").items():
        kind = says[run.rpartition("-")[0]].partition(":")[0]
        for group, key in zip(found.values(), ("as trained", "32x32, scaled"), strict=True):
            group.setdefault(f"{kind}, scaled", []).append(100 * top1[key])
    for name, both in PUBLISHED.items():
        for group, top1 in zip(found.values(), both, strict=True):
            group[name] = [top1]
    save_figure(dots(found), DOCS / "figures" / "sizes.png")

    found = {}
    for row in read_runs():
        if row.table == "twins" and row.recipe.endswith("_third"):
            for run in row.results():
                assert run.test
                for name, shares in (run.test.corrupted or {}).items():
                    group = found.setdefault(row.says, {})
                    group.setdefault(name.replace("_", " "), []).append(100 * fmean(shares))
    save_figure(dots(found), DOCS / "figures" / "corruptions.png")


def dots(found: Groups) -> Figure:
    """Mean and standard deviation of each label's numbers, in percent, one color per group."""
    labels = list(dict.fromkeys(label for group in found.values() for label in group))
    figure = figure_of((9, 0.3 * len(labels) + 1))
    (axes,) = figure.axes
    for number, (name, group) in enumerate(found.items()):
        places = [labels.index(label) + 0.15 * number for label in group]
        means = [fmean(values) for values in group.values()]
        spreads = [stdev(values) if len(values) > 1 else 0.0 for values in group.values()]
        axes.errorbar(
            means, places, xerr=spreads, fmt="o", label=name, color=head_colors(10)[number]
        )
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("top-1, test, %")
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return figure


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
