"""python scripts/render.py

Renders the tables of README.md and docs/ from data and by counting: whatever stands between `<!-- rendered: NAME -->`
and `<!-- end -->`. Everything else in those files is written by hand. Also writes results/*.csv, in the form of timm's
results folder. NAME is a function of this file, or docs/tables/NAME.csv, which is shown as it stands but for cells such
as "top-1 of RUN" and "PFLOP of RUN".

Trained runs are the rows of results/runs.toml. docs/benchmarks/ has one file per machine, written by scripts/bench.py
--json, with a "title" and "notes" added by hand. `pytest tests/proofs --record docs` writes docs/reliability/,
docs/clients.json and docs/conversions.json; scripts/study.py writes docs/taps.json and docs/sizes.json.
"""

import csv
import json
import re
from collections.abc import Iterable
from io import StringIO
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import timm
from runs import ROOT, Row, read_runs, rivals
from timing import cell, table
from timm.data import resolve_data_config

import sa_zoo
from sa_zoo.cost import cost_of, training_macs
from sa_zoo.folders.metrics import Metrics, Training
from sa_zoo.models.variants import VARIANTS
from sa_zoo.training.config import load_config

DOCS = ROOT / "docs"
BLOCK = re.compile(r"(?<=<!-- rendered: )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)
# Rows of README's speed table: label, model, phase, subject.
SPEED = (
    ("inference", "sa_quadratic_cifar", "inference, float32", "as built"),
    ("inference, deployed", "sa_quadratic_cifar", "inference, float32", "deployed"),
    ("training step", "sa_quadratic_cifar", "training, float32", "as built"),
    ("training step, bfloat16", "sa_quadratic_cifar", "training, bfloat16", "as built"),
    ("`sa_content_cifar`, inference", "sa_content_cifar", "inference, float32", "as built"),
    ("`sa_content_cifar`, training step", "sa_content_cifar", "training, float32", "as built"),
    (
        "one layer, 64x64 tokens",
        "one layer of sa_quadratic_cifar, 64x64 tokens",
        "inference, float32",
        "as built",
    ),
)
CNN = "resnet_tiny_cifar"  # that README's results are compared with
PROCESSOR = "EPYC"
# Phase and images per batch of the speeds in that table.
AGAINST = (
    ("training, bfloat16", 50),
    ("inference, bfloat16", 1),
    ("inference, bfloat16", 50),
    ("inference, float32", 1),
    ("inference, float32", 50),
)
# Test accuracy in the paper's Table 1, in percent, and its epochs of all 50,000 images.
PAPER = {
    "resnet18_cifar": 93.8,
    "sa_quadratic_cifar": 93.8,
    "sa_learned_cifar": 91.8,
    "sa_content_cifar": 87.1,
}
PAPER_EPOCHS = 300
TWINS = 3  # runs of the CNN that were trained on, as they were and as attention


def markdown_table(head: list[str], rows: Iterable[Iterable[str]], text: int) -> str:
    """A table whose first `text` columns are text, and whose others are numbers."""
    rule = "|".join(["---"] * text + ["--:"] * (len(head) - text))
    first, *others = (f"| {' | '.join(row)} |" for row in (head, *rows))
    return "\n".join([first, f"|{rule}|", *others]) + "\n"


def read(name: str) -> Any:
    return json.loads((DOCS / name).read_text(encoding="utf-8"))


def from_csv(name: str) -> str:
    """A table of docs/tables/NAME.csv; columns are text up to the first one of numbers."""
    with (DOCS / "tables" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        head, *rows = (list(map(shown, line)) for line in csv.reader(file))
    columns = list(zip(*rows, strict=True))
    numbers = [all(re.match(r"[-+]?\d[^a-z]*$|$", word) for word in column) for column in columns]
    return markdown_table(head, rows, text=(*numbers, True).index(True))


def shown(word: str) -> str:
    """A cell of a CSV file: "top-1 of RUN" and "PFLOP of RUN" are those of a trained run, all else is itself."""
    kind, of, run = word.partition(" of ")
    if not of or kind not in ("top-1", "PFLOP"):
        return word.replace("|", "\\|")
    (row,) = (row for row in read_runs() if row.name == run)
    return top1(row) if kind == "top-1" else work(row.results()[0].train or Training())


# Trained runs


def finished(*tables: str) -> list[Row]:
    """Rows of these tables that have results, best first."""
    rows = [row for row in read_runs() if row.table in tables and row.accuracies()]
    return sorted(rows, key=lambda row: (-mean(row.accuracies()), row.name))


def top1(row: Row) -> str:
    return over_runs(row.accuracies())


def over_runs(found: list[float]) -> str:
    """Mean and standard deviation over runs, and their number."""
    spread = f" ± {stdev(found):.2f}" if len(found) > 1 else ""
    return f"{mean(found):.2f} %{spread} ({len(found)})"


def on_corrupted(runs: list[Metrics]) -> str:
    """Top-1 on corrupted test images; empty if it was not measured."""
    tests = [run.test for run in runs if run.test and run.test.corrupted]
    return over_runs([100 * test.mean_corrupted for test in tests]) if tests else ""


def cells(row: Row, model_cards: str) -> list[str]:
    """Name, parameters, epochs and work; the name links to the card, or else to the metrics of the first run."""
    name = f"`{row.name if row.weights else row.model}`"
    says = f", {row.says}" if row.says else ""
    runs = row.results()
    if not runs:
        return [name + says, "", "", ""]
    path = "README.md" if row.weights else f"results/{row.recipe or 'seed'}-0.json"
    link = f"[{name}]({model_cards}/{row.folder.name}/{path})"
    train = runs[0].train or Training()
    return [link + says, f"{runs[0].parameters:,}", str(train.epochs or ""), work(train)]


def work(train: Training) -> str:
    return f"{train.pflop:.3f}" if train.pflop else ""


def paper() -> str:
    """The networks that the paper compared, and ours of their size, with what the paper says of its runs."""
    lines = []
    rows = [row for row in read_runs() if row.table == "paper"]
    for row in sorted(rows, key=lambda row: [*PAPER, row.name].index(row.name)):  # ours last
        theirs = [""] * 3
        if row.name in PAPER:
            macs = training_macs(timm.create_model(row.name), (3, 32, 32))
            pflop = 6 * macs * 50_000 * PAPER_EPOCHS / 1e15
            theirs = [str(PAPER_EPOCHS), f"{pflop:.0f}", f"{PAPER[row.name]} %"]
        lines.append([*cells(row, "model_cards"), top1(row) if row.accuracies() else "", *theirs])
    head = ["model", "parameters", "epochs", "PFLOP", "top-1, test"]
    return markdown_table([*head, "their epochs", "PFLOP", "top-1, original images"], lines, text=1)


def results() -> str:
    """The small networks that README compares, with their speed relative to that of the CNN."""
    head = ["model", "parameters", "epochs", "PFLOP", "CPU minutes", "top-1, test"]
    head += [f"{phase}, batch {images}" for phase, images in AGAINST]
    rows = []
    for row in sorted(finished("readme"), key=lambda row: row.name.endswith(".long")):
        speeds = [speed_against_cnn(row, phase, images) for phase, images in AGAINST]
        rows.append([*cells(row, "model_cards"), cpu_minutes(row), top1(row), *speeds])
    return markdown_table(head, rows, text=1)


def cpu_minutes(row: Row) -> str:
    """Of training, the mean over the runs on the processor that the table is about."""
    trained = [run.train for run in row.results() if PROCESSOR in str(run.environment)]
    seconds = [train.cpu_seconds for train in trained if train and train.cpu_seconds]
    return f"{mean(seconds) / 60:.0f}" if seconds else ""


def speed_against_cnn(row: Row, phase: str, images: int) -> str:
    """On the first machine that measured it; empty if none did."""
    if row.name == CNN:
        return "1x"
    training = phase.startswith("training")
    subject = "as built" if training and row.speed == "deployed" else row.speed
    wanted = [row.model, subject, phase, images]
    for found in measured():
        same = [found[key] for key in ("model", "subject", "phase", "images")] == wanted
        if same and found.get("yardstick") == CNN:
            return cell(found, "speed")
    return ""


def all_results() -> str:
    """All finished runs, best first."""
    rows = []
    for row in finished("paper", "readme", "all"):
        name, parameters, *others = cells(row, "../model_cards")
        runs = row.results()
        held_out = [100 * run.validation.top1 for run in runs if run.validation]
        accuracy = [f"{mean(held_out):.1f} %" if held_out else "", top1(row), on_corrupted(runs)]
        macs = macs_of(row, runs)
        rows.append([name, parameters, macs, *others, *accuracy, *minutes_and_machine(runs)])
    head = ["model", "parameters", "multiply-adds", "epochs", "PFLOP", "held out", "top-1, test"]
    return markdown_table([*head, "top-1, corrupted", "minutes", "machine"], rows, text=1)


def macs_of(row: Row, runs: list[Metrics]) -> str:
    """Of the network that was trained, with its taps; empty if it is not the one that the folder's name makes."""
    if not timm.is_model(row.model):
        return ""
    filed = (row.folder / "config.json").is_file()
    model = timm.create_model(f"local-dir:{row.folder}" if filed else row.model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if not runs or runs[0].parameters != parameters:
        return ""
    verb, _, recipe = row.command.partition(" ")
    if verb == "train" and load_config(recipe, row.set.split()).model.harden:
        sa_zoo.harden(model)
    return f"{training_macs(model, (3, 32, 32)) / 1e6:.1f} M"


def minutes_and_machine(runs: list[Metrics]) -> tuple[str, str]:
    """CPU minutes of the first run, or those of the clock, and where."""
    if not runs or not runs[0].train:
        return "", "converted" if runs else ""
    train = runs[0].train
    environment = runs[0].environment or {}
    machine = str(environment.get("cpu", environment.get("device")))
    if environment.get("threads", 1) != 1:
        machine += f", {environment['threads']} threads"
    seconds = train.cpu_seconds or train.seconds or 0
    return f"{seconds / 60:.0f}", machine + ("" if train.cpu_seconds else ", by the clock")


def scores() -> str:
    """Networks that differ in the terms of their scores, trained for 8 epochs."""
    rows = []
    for row in finished("scores"):
        train = row.results()[0].train or Training()
        rows.append([f"`{row.model}`", row.says, work(train), top1(row)])
    return markdown_table(["model", "scores", "PFLOP", "top-1, test"], rows, text=2)


def fine_tuned() -> str:
    """Networks trained on a small folder of photographs, by what they start from."""
    rows = []
    for row in finished("clothes"):
        runs = row.results()
        rows.append([row.says, f"{runs[0].parameters:,}", top1(row), minutes_and_machine(runs)[0]])
    return markdown_table(["network", "parameters", "top-1, test", "CPU minutes"], rows, text=1)


def starts() -> str:
    """Vision transformers by start, on all images and on a tenth of them, with the difference to timm's."""
    shares = {"all": "all images", "tenth": "a tenth of them"}
    found: dict[str, list[str]] = {}
    timms = {}
    for row in read_runs():
        if row.table == "starts" and row.accuracies():
            start, _, share = row.recipe.rpartition("_")
            timms.setdefault(share, row)
            more = mean(row.accuracies()) - mean(timms[share].accuracies())
            gain = "" if start == "timm" else f"{more:+.2f}"
            found.setdefault(row.says, [row.says]).extend([top1(row), gain])
    head = ["start"]
    for images in shares.values():
        head += [images, "gain"]
    return markdown_table(head, found.values(), text=1)


def positions() -> str:
    """Vision transformers by their positions, best first; speed and memory of a training step with many tokens."""
    lengths = {"all": "3 epochs", "20": "20 epochs", "tenth": "10 epochs of a tenth"}
    found: dict[str, dict[str, Row]] = {}
    for row in filter(Row.accuracies, rivals()):
        found.setdefault(row.says, {})[row.recipe.rpartition("_")[2]] = row
    many = [each for each in measured() if each["model"] == "ViT, 32x32 tokens"]
    costs = {each["subject"]: each for each in many if each["phase"].startswith("training")}
    lines = []
    for says, rows in sorted(found.items(), key=lambda item: -mean(item[1]["all"].accuracies())):
        line = [says, cells(rows["all"], "")[1]]
        line += [top1(rows[key]) if key in rows else "" for key in lengths]
        cost = costs.get(rows["all"].name)
        lines.append(line + [cell(cost, key) if cost else "" for key in ("speed", "memory")])
    head = ["positions", "parameters", *lengths.values(), "speed", "memory"]
    return markdown_table(head, lines, text=1)


def twins() -> str:
    """A trained CNN and its twins of attention after more epochs, on test images and on corrupted ones."""
    cnn = next(row for row in read_runs() if row.name == CNN)
    lines = []
    shares: dict[str, list[float]] = {}  # accuracies of the CNN after as much work
    for row in [cnn, *(row for row in read_runs() if row.table == "twins" and row.accuracies())]:
        runs = row.results()[:TWINS]
        clean = [100 * run.test.top1 for run in runs if run.test]
        train = runs[0].train or Training()
        more = [str(train.epochs), work(train)] if row.table == "twins" else ["", ""]
        says = "the CNN, as trained" if row is cnn else row.says
        pairs = zip(clean, shares.setdefault(row.recipe.rpartition("_")[2], clean), strict=True)
        lead = over_runs([own - other for own, other in pairs]) if row.model != CNN else ""
        found = [over_runs(clean), lead, on_corrupted(runs)]
        lines.append([says, *more, *found])
    head = ["network", "more epochs", "PFLOP", "top-1, test", "over the CNN", "top-1, corrupted"]
    return markdown_table(head, lines, text=1)


# Models and conversions


def models() -> str:
    rows = []
    for variant in VARIANTS:
        cost = cost_of(timm.create_model(variant.name), (3, 32, 32))
        gflops = [f"{2 * macs / 1e9:.2f}" for macs in (cost.linear_macs, cost.macs)]
        rows.append([f"`{variant.name}`", variant.sentence, f"{cost.parameters:,}", *gflops])
    counted = ["GFLOPs, as the paper counts", "GFLOPs, all products"]
    return markdown_table(["timm name", "what it is", "parameters", *counted], rows, text=2)


def conversions() -> str:
    found = read("conversions.json")
    rows = []
    for row in found["rows"]:
        counts = str(row["layers"]), f"{row['heads']:,}", str(row["left"])
        rows.append([row["architecture"], *counts, f"{row['hard']:.1e}", f"{row['soft']:.1e}"])
    head = ["architecture", "layers", "heads", "left as convolutions", "alpha 46", "alpha 20"]
    return f"{facts(found['conditions'])}\n\n" + markdown_table(head, rows, text=1)


def clients() -> str:
    rows = []
    for row in read("clients.json"):
        result = row["result"].replace("|", "\\|")
        rows.append([f"{row['client']} {row['version']}", row["done"], result])
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


# Speed


def machines() -> list[dict[str, Any]]:
    """The benchmark results, by file name."""
    return [read(f"benchmarks/{path.name}") for path in sorted((DOCS / "benchmarks").glob("*"))]


def measured() -> Iterable[dict[str, Any]]:
    """All rows of all machines."""
    for machine in machines():
        for run in machine["runs"]:
            yield from run["rows"]


def facts(conditions: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in conditions.items() if value != "")


def benchmarks() -> str:
    """Of each machine, its conditions, the commands, and one table of all cases."""
    parts = []
    for machine in machines():
        runs = machine["runs"]
        parts.append(f"## {machine['title']}\n")
        parts += [f"- {note}" for note in machine.get("notes", [])]
        for run in runs:
            rounds, load = run["conditions"]["rounds"], run["conditions"]["load"]
            parts.append(f"- `{run['command']}`: {rounds} rounds, load {load} before")
        first = runs[0]["conditions"].items()
        shared = [pair for pair in first if all(pair in r["conditions"].items() for r in runs)]
        parts.append(f"- {facts(dict(shared))}\n")
        parts.append(table([row for run in runs for row in run["rows"]]) + "\n")
    return "\n".join(parts)


def speed() -> str:
    """Speed and memory of a few subjects on every machine, relative to the definition."""
    found = {}
    for machine in machines():
        rows = [row for run in machine["runs"] for row in run["rows"]]
        rows = [row for row in rows if row["yardstick"].startswith("definition")]
        if rows:
            found[machine["title"]] = rows
    lines = []
    for label, *kind in SPEED:
        line = [label]
        for rows in found.values():
            same = [r for r in rows if [r["model"], r["phase"], r["subject"]] == kind]
            line.append(f"{cell(same[0], 'speed')}, {cell(same[0], 'memory')}" if same else "")
        lines.append(line)
    return markdown_table(["speed, memory", *found], lines, text=1)


# Heads


def taps() -> str:
    """Accuracy of each run as attention and with every head on one pixel, and their means."""
    rows = read("taps.json")
    names = ("run", "untrained", "hardened", "control")
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        runs = sorted((row for row in rows if row["model"] == model), key=lambda row: row["seed"])
        for row in runs:
            numbers = [f"{100 * row['accuracy'][name]:.2f}" for name in names]
            lines.append([f"`{model}`, seed {row['seed']}", *numbers])
        if len(runs) > 1:
            columns = [[100 * row["accuracy"][name] for row in runs] for name in names]
            means = [f"{mean(column):.2f} ± {stdev(column):.2f}" for column in columns]
            lines.append([f"`{model}`, mean of {len(runs)}", *means])
    head = ["network", "as trained", "one pixel per head", "and trained on", "control, trained on"]
    return markdown_table(head, lines, text=1)


def pixels() -> str:
    """The pixels that the layers of the first run of each network read, as (row, column) from the query."""
    layers = []
    for row in read("taps.json"):
        if row["seed"] == 0:
            for index, offsets in enumerate(row["taps"], start=1):
                read_by = ", ".join(f"({down}, {across})" for down, across in sorted(offsets))
                layers.append([f"`{row['model']}`", str(index), read_by])
    return markdown_table(["network", "layer", "pixels read"], layers, text=3)


def sizes() -> str:
    """Accuracy on images larger than those of the training, without and with scaled heads."""
    measured: dict[str, list[dict[str, float]]] = {}
    for run, found in read("sizes.json").items():
        measured.setdefault(run.rpartition("-")[0], []).append(found)
    lines = []
    for row in read_runs():
        if row.name in measured:
            runs = measured[row.name]
            means = [over_runs([100 * run[size] for run in runs]) for size in runs[0]]
            lines.append([row.says, f"{row.results()[0].parameters:,}", *means])
    return markdown_table(["network", "parameters", *found], lines, text=1)


RENDERED = {
    function.__name__: function
    for function in (
        paper,
        results,
        all_results,
        scores,
        fine_tuned,
        starts,
        positions,
        twins,
        models,
        conversions,
        clients,
        reliability,
        benchmarks,
        speed,
        taps,
        pixels,
        sizes,
    )
}


def render(text: str) -> str:
    """A document with its rendered parts made again."""

    def rendered(match: re.Match[str]) -> str:
        name = match[1]
        made = RENDERED[name]() if name in RENDERED else from_csv(name)
        return f"{name}{match[2]}{made}"

    return BLOCK.sub(rendered, text)


# results/*.csv


def result_files() -> dict[Path, str]:
    """Accuracy of the trained models by their own recipes, and speed on every machine."""
    folder = ROOT / "results"
    rows = [row for row in finished("paper", "readme", "all") if not row.recipe and row.results()]
    models = [row for row in rows if timm.is_model(row.model)]
    files = {folder / "results-cifar10-jpeg75.csv": as_csv(map(result, models))}
    for path in sorted((DOCS / "benchmarks").glob("*.json")):
        rows = [row for run in read(f"benchmarks/{path.name}")["runs"] for row in run["rows"]]
        files[folder / f"benchmark-{path.stem}.csv"] = as_csv(map(measurement, rows))
    return files


def as_csv(rows: Iterable[dict[str, Any]]) -> str:
    rows = list(rows)
    text = StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def result(row: Row) -> dict[str, Any]:
    filed = (row.folder / "config.json").is_file()
    network = timm.create_model(f"local-dir:{row.folder}" if filed else row.model)
    data = resolve_data_config(model=network)
    runs = row.results()
    tests = [run.test for run in runs if run.test]
    first = 100 * mean(test.top1 for test in tests)
    fifth = 100 * mean(test.top5 for test in tests)
    return {
        "model": row.name,
        "top1": f"{first:.3f}",  # percent of the test images, mean over seeds
        "top1_err": f"{100 - first:.3f}",
        "top5": f"{fifth:.3f}",
        "top5_err": f"{100 - fifth:.3f}",
        "param_count": f"{(runs[0].parameters or 0) / 1e6:.2f}",  # millions
        "img_size": data["input_size"][-1],
        "crop_pct": data["crop_pct"],
        "interpolation": data["interpolation"],
        "macs": f"{cost_of(network, data['input_size']).macs / 1e9:.3f}",  # of an image, 1e9
        "pflop": work(runs[0].train or Training()),  # of the training run
        "seeds": len(tests),
    }


def measurement(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": row["model"],
        "phase": row["phase"],
        "subject": row["subject"],
        "batch_size": row["images"],
        "samples_per_sec": f"{1000 / row['milliseconds']:.2f}",
        "step_time": f"{row['images'] * row['milliseconds']:.3f}",  # milliseconds
        "gmacs": f"{row['gmacs']:.2f}",
        "memory_mib": f"{row['mib']:.1f}",  # of an image, beyond the weights
        "speed": f"{row['speed']:.3f}",  # relative to the yardstick of the case
    }


def main() -> None:
    for path in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))):
        path.write_text(render(path.read_text(encoding="utf-8")), encoding="utf-8")
    for path, text in result_files().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
