"""metrics.json of a model folder: the one schema of everything that was measured.

Training, conversion and evaluation write it, cards are rendered from it. A key that was not measured is absent.
"""

import platform
import re
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sa_zoo.folders.write import read_json, write_json

FILE = "metrics.json"


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Scores(Section):
    """Result on a split: top1 and top5 as fractions, loss (mean cross-entropy) in nats, n images."""

    top1: float = Field(ge=0, le=1)
    top5: float = Field(ge=0, le=1)
    loss: float
    n: int = Field(ge=1)
    # on the test split of a run, and by `sa-zoo evaluate --detail`
    per_class: list[float | None] | None = None
    calibration_error: float | None = None
    # confidence, accuracy and (not in older files) number of images in each bin of confidence that has any
    calibration_curve: dict[str, list[float]] | None = None
    confusion_matrix: list[list[int]] | None = None


class Training(Section):
    seconds: float | None = None
    cpu_seconds: float | None = None  # of the main process
    # Work of all images: 6 operations per multiply-add of the forward pass, as the backward pass costs two of them.
    # What is computed again to save memory, and the optimizer's products, are not counted.
    pflop: float | None = None
    epochs: int | None = None
    images_per_second: float | None = None
    n: int | None = None  # training images


class Conversion(Section):
    """Arguments of a conversion, and the largest relative difference of a logit that it caused."""

    layers: str
    alpha: float
    content: bool
    logits: float


class Baseline(Section):
    """Another model, measured on the same test images."""

    model: str
    fine_tuned: bool | None = None
    epochs: int | None = None
    test: Scores


class Metrics(Section):
    version: Literal[1] = 1  # files without one are older, and have the same keys
    model: str | None = None
    base_model: str | None = None  # Hub repository that a conversion started from
    conversion: Conversion | None = None
    parameters: int | None = None
    data: str | None = None
    data_revision: str | None = None
    test: Scores | None = None
    validation: Scores | None = None
    train: Training | None = None
    environment: dict[str, str | int] | None = None
    baseline: Baseline | None = None

    def measured(self) -> dict[str, Any]:
        """All keys that have a value, as plain Python objects."""
        return self.model_dump(exclude_none=True)


def read_metrics(folder: Path) -> Metrics:
    """The metrics.json of a folder; empty if there is none. Raises ValueError for another schema."""
    path = folder / FILE
    try:
        return Metrics.model_validate(read_json(path)) if path.is_file() else Metrics()
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, each['loc']))}: got {each['input']!r}: {each['msg']}"
            for each in error.errors()
        ]
        raise ValueError(
            f"{path}: expected version 1 of its schema, but {'; '.join(lines)}"
        ) from error


def read_results(folder: Path) -> dict[str, list[Metrics]]:
    """All finished runs of the model of a folder, by recipe; that of metrics.json and its other seeds is called "".

    The others are in results/RECIPE-SEED.json, with "seed" for RECIPE where it is that of metrics.json.
    """
    results = {"": [metrics]} if (metrics := read_metrics(folder)).test else {}
    for path in sorted((folder / "results").glob("*.json")):
        recipe = path.stem.rpartition("-")[0]
        results.setdefault("" if recipe == "seed" else recipe, []).append(
            Metrics.model_validate(read_json(path))
        )
    return results


def write_metrics(folder: Path, metrics: Metrics) -> Path:
    return write_json(folder / FILE, metrics.measured())


def write_test(folder: Path, measured: Metrics, **more: Any) -> Path:
    """Put a measurement on test images into the metrics.json of a folder; everything else in it stays."""
    old = read_metrics(folder)
    fields = {"data": measured.data, "data_revision": measured.data_revision, "test": measured.test}
    return write_metrics(
        folder, old.model_copy(update=fields | {"model": old.model or measured.model} | more)
    )


def environment(device: torch.device) -> dict[str, str | int]:
    """Hardware and versions that a measurement depends on; the commit is empty for an installed package."""
    info, checkout = Path("/proc/cpuinfo"), Path(__file__).parents[2]
    cores = re.findall(
        r"^model name\s*:\s*(.*)$", info.read_text() if info.is_file() else "", re.MULTILINE
    )
    git = shutil.which("git") if (checkout / ".git").exists() else None
    describe = [
        git or "",
        "-C",
        str(checkout),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    ]
    return {
        "python": platform.python_version(),
        **{
            package: version(package)
            for package in ("torch", "timm", "accelerate", "datasets", "numpy")
        },
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu": f"{len(cores)} x {cores[0]}" if cores else platform.machine(),
        "threads": torch.get_num_threads(),
        "sa_zoo_commit": subprocess.run(describe, capture_output=True, text=True).stdout.strip()
        if git
        else "",
    }
