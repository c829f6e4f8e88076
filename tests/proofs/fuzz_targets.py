"""What fuzzing calls: each of our readers of files that may come from anybody, on bytes.

A reader returns or raises ValueError or OSError, which a command prints as one line. Anything else is a finding.
"""

import json
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from hypothesis import strategies as st
from model_folders import make_run

import sa_zoo
from sa_zoo.data.images import Images, LabeledImages
from sa_zoo.data.input_format import InputFormat
from sa_zoo.data.splits import StreamedSplit
from sa_zoo.folders.check import check_config, count_elements
from sa_zoo.folders.metrics import read_metrics
from sa_zoo.training.config import load_config

REFUSED = (ValueError, OSError)
SMALL = {"embed_dim": 13, "depth": 2, "num_heads": 3, "hidden_dim": 11, "num_classes": 10}


@cache
def place() -> Path:
    return Path(tempfile.mkdtemp())


@cache
def harmless() -> Path:
    return make_run(place() / "harmless", "sa_quadratic_cifar", **SMALL)


def on_file(name: str, read: Callable[[Path], Any]) -> Callable[[bytes], None]:
    """A reader of files as a target; what it may raise is swallowed."""

    def target(data: bytes) -> None:
        path = place() / name
        path.write_bytes(data)
        with suppress(*REFUSED):
            read(path)

    return target


def decode(data: bytes) -> None:
    features = datasets.Features({"image": datasets.Image()})
    table = datasets.Dataset.from_dict({"image": [{"bytes": data, "path": None}]}, features)
    source = LabeledImages(
        "data", {"train": Images(table, "image", "train")}, {"train": np.zeros(1, np.int64)}, ()
    )
    input_format = InputFormat((3, 8, 8), (0.5,) * 3, (0.5,) * 3, "bicubic", 1.0)
    try:
        image = StreamedSplit(source, "train", np.arange(1), input_format).read(0)
    except REFUSED:
        return
    assert image.shape == (3, 8, 8) and image.dtype == torch.uint8


ARGUMENTS = [*SMALL, "img_size", "patch_size", "in_chans", "global_pool", "drop_rate", "cnn"]
EXPECTED = [
    "input_size",
    "mean",
    "std",
    "crop_pct",
    "first_conv",
    "classifier",
    "label_offset",
    "custom_load",
    "file",
]
KEYS = ["architecture", "num_classes", "model_args", "pretrained_cfg", "global_pool", "label_names"]
KEYS += [f"model_args.{key}" for key in ARGUMENTS]
KEYS += [f"pretrained_cfg.{key}" for key in EXPECTED]
numbers = st.one_of(st.integers(-3, 70), st.integers(), st.floats(), st.booleans(), st.none())
texts = st.one_of(
    st.text(max_size=9),
    st.sampled_from(["resnet18_cifar", "hf-hub:a/b", "local-dir:..", "avg", "head"]),
)
values = st.recursive(
    st.one_of(numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)


CHANGES = st.dictionaries(st.sampled_from(KEYS), values, min_size=1, max_size=3)


def load_changed(changes: dict[str, Any]) -> None:
    """Load the folder of a small network after keys of its config.json got random values."""
    folder = place() / "changed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(harmless(), folder)
    config = json.loads((folder / "config.json").read_text())
    for path, value in changes.items():
        table, _, key = path.rpartition(".")
        if not table or isinstance(config.get(table), dict):
            (config[table] if table else config)[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    before = sorted(path.name for path in folder.iterdir())
    with suppress(*REFUSED):
        sa_zoo.open(folder)
    assert sorted(path.name for path in folder.iterdir()) == before


TARGETS: dict[str, Callable[[bytes], Any]] = {
    "config": on_file("config.json", check_config),
    "weights": on_file("model.safetensors", count_elements),
    "recipe": on_file("train.toml", load_config),
    "metrics": on_file("metrics.json", lambda path: read_metrics(path.parent)),
    "image": decode,
}
