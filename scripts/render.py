"""python scripts/render.py

Renders the tables of README.md and docs/: the text between `<!-- rendered: NAME -->` and `<!-- end -->`. NAME is a key
of RENDERED, or docs/tables/NAME.csv. Everything else in those files is written by hand.

Trained runs are the rows of results/runs.toml. scripts/bench.py --json writes docs/benchmarks/, with a "title" added by
hand. `pytest tests/proofs --record docs` writes docs/reliability/, docs/clients.json and docs/conversions.json.
"""

import csv
import json
import re
from collections.abc import Iterable
from functools import partial
from statistics import mean, stdev
from typing import Any

import timm
import torch
from runs import MODEL_CARDS, ROOT, Row, read_runs

from sa_zoo.analysis.heads import measure
from sa_zoo.analysis.maps import attention_layers
from sa_zoo.cost import cost_of
from sa_zoo.folders.metrics import Training
from sa_zoo.models.variants import VARIANTS

DOCS = ROOT / "docs"
BLOCK = re.compile(r"(?<=<!-- rendered: )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)
# Top-1 on the test images in the paper's Table 1, in percent, after so many epochs of 50,000 images.
PAPER = {
    "resnet18_cifar": 93.8,
    "sa_quadratic_cifar": 93.8,
    "sa_learned_cifar": 91.8,
    "sa_content_cifar": 87.1,
}
PAPER_EPOCHS = 300
CONVERSIONS = 12  # networks in the table
TABLES = ("positions", "photographs", "flowers", "imagenette")  # with a row per network
BENCHMARKED = ("sa_quadratic_cifar", "sa_plain_tiny_cifar")


def markdown_table(head: list[str], rows: Iterable[Iterable[str]], text: int = 1) -> str:
    """A table whose first `text` columns are text, and whose others are numbers."""
    rule = "|".join(["---"] * text + ["--:"] * (len(head) - text))
    first, *others = (f"| {' | '.join(row)} |" for row in (head, *rows))
    return "\n".join([first, f"|{rule}|", *others]) + "\n"


def read(path: str) -> Any:
    return json.loads((DOCS / path).read_text(encoding="utf-8"))


def from_csv(name: str) -> str:
    """docs/tables/NAME.csv, all of whose columns are text."""
    with (DOCS / "tables" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(line.replace("|", "\\|") for line in file)
    return markdown_table(head, rows, text=len(head))


# Trained runs


def top1(row: Row) -> str:
    """Mean and standard deviation over runs on the test images, and the number of runs."""
    found = [100 * run.test.top1 for run in row.results() if run.test]
    spread = f" ± {stdev(found):.2f}" if len(found) > 1 else ""
    return f"{mean(found):.2f} %{spread} ({len(found)})" if found else ""


def results() -> str:
    """The trained networks, with the paper's own results."""
    lines = []
    for row in read_runs():
        if row.table != "results":
            continue
        name = f"`{row.name}`"
        if row.weights:
            name = f"[{name}](model_cards/{row.name}/README.md)"
        numbers = [""] * 4
        if row.results():
            first = row.results()[0]
            train = first.train or Training()
            minutes = f"{train.cpu_seconds / 60:.0f}" if train.cpu_seconds and not row.gpu else ""
            numbers = [f"{first.parameters:,}", str(train.epochs), f"{train.pflop:.3g}", minutes]
        theirs = [""] * 2
        if row.name in PAPER:
            macs = cost_of(timm.create_model(row.name), (3, 32, 32)).macs
            pflop = 6 * macs * 50_000 * PAPER_EPOCHS / 1e15
            theirs = [f"{pflop:.0f}", f"{PAPER[row.name]} %"]
        says = f", {row.says}" if row.says else ""
        lines.append([name + says, *numbers, top1(row), *theirs])
    head = ["model", "parameters", "epochs", "PFLOP", "CPU minutes", "top-1"]
    return markdown_table([*head, "the paper's PFLOP", "the paper's top-1"], lines)


def networks(table: str) -> str:
    """Networks of one table, in the order of results/runs.toml."""
    lines = []
    for row in read_runs():
        if row.table == table and row.results():
            run = row.results()[0]
            train = run.train or Training()
            minutes = f"{(train.cpu_seconds or 0) / 60:.0f}"
            n = run.test.n if run.test else 0
            numbers = [f"{run.parameters:,}", str(train.epochs), minutes, f"{n:,}"]
            lines.append([row.says, *numbers, top1(row)])
    head = ["network", "parameters", "epochs", "CPU minutes", "test images", "top-1"]
    return markdown_table(head, lines)


# Models


def models() -> str:
    rows = []
    for variant in VARIANTS:
        cost = cost_of(timm.create_model(variant.name), (3, 32, 32))
        gflops = [f"{2 * macs / 1e9:.2f}" for macs in (cost.linear_macs, cost.macs)]
        rows.append([f"`{variant.name}`", variant.sentence, f"{cost.parameters:,}", *gflops])
    counted = ["GFLOPs, as the paper counts", "GFLOPs, all products"]
    return markdown_table(["timm name", "what it is", "parameters", *counted], rows, text=2)


def heads() -> str:
    """Means over the heads of each layer of the paper's networks, whose attention depends on positions only."""
    columns = []
    for name in ("sa_quadratic_cifar", "sa_learned_cifar"):
        network: Any = timm.create_model(f"local-dir:{MODEL_CARDS / name}", pretrained=True)
        layers = [measure(layer) for layer in attention_layers(network, torch.zeros(1, 3, 32, 32))]
        columns.append([f"{layer.share.mean():.0%}" for layer in layers])
        columns.append([f"{layer.reach.mean():.1f}" for layer in layers])
        if name == "sa_quadratic_cifar":
            sharp = [layer.alpha > 1 for layer in layers if layer.alpha is not None]
            columns.append([str(int(heads.sum())) for heads in sharp])
    rows = [[str(layer), *row] for layer, row in enumerate(zip(*columns, strict=True), start=1)]
    head = ["inside 3x3", "reach", "heads with alpha > 1"]
    head = [*(f"quadratic: {name}" for name in head), *(f"learned: {name}" for name in head[:2])]
    return markdown_table(["layer", *head], rows, text=0)


# Measurements


def conversions() -> str:
    """The networks whose logits differ most, of all that were converted."""
    found = read("conversions.json")
    rows = sorted(found["rows"], key=lambda row: -row["soft"])
    lines = []
    for row in rows[:CONVERSIONS]:
        counts = str(row["layers"]), f"{row['heads']:,}", str(row["left"])
        lines.append([row["architecture"], *counts, f"{row['hard']:.1e}", f"{row['soft']:.1e}"])
    head = ["architecture", "layers", "heads", "left as convolutions", "alpha 46", "alpha 20"]
    facts = ", ".join(f"{key} {value}" for key, value in found["conditions"].items())
    text = f"{len(rows)} networks, {facts}; the {CONVERSIONS} that differ most:"
    return f"{text}\n\n{markdown_table(head, lines)}"


def clients() -> str:
    rows = []
    for row in read("clients.json"):
        rows.append([f"{row['client']} {row['version']}", row["done"], row["result"]])
    return markdown_table(["client", "what was done", "result"], rows, text=3)


def reliability() -> str:
    """One row per proof."""
    rows = []
    for path in sorted((DOCS / "reliability").glob("*.json")):
        proof = read(f"reliability/{path.name}")
        link = f"[{path.stem}](reliability/{path.name})"
        counts = [f"{proof['tried']:,}", f"{proof['lost']:,}", f"{proof['seconds'] / 60:.1f}"]
        rows.append([link, proof["what"], *counts])
    return markdown_table(["proof", "what is tried", "tried", "lost", "minutes"], rows, text=2)


def speed() -> str:
    """Time per image of whole networks in bfloat16, on every machine that docs/benchmarks/ has."""
    lines = []
    for path in sorted((DOCS / "benchmarks").glob("*.json")):
        machine = read(f"benchmarks/{path.name}")
        for run in machine["runs"]:
            for row in run["rows"]:
                whole = row["model"] in BENCHMARKED and row["phase"].endswith("bfloat16")
                if not whole or row["subject"].startswith("definition"):
                    continue
                milliseconds = row["milliseconds"]
                teraflops = 2 * row["gmacs"] / milliseconds
                what = [machine["title"], row["model"], row["phase"], row["subject"]]
                commit = run["conditions"]["sa_zoo_commit"][:7]
                numbers = [str(row["images"]), f"{milliseconds:.3g}", f"{teraflops:.0f}"]
                lines.append([*what, *numbers, commit])
    head = ["machine", "model", "phase", "evaluated as", "batch", "ms per image", "TFLOP/s"]
    return markdown_table([*head, "commit"], lines, text=4)


RENDERED = {
    function.__name__: function
    for function in (
        results,
        models,
        heads,
        conversions,
        clients,
        reliability,
        speed,
    )
}
RENDERED |= {table: partial(networks, table) for table in TABLES}


def render(text: str) -> str:
    """A document with its rendered parts made again."""

    def rendered(match: re.Match[str]) -> str:
        name = match[1]
        made = RENDERED[name]() if name in RENDERED else from_csv(name)
        return f"{name}{match[2]}{made}"

    return BLOCK.sub(rendered, text)


def main() -> None:
    for path in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))):
        path.write_text(render(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
