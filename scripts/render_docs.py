"""python scripts/render_docs.py

Renders the tables in README.md and docs/ from committed JSON and by counting: whatever stands between
`<!-- rendered: NAME -->` and `<!-- end -->`. Everything else in those files is written by hand. Also writes results/.

docs/reliability/ has one file per proof, NAME.json, written by scripts/prove.py NAME or scripts/prove_NAME.py.
docs/clients.json is written by scripts/try_clients.py, docs/taps.json by scripts/study_taps.py, and docs/sizes.json by
scripts/study_sizes.py.
docs/benchmarks/ has one file per machine, written by scripts/bench.py --json; its "title", which heads a column of the
tables, and its "notes", if there are any, are added by hand.
"""

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import timm
from benchmark import cell, table
from result_tables import result_tables
from safetensors.torch import load_file

import sa_zoo  # noqa: F401  registers the names
from sa_zoo.folders.cost import cost_of, training_macs
from sa_zoo.folders.metrics import Metrics, Training, read_results
from sa_zoo.models.network import attention_in
from sa_zoo.models.variants import VARIANTS

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(?<=<!-- rendered: )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)
# Rows of README's speed table: label, model, phase, subject.
SPEED = (
    ("inference", "sa_quadratic_cifar", "inference, float32", "as built"),
    ("inference, folded", "sa_quadratic_cifar", "inference, float32", "folded"),
    ("training step", "sa_quadratic_cifar", "training, float32", "as built"),
    ("`sa_content_cifar`, inference", "sa_content_cifar", "inference, float32", "as built"),
    ("`sa_content_cifar`, training step", "sa_content_cifar", "training, float32", "as built"),
    (
        "one layer, 64x64 tokens",
        "one layer of sa_quadratic_cifar, 64x64 tokens",
        "inference, float32",
        "as built",
    ),
)
# What the scores of a variant are made of, for the table that compares runs of 8 epochs.
SCORES = {
    "sa_learned_tiny_cifar": "the last term of Eq. 8, with a vector per axis",
    "sa_quadratic_gen_tiny_cifar": "the last term, as a Gaussian of any covariance",
    "sa_quadratic_tiny_cifar": "the last term, as a round Gaussian",
    "sa_quadratic_kernel_tiny_cifar": "the last term, starting as 3x3 convolutions in three of six blocks",
    "sa_eq8_tiny_cifar": "all four terms",
    "sa_content_tiny_cifar": "query-key and query-position, with a bias of the query: the paper's models with content",
    "sa_content_kernel_tiny_cifar": "query-key and query-position, starting as 3x3 convolutions without content",
    "sa_absolute_tiny_cifar": "Eq. 7 instead",
}

# Rows of README's table: name of a folder in model_cards/ and recipe, and how the network is evaluated where its speed
# is measured relative to the CNN's.
CNN = "resnet_tiny_cifar"
COMPARED = {
    ("sa_pyramid_h5_tiny_cifar", ""): "as built",
    (CNN, ""): CNN,
    ("sa_pyramid_h5_tiny_cifar", "taps"): "taps of a 3x3 kernel",
    ("sa_pyramid_tiny_cifar", ""): "as built",
    ("sa_quadratic_kernel_tiny_cifar", ""): "",
    ("sa_quadratic_tiny_cifar", ""): "",
    ("sa_pyramid_h5_tiny_cifar.long", ""): "",
}
# Columns of that table, and the phase of the benchmark that they are from.
AGAINST = {"training speed": "training, bfloat16", "inference speed": "inference, float32"}
# Pyramids in model_cards/ whose heads docs/heads.md follows through their training.
PYRAMIDS = ("sa_pyramid_tiny_cifar", "sa_pyramid_h5_tiny_cifar")
LEGEND = "PFLOP is the work of the whole run. Top-1 is the mean ± standard deviation over (so many) seeds."

# Recipes other than a model's own, by the first part of the names of their files in model_cards/NAME/results.
RECIPES = {
    "adamw": "earlier recipe",
    "8epochs": "8 epochs",
    "start": "only the last two stages as attention, at alpha 4",
    "content": "only the last two stages as attention, with content, 2 more epochs",
    "tuned": "2 more epochs",
    "taps": "every head on one pixel of a 3x3 kernel from the start: a CNN",
    "twice": "twice the work",
    "scratch": "all layers but the first as attention, from scratch at alpha 2",
    "mixup": "with mixup",
    "unmixed": "without mixup",
    "cutmix": "with cutmix, too",
}

# Vision transformers of timm in model_cards/, which docs/vit.md compares by start.
VITS = ("vit_tiny_patch16_224", "local_vit")
STARTS = {
    "timm": "timm's",
    "quadratic": "`quadratic`, first three blocks",
    "both": "`quadratic`, all blocks, and `add_positions`",
    "positions": "timm's, and `add_positions`",
}


