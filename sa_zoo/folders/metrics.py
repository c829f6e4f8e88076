"""metrics.json of a model folder: the one schema of all measurements.

Training, conversion and evaluation write it; cards are rendered from it. Keys without a measurement are absent.
"""

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import nn

from sa_zoo.folders.messages import mistakes
from sa_zoo.folders.write import read_json, write_json

FILE = "metrics.json"


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


Fraction = Annotated[float, Field(ge=0, le=1)]


class Scores(Section):
    """Result on a split: top1 and top5 as fractions, loss (mean cross-entropy) in nats, n images."""

    top1: Fraction
    top5: Fraction | None = None  # None for five classes or fewer
    balanced: Fraction | None = None  # mean accuracy of the classes with images
    loss: float
    n: int = Field(ge=1)
    # on the test split of a run, and by `sa-zoo evaluate --detail`
    per_class: list[float | None] | None = None
    images_per_class: list[int] | None = None
    confusion_matrix: list[list[int]] | None = None

    @property
    def percent(self) -> str:
        """The accuracy with its margin, for a table."""
        return f"{self.top1:.2%} ± {margin(self.top1, self.n):.2%}"

    def __str__(self) -> str:
        """The accuracy with its margin, to print."""
        return f"{self.top1:.4f} ± {margin(self.top1, self.n):.4f} (n = {self.n})"


def margin(accuracy: float, n: int) -> float:
    """Half the width of the 95 % Wilson score interval of an accuracy on n images; above 0 even at 0 % and 100 %."""
    z = 1.96
    return z / (n + z**2) * math.sqrt(accuracy * (1 - accuracy) * n + z**2 / 4)


class Training(Section):
    seconds: float | None = None
    cpu_seconds: float | None = None  # of all processes
    # Work of all images: 6 operations per multiply-add of the forward pass, as the backward pass costs twice as much,
    # and 2 in epochs of the classifier alone. Recomputation and the optimizer are not counted.
    pflop: float | None = None
    epochs: int | None = None
    kept_epoch: int | None = None  # the best one on the validation images; None: the last one
    images_per_second: float | None = None
    n: int | None = None  # training images


class Conversion(Section):
    """Arguments of a conversion, and the largest relative change of a logit."""

    layers: str
    alpha: float
    logits: float


class Baseline(Section):
    """Another model, measured on the same test images."""

    model: str
    fine_tuned: bool | None = None
    epochs: int | None = None
    test: Scores


class HeldOut(Section):
    """Which images a run without a test split has held out: those with small draws, by content or name.

    An image with a larger draw than the largest one of its class may be a training image.
    """

    by: Literal["content", "name"]
    largest: dict[str, float]  # by class


class Metrics(Section):
    version: Literal[1] = 1
    model: str | None = None
    base_model: str | None = None  # Hub repository of the weights that it was made of
    conversion: Conversion | None = None
    parameters: int | None = None
    data: str | None = None
    data_revision: str | None = None
    data_digest: str | None = None  # of the training data, see data/images.py
    held_out: HeldOut | None = None
    test: Scores | None = None
    validation: Scores | None = None
    train: Training | None = None
    environment: dict[str, str | int] | None = None
    baseline: Baseline | None = None

    def measured(self) -> dict[str, Any]:
        """All keys with a value, as plain Python objects."""
        return self.model_dump(exclude_none=True)


def metrics_of(network: nn.Module, **more: Any) -> Metrics:
    """Name and parameters of a timm network, and the given measurements."""
    cfg: Any = network.pretrained_cfg
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return Metrics(model=cfg["architecture"], parameters=parameters, **more)


def read_metrics(folder: Path) -> Metrics:
    """The metrics.json of a folder; empty if there is none. Raises ValueError for another schema."""
    path = folder / FILE
    if not path.is_file():
        return Metrics()
    try:
        return Metrics.model_validate(read_json(path))
    except ValidationError as error:
        raise ValueError(
            f"{path}: expected version 1 of its schema, but {mistakes(error)}"
        ) from error


def read_results(folder: Path) -> dict[str, list[Metrics]]:
    """All finished runs of the model of a folder, by recipe; "" stands for the recipe of metrics.json.

    Further runs are in results/RECIPE-SEED.json; RECIPE is "seed" for the recipe of metrics.json.
    """
    results = {}
    metrics = read_metrics(folder)
    if metrics.test:
        results[""] = [metrics]
    for path in sorted((folder / "results").glob("*.json")):
        recipe = path.stem.rpartition("-")[0]
        if recipe == "seed":
            recipe = ""
        results.setdefault(recipe, []).append(Metrics.model_validate(read_json(path)))
    return results


def write_metrics(folder: Path, metrics: Metrics) -> Metrics:
    """Write metrics.json and return `metrics`."""
    write_json(folder / FILE, metrics.measured())
    return metrics


def write_result(path: Path, measured: Metrics) -> None:
    """Write an evaluation to a file; if it is the model's metrics.json, keep everything else in it."""
    folder = Path(measured.model or "")
    if path.resolve() == (folder / FILE).resolve():
        old = read_metrics(folder)
        name = old.model or folder.name  # without the path of the folder
        data = measured.model_dump(include={"data", "data_revision"})
        if old.model_dump(include={*data}) != data:  # other results would be of other data
            old = old.model_copy(update={"validation": None, "baseline": None})
        measured = old.model_copy(update={"model": name, **data, "test": measured.test})
    write_json(path, measured.measured())
