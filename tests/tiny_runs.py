"""Small configs, data sets and runs for the tests of training."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from PIL import Image

from sa_zoo.training.config import Config, parse_config

# patches of 2 on 8x8 pixels: 16 tokens, and a step takes a few milliseconds
TINY_VIT = {"img_size": 8, "patch_size": 2, "num_heads": 1, "embed_dim": 16, "depth": 2}

# sa_quadratic with Muon for matrices and AdamW for the rest; sections for tiny_config
MUON: dict[str, dict[str, Any]] = {
    "model": {
        "name": "sa_quadratic_tiny_cifar",
        "args": {
            "img_size": 8,
            "patch_size": 2,
            "embed_dim": 16,
            "depth": 2,
            "num_heads": 3,
            "hidden_dim": 17,
        },
    },
    "optim": {
        "name": "muon",
        "args": {"adjust_lr_fn": "match_rms_adamw", "fallback_lr_scale": 0.5},
    },
    "train": {"epochs": 3, "checkpoint_steps": 4},
}


def tiny_config(**sections: dict[str, Any]) -> Config:
    """Digits and a tiny transformer without randomness of its own; keyword sections go over that."""
    table: dict[str, Any] = {
        "model": {"name": "test_vit", "args": TINY_VIT},
        "data": {"name": "digits"},
        "optim": {"name": "adamw", "lr": 3e-3, "weight_decay": 0.05},
        "train": {"epochs": 2, "batch_size": 211, "precision": "no"},
    }
    for name, section in sections.items():
        table[name] = {**table.get(name, {}), **section}
    return parse_config(table)


def noise_images(n: int, size: tuple[int, int] = (8, 8), seed: int = 0) -> list[Image.Image]:
    """n images of width and height `size`, each pixel random."""
    shape = (n, size[1], size[0], 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return list(map(Image.fromarray, pixels))


def parquet_folder(
    folder: Path,
    images: dict[str, list[Image.Image]],
    classes: int = 3,
    columns: tuple[str, ...] = ("label",),
) -> Path:
    """A folder in the layout of a Hub data set; image i has class i modulo the classes of a column."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, pictures in images.items():
        rows = datasets.Dataset.from_dict({"img": pictures}).cast_column("img", datasets.Image())
        for more, column in enumerate(columns):
            count = classes + more
            labels = datasets.ClassLabel(names=[f"{column} {i}" for i in range(count)])
            rows = rows.add_column(column, [i % count for i in range(len(pictures))])
            rows = rows.cast_column(column, labels)
        rows.to_parquet(str(folder / f"{split}-00000-of-00001.parquet"))
    return folder


def image_folder(folder: Path, counts: dict[str, int], size: tuple[int, int] = (8, 8)) -> Path:
    """A folder of PNG files: per sub-folder (split/class, or class), so many images."""
    for seed, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i, image in enumerate(noise_images(count, size, seed)):
            image.save(folder / name / f"{i}.png")
    return folder


@contextmanager
def signalled_by(number: int, folder: Path, once: str) -> Iterator[None]:
    """Send this process a signal as soon as the folder has a file that matches `once`."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            if any(folder.glob(once)):
                os.kill(os.getpid(), number)
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def free_port() -> int:
    """A port of this machine for the main process of a run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