def markdown_table(head: list[str], rows: Iterable[Iterable[str]], text: int) -> str:
    """A table whose first `text` columns are text, and whose others are numbers."""
    rule = "|".join(["---"] * text + ["--:"] * (len(head) - text))
    first, *others = (f"| {' | '.join(row)} |" for row in (head, *rows))
    return "\n".join([first, f"|{rule}|", *others]) + "\n"


def read(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "docs" / name).read_text(encoding="utf-8"))


def machines() -> list[dict[str, Any]]:
    """The benchmark results, by file name."""
    return [
        read(f"benchmarks/{path.name}")
        for path in sorted((ROOT / "docs" / "benchmarks").glob("*.json"))
    ]


def models() -> str:
    rows = []
    for variant in VARIANTS:
        cost = cost_of(timm.create_model(variant.name), (3, 32, 32))
        gflops = [f"{2 * macs / 1e9:.2f}" for macs in (cost.linear_macs, cost.macs)]
        numbers = [f"{cost.parameters:,}", *gflops]
        rows.append([f"`{variant.name}`", variant.sentence, *numbers])
    head = [
        "timm name",
        "what it is",
        "parameters",
        "GFLOPs, as the paper counts",
        "GFLOPs, all products",
    ]
    return markdown_table(head, rows, text=2)


def all_results() -> str:
    """All finished runs by model and recipe, best first."""
    found = [
        (folder, recipe, runs)
        for folder in (ROOT / "model_cards").iterdir()
        if folder.name not in VITS
        for recipe, runs in read_results(folder).items()
    ]
    found.sort(key=lambda each: (-mean(accuracies(each[2])), each[0].name))
    hardware = Counter(machine_of(runs[0]) for _, _, runs in found if runs[0].train)
    usual = hardware.most_common(1)[0][0]
    rows = []
    for folder, recipe, runs in found:
        name, parameters, *others = result(folder, recipe, runs, "../model_cards")
        macs = macs_of(folder, recipe, runs[0])
        rows.append([name, parameters, macs, *others, minutes(runs[0], usual)])
    head = ["model", "parameters", "multiply-adds", "epochs", "PFLOP", "top-1, test", "minutes"]
    paper = [
        f"{6 * cost_of(timm.create_model(name), (3, 32, 32)).macs * 50_000 * 300 / 1e15:.0f} for `{name}`"
        for name in ("sa_quadratic_cifar", "resnet18_cifar")
    ]
    legend = (
        "Multiply-adds are those of all matrix products that training evaluates for one image. "
        f"{LEGEND} The paper's runs are {' and '.join(paper)}. "
        f"Minutes are CPU minutes on {usual}, unless another machine is named."
    )
    return markdown_table(head, rows, text=1) + f"\n{legend}\n"


def compared() -> str:
    """Networks of equal size, with their speed relative to that of the CNN."""
    rows = []
    for (name, recipe), subject in COMPARED.items():
        folder = ROOT / "model_cards" / name
        runs = read_results(folder)[recipe]
        speeds = [speed_against_cnn(name, subject, phase) for phase in AGAINST.values()]
        rows.append([*result(folder, recipe, runs, "model_cards"), *speeds])
    head = ["model", "parameters", "epochs", "PFLOP", "top-1, test", *AGAINST]
    return markdown_table(head, rows, text=1) + f"\n{LEGEND}\n"


def speed_against_cnn(model: str, subject: str, phase: str) -> str:
    """Relative to the CNN, on the first machine that measured it; empty if none did."""
    if model == CNN:
        return "1x"
    for machine in machines():
        for row in (row for run in machine["runs"] for row in run["rows"]):
            same = [row[key] for key in ("model", "subject", "phase")] == [model, subject, phase]
            if same and row.get("yardstick") == CNN:
                return cell(row, "speed")
    return ""


def result(folder: Path, recipe: str, runs: list[Metrics], model_cards: str) -> list[str]:
    """The first cells of a row: accuracy over all runs, everything else from the first one. The name links to it."""
    train = runs[0].train or Training()
    file = f"results/{recipe}-0.json" if recipe else "README.md"
    return [
        f"[`{folder.name}`]({model_cards}/{folder.name}/{file})"
        + (f", {RECIPES.get(recipe, recipe)}" if recipe else ""),
        f"{runs[0].parameters:,}",
        str(train.epochs or ""),
        work(train),
        top1(runs),
    ]


