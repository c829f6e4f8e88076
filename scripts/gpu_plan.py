"""What a day of gpu_day.py is about: its folder, its data, how much to do, and what each step has found so far."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sa_zoo.folders.write import new_folder, read_json, write_json
from sa_zoo.training.config import DataConfig
from sa_zoo.training.sources import open_source


@dataclass(frozen=True)
class Scale:
    """What a day does, and with how much.

    Args:
        trained: minutes of forty, by model; the first one also chooses the learning rate. Unknown names are left out.
        checked: pattern of the names of the models to check.
        measured: models of the benchmark.
        batch: images per step, of the benchmark and of training.
        pixels: of a batch of one layer.
        compiled: mode of torch.compile to compare with; empty for none.
        rates: maximum learning rates to choose from.
        images: training and test images to use, if not all.
    """

    trained: dict[str, float]
    checked: str
    measured: list[str]
    batch: int
    pixels: int
    sides: tuple[int, ...]
    rounds: int
    compiled: str
    rates: tuple[float, ...]
    images: tuple[int, int] | None = None


SCALE = Scale(
    trained={
        "sa_quadratic_cifar": 8,
        "resnet18_cifar": 4,
        "sa_learned_cifar": 5,
        "sa_content_cifar": 6,
        "sa_pyramid_h5_cifar": 4,
    },
    checked="*_cifar",
    measured=["sa_quadratic_cifar", "sa_content_cifar"],
    batch=512,
    pixels=2**17,
    sides=(8, 11, 12, 16, 23, 32, 64, 128),
    rounds=5,
    compiled="reduce-overhead",
    # the small models' rate, for batches of 50, is the first; the square root of the batch sizes' ratio gives 9.6e-3
    rates=(3e-3, 6e-3, 1.2e-2),
)
REHEARSAL = Scale(
    trained={"sa_quadratic_tiny_cifar": 8, "resnet_tiny_cifar": 4, "sa_learned_tiny_cifar": 5},
    checked="sa_*_tiny_cifar",
    measured=["sa_quadratic_tiny_cifar"],
    batch=32,
    pixels=2**9,
    sides=(5, 16, 24),
    rounds=1,
    compiled="",
    rates=(3e-3, 6e-3),
    images=(320, 96),
)


@dataclass(frozen=True)
class Day:
    """The folder, the data and what they are called in results, the device, and how much to do."""

    out: Path
    data: str
    title: str
    device: torch.device
    scale: Scale

    def source(self) -> str:
        """The data, or a folder with the first images of each split."""
        if not self.scale.images:
            return self.data
        folder = self.out / "data"
        if not folder.is_dir():
            source = open_source(DataConfig(name=self.data))
            with new_folder(folder) as new:
                for split, number in zip(("train", "test"), self.scale.images, strict=True):
                    rows = source.images[split].table.select(range(number))
                    rows.to_parquet(new / f"{split}.parquet")
        return str(folder)


@dataclass
class Record:
    """What a step has found so far: OUT/NAME.json, written at every change. `left` is the time left for the step."""

    out: Path
    name: str
    left: Callable[[], float] = lambda: math.inf
    found: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path.is_file():
            self.found = read_json(self.path)

    @property
    def path(self) -> Path:
        return self.out / f"{self.name}.json"

    @property
    def finished(self) -> bool:
        return self.found.get("finished", False)

    def add(self, **more: Any) -> None:
        self.found |= more
        write_json(self.path, self.found)
