"""The last step of gpu_day.py: tables of everything that was measured, and folders of the trained models."""

import json
from typing import Any

from benchmark import table
from catalogue import add_run
from gpu_measure import TYPES, rows_of
from gpu_plan import Day, Record
from render_docs import markdown_table

from sa_zoo.folders.metrics import read_metrics
from sa_zoo.folders.write import read_json, write_file
from sa_zoo.training.config import data_of


def report(day: Day, record: Record) -> None:
    """Make the folder of each finished run for model_cards/, and write OUT/report.md."""
    for run in sorted((day.out / "runs").glob("*/metrics.json")):
        entry = day.out / "model_cards" / run.parent.name
        if not entry.is_dir():
            add_run(run.parent, entry, data_of(str(run.parent)))
    write_file(day.out / "report.md", text_of(day))


def text_of(day: Day) -> str:
    """Everything that was measured, as Markdown."""
    conditions = read_json(day.out / "conditions.json")
    found = {path.stem: read_json(path) for path in sorted(day.out.glob("*.json"))}
    parts = ["# What was measured"]
    if conditions.pop("rehearsal"):
        parts.append("**A rehearsal without a GPU, of small networks on few images.**")
    parts.append("\n".join(f"- {name}: {value}" for name, value in conditions.items() if value))
    errors = [f"- {name}: {step['error']}" for name, step in found.items() if "error" in step]
    errors += [
        f"- {case}: {error}" for case, error in found.get("benchmark", {}).get("errors", {}).items()
    ]
    parts += ["## Errors", "\n".join(errors) or "None."]
    parts += ["## Check", check_table(found.get("check", {}).get("models", {}))]
    parts += ["## Speed and memory", table(rows_of(day.out / "speed.json"))]
    layers = found.get("thresholds", {})
    parts += ["## One layer, by axes and by its definition", table(layers.get("rows", []))]
    for phase, pixels in layers.get("above", {}).items():
        parts.append(f"{phase}: by axes above {pixels} pixels.")
    peaks = found.get("profile", {}).get("tflops", {})
    parts += ["## Matrix products", json.dumps(peaks)]
    parts += ["## Training", training_table(day, peaks.get("bfloat16"))]
    return "\n\n".join(parts) + "\n"


def check_table(models: dict[str, Any]) -> str:
    head = ["model", *(f"{name}: logits, gradients" for name in TYPES)]
    rows = []
    for model, precisions in models.items():
        cells = [model]
        for each in precisions.values():
            numbers = ", ".join(f"{value:.1e}" for value in each["differences"])
            cells.append(numbers if each["within"] else f"**{numbers}**")
        rows.append(cells)
    return markdown_table(head, rows, text=1)


def training_table(day: Day, peak: float | None) -> str:
    head = ["model", "rate", "epochs", "minutes", "PFLOP", "of the products", "top-1, test"]
    rows = []
    for path in sorted((day.out / "runs").glob("*/metrics.json")):
        metrics = read_metrics(path.parent)
        train = metrics.train
        share = f"{1e3 * train.pflop / train.seconds / peak:.0%}" if peak else ""
        plan = Record(day.out, f"train-{path.parent.name}").found
        rows.append(
            [
                str(metrics.model),
                f"{plan['rate']:g}",
                str(train.epochs),
                f"{train.seconds / 60:.1f}",
                f"{train.pflop:.3f}",
                share,
                f"{100 * metrics.test.top1:.2f} %",
            ]
        )
    return markdown_table(head, rows, text=1)