def macs_of(folder: Path, recipe: str, run: Metrics) -> str:
    """Of the network that a run trained; empty if it is not the one that the folder's name makes."""
    name = f"local-dir:{folder}" if (folder / "config.json").is_file() else folder.name
    model = timm.create_model(name)
    if recipe == "taps" or run.parameters != sum(p.numel() for p in model.parameters()):
        return ""
    return f"{training_macs(model, (3, 32, 32)) / 1e6:.1f} M"


def ablation() -> str:
    """The runs of 8 epochs, by accuracy."""
    found = [(name, read_results(ROOT / "model_cards" / name)["8epochs"]) for name in SCORES]
    found.sort(key=lambda each: -mean(accuracies(each[1])))
    rows = [
        [f"`{name}`", SCORES[name], work(runs[0].train or Training()), top1(runs)]
        for name, runs in found
    ]
    return markdown_table(["model", "scores", "PFLOP", "top-1, test"], rows, text=2)


def work(train: Training) -> str:
    return f"{train.pflop:.3f}" if train.pflop else ""


def top1(runs: list[Metrics]) -> str:
    """Mean and standard deviation over runs, and their number."""
    found = accuracies(runs)
    spread = f" ± {stdev(found):.2f}" if len(found) > 1 else ""
    return f"{mean(found):.2f} %{spread} ({len(found)})"


def minutes(run: Metrics, usual: str) -> str:
    """CPU minutes, or those of the clock; with the machine if it is not the usual one."""
    if not run.train:
        return "converted"
    seconds = run.train.cpu_seconds or run.train.seconds or 0
    kind = "" if run.train.cpu_seconds else " by the clock"
    machine = machine_of(run)
    return f"{seconds / 60:.0f}{kind}" + ("" if machine == usual else f", {machine}")


def machine_of(run: Metrics) -> str:
    environment = run.environment or {}
    if environment.get("device", "cpu") != "cpu":
        return str(environment["device"])
    if "cpu" not in environment:
        return ""
    return f"{environment['cpu']}, {environment['threads']} thread{'s' * (environment['threads'] != 1)}"


def accuracies(runs: list[Metrics]) -> list[float]:
    """Top-1 on the test images, in percent."""
    return [100 * run.test.top1 for run in runs if run.test]


def conversions() -> str:
    found = read("conversions.json")
    rows = []
    for row in found["rows"]:
        counts = str(row["layers"]), f"{row['heads']:,}", str(row["left"])
        rows.append([row["architecture"], *counts, f"{row['hard']:.1e}", f"{row['soft']:.1e}"])
    head = ["architecture", "layers", "heads", "left as convolutions", "alpha 46", "alpha 20"]
    return f"`{found['command']}`\n\n{facts(found['conditions'])}\n\n" + markdown_table(
        head, rows, text=1
    )


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
        shared = {
            key: value
            for key, value in runs[0]["conditions"].items()
            if all(run["conditions"].get(key) == value for run in runs)
        }
        parts.append(f"- {facts(shared)}\n")
        parts.append(table([row for run in runs for row in run["rows"]]) + "\n")
    return "\n".join(parts)


def speed() -> str:
    """Speed and memory of a few subjects on every machine, from the first of its rows of that kind."""
    found, lines = machines(), []
    for label, *kind in SPEED:
        lines.append([label])
        for machine in found:
            rows = [row for run in machine["runs"] for row in run["rows"]]
            same = [
                row for row in rows if [row["model"], row["phase"], row["subject"]] == kind
            ] or [{}]
            lines[-1].append(
                ", ".join(filter(None, (cell(same[0], key) for key in ("speed", "memory"))))
            )
    return markdown_table(
        ["speed, memory"] + [machine["title"] for machine in found], lines, text=1
    )


def clients() -> str:
    rows = [
        [f"{row['client']} {row['version']}", row["done"], row["result"].replace("|", "\\|")]
        for row in read("clients.json")
    ]
    return markdown_table(["client", "what was done", "result"], rows, text=3)


def starts() -> str:
    """Vision transformers by start, trained on all images and on a tenth of them, with the difference to timm's."""
    shares = {"all": "all images", "tenth": "a tenth of them"}
    found = {}
    for vit in VITS:
        found |= read_results(ROOT / "model_cards" / vit)
    rows = []
    for start, label in STARTS.items():
        row = [label]
        for share in shares:
            runs = found[f"{start}_{share}"]
            more = mean(accuracies(runs)) - mean(accuracies(found[f"timm_{share}"]))
            row += [top1(runs), "" if start == "timm" else f"{more:+.2f}"]
        rows.append(row)
    head = ["start"]
    for images in shares.values():
        head += [images, "gain"]
    return markdown_table(head, rows, text=1)


