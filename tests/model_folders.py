"""Model folders as a finished run leaves them, for the tests of publishing."""

import json
from pathlib import Path

import timm
import torch

from sa_zoo.folders.write import write_timm_files

TEST = {"top1": 0.8711, "top5": 0.9911, "loss": 0.4127, "n": 1009}
VALIDATION = {"top1": 0.8533, "top5": 0.9873, "loss": 0.4519, "n": 503}
METRICS = {
    "data": "uoft-cs/cifar10",
    "data_revision": "0b2714987fa478483af9968de7c934580d0bb9a2",
    "test": TEST,
    "validation": VALIDATION,
    "train": {"seconds": 1871.23, "epochs": 3, "images_per_second": 443.71, "n": 4507},
    "environment": {"torch": "2.15.0", "device": "cpu", "sa_zoo_commit": ""},
}
EPOCHS = [
    {
        "epoch": epoch,
        "loss": 2.3 / epoch,
        "top1": 1 - 0.7 / epoch,
        "validation": {"loss": 2.5 / epoch, "top1": 0.3 * epoch},
    }
    for epoch in (1, 2, 3)
]


def make_run(folder: Path, name: str, **arguments: int) -> Path:
    """A folder with random weights of timm's model `name`."""
    torch.manual_seed(0)
    folder.mkdir(parents=True)
    write_timm_files(folder, timm.create_model(name, **arguments))
    (folder / "metrics.json").write_text(json.dumps({"model": name, **METRICS}))
    (folder / "train.toml").write_text(f'[model]\nname = "{name}"\ninit = ""\n')
    (folder / "history.jsonl").write_text("".join(json.dumps(epoch) + "\n" for epoch in EPOCHS))
    return folder
