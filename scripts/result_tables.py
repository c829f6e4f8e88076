"""results/*.csv, in the form of timm's results folder: accuracy of the trained models, and speed on every machine.

scripts/render_docs.py writes them, from the metrics in model_cards/ and the measurements in docs/benchmarks/.
"""

import csv
import json
from collections.abc import Iterable
from io import StringIO
from pathlib import Path
from statistics import mean
from typing import Any

import timm
from timm.data import resolve_data_config

import sa_zoo  # noqa: F401  registers the names
from sa_zoo.folders.cost import cost_of
from sa_zoo.folders.metrics import Metrics, read_results

ROOT = Path(__file__).parents[1]
RESULTS = (
    "model",
    "top1",  # percent of the test images, mean over seeds
    "top1_err",
    "top5",
    "top5_err",
    "param_count",  # millions
    "img_size",
    "crop_pct",
    "interpolation",
    "macs",  # of an image, 1e9
    "pflop",  # of the training run
    "seeds",
)
BENCHMARK = (
    "model",
    "phase",
    "subject",
    "batch_size",
    "samples_per_sec",
    "step_time",  # milliseconds
    "gmacs",
    "memory_mib",  # of an image, beyond the weights
    "speed",  # relative to the yardstick of the case, as docs/benchmarks.md explains it
)


def result_tables() -> dict[Path, str]:
    """Every file of results/, by path."""
    folder = ROOT / "results"
    tables = {folder / "results-cifar10-jpeg75.csv": _csv(RESULTS, _results())}
    for path in sorted((ROOT / "docs" / "benchmarks").glob("*.json")):
        rows = _benchmark(json.loads(path.read_text(encoding="utf-8")))
        tables[folder / f"benchmark-{path.stem}.csv"] = _csv(BENCHMARK, rows)
    return tables


def _csv(columns: Iterable[str], rows: Iterable[dict[str, Any]]) -> str:
    text = StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _results() -> list[dict[str, Any]]:
    """One row per model, by its own recipe, the most accurate first."""
    rows = []
    for folder in (ROOT / "model_cards").iterdir():
        runs = read_results(folder).get("", [])
        if runs:
            rows.append(_result(folder, runs))
    return sorted(rows, key=lambda row: (-float(row["top1"]), row["model"]))


def _result(folder: Path, runs: list[Metrics]) -> dict[str, Any]:
    source = f"local-dir:{folder}" if (folder / "config.json").is_file() else folder.name
    network = timm.create_model(source)
    data = resolve_data_config(model=network)
    tests = [run.test for run in runs if run.test]
    top1 = 100 * mean(test.top1 for test in tests)
    top5 = 100 * mean(test.top5 for test in tests)
    train = runs[0].train
    return {
        "model": folder.name,
        "top1": f"{top1:.3f}",
        "top1_err": f"{100 - top1:.3f}",
        "top5": f"{top5:.3f}",
        "top5_err": f"{100 - top5:.3f}",
        "param_count": f"{(runs[0].parameters or 0) / 1e6:.2f}",
        "img_size": data["input_size"][-1],
        "crop_pct": data["crop_pct"],
        "interpolation": data["interpolation"],
        "macs": f"{cost_of(network, data['input_size']).macs / 1e9:.3f}",
        "pflop": f"{train.pflop:.3f}" if train and train.pflop else "",
        "seeds": len(tests),
    }


def _benchmark(machine: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """All rows of a machine, in the order in which they were measured."""
    for row in (row for run in machine["runs"] for row in run["rows"]):
        yield {
            "model": row["model"],
            "phase": row["phase"],
            "subject": row["subject"],
            "batch_size": row["images"],
            "samples_per_sec": f"{1000 / row['milliseconds']:.2f}",
            "step_time": f"{row['images'] * row['milliseconds']:.3f}",
            "gmacs": f"{row['gmacs']:.2f}",
            "memory_mib": f"{row['mib']:.1f}",
            "speed": f"{row['speed']:.3f}",
        }