def taps() -> str:
    """Accuracy of each run as attention and as taps, their means, and the pixels that layers of the first run read."""
    rows = read("taps.json")
    names = ("run", "untrained", "hardened", "control")
    lines = []
    layers = []
    for model in dict.fromkeys(row["model"] for row in rows):
        runs = sorted((row for row in rows if row["model"] == model), key=lambda row: row["seed"])
        for row in runs:
            numbers = [f"{100 * row['accuracy'][name]:.2f}" for name in names]
            lines.append([f"`{model}`, seed {row['seed']}", *numbers, *_trained_on(row)])
        if len(runs) > 1:
            columns = [[100 * row["accuracy"][name] for row in runs] for name in names]
            means = [f"{mean(column):.2f} ± {stdev(column):.2f}" for column in columns]
            lines.append([f"`{model}`, mean of {len(runs)}", *means, *_trained_on(runs[0])])
        for index, offsets in enumerate(runs[0]["taps"], start=1):
            pixels = ", ".join(f"({down}, {across})" for down, across in sorted(offsets))
            layers.append([f"`{model}`, seed {runs[0]['seed']}", str(index), pixels])
    head = [
        "network",
        "as trained",
        "taps, not trained",
        "taps, trained on",
        "attention, trained on",
        "more epochs",
        "more PFLOP",
    ]
    table = markdown_table(head, lines, text=1)
    return f"{table}\n" + markdown_table(["network", "layer", "pixels read"], layers, text=3)


def sizes() -> str:
    """Accuracy by the size of the test images."""
    rows = read("sizes.json")["rows"]
    head = ["images"]
    for name, found in rows[0]["accuracy"].items():
        head += [f"`{name}`", *list(found)[1:]]
    lines = []
    for row in rows:
        numbers = [number for found in row["accuracy"].values() for number in found.values()]
        lines.append(
            [f"{row['size']}x{row['size']}", *(f"{100 * number:.2f} %" for number in numbers)]
        )
    return markdown_table(head, lines, text=1)


def offsets() -> str:
    """How far the heads of pyramids are from the query: mean of the coordinates of Delta that start at 1 or -1."""
    columns: dict[str, list[list[str]]] = {}
    for name in PYRAMIDS:
        folder = ROOT / "model_cards" / name
        recorded = load_file(folder / "heads.safetensors")
        recipe = tomllib.loads((folder / "train.toml").read_text(encoding="utf-8"))
        small = recipe["augment"]["small_epochs"]
        paths = attention_in(timm.create_model(name).blocks)
        for epoch in (small, small + 1, recipe["train"]["epochs"]):
            column = columns.setdefault(f"after {epoch} epochs", [[] for _ in paths])
            for cells, path in zip(column, paths, strict=True):
                Delta = recorded[f"blocks.{path}.terms.0.Delta"].abs()  # (epochs + 1, N_h, 2)
                cells.append(f"{Delta[epoch][Delta[0] == 1].mean():.2f}")
    rows = [
        [str(layer), *map(", ".join, row)]
        for layer, row in enumerate(zip(*columns.values(), strict=True), start=1)
    ]
    return markdown_table(["layer", *columns], rows, text=1)


def _trained_on(row: dict[str, Any]) -> list[str]:
    """How much longer a network was trained: as taps, and as attention."""
    both = [row["trained on"][name] for name in ("hardened", "control")]
    epochs = [str(each["epochs"]) for each in both]
    work = [f"{each['pflop']:.3f}" for each in both]
    return [", ".join(epochs), ", ".join(work)]


def reliability() -> str:
    """One row per proof."""
    rows = []
    for path in sorted((ROOT / "docs" / "reliability").glob("*.json")):
        proof = read(f"reliability/{path.name}")
        link = f"[{path.stem}](reliability/{path.name})"
        counts = [f"{proof['tried']:,}", f"{proof['lost']:,}", f"{proof['seconds'] / 60:.1f}"]
        rows.append([link, proof["what"], f"`{proof['command']}`", *counts])
    head = ["proof", "what is tried", "command", "tried", "lost", "minutes"]
    return markdown_table(head, rows, text=3)


RENDERED = {
    "results": compared,
    "all_results": all_results,
    "ablation": ablation,
    "models": models,
    "conversions": conversions,
    "benchmarks": benchmarks,
    "speed": speed,
    "clients": clients,
    "reliability": reliability,
    "taps": taps,
    "sizes": sizes,
    "offsets": offsets,
    "starts": starts,
}


def render(text: str) -> str:
    """A document with its rendered parts made again."""
    return BLOCK.sub(lambda match: match[1] + match[2] + RENDERED[match[1]](), text)


def main() -> None:
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        path.write_text(render(path.read_text(encoding="utf-8")), encoding="utf-8")
    for path, text in result_tables().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
