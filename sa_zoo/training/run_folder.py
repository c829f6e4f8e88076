"""A run folder, which is also a Hub repository: what was trained is what is published.

- model.safetensors, config.json: the last epoch, for timm.create_model("local-dir:RUN", pretrained=True)
- train.toml: the effective config
- history.jsonl: one line per epoch
- heads.safetensors: the positional parameters at initialization and after every epoch, (epochs + 1, *shape) each
- metrics.json: what was measured; written after training, so that a folder with it holds a finished run
- checkpoints/: during training only
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import nn

from sa_zoo.metrics import Metrics, read_metrics, write_metrics
from sa_zoo.model_folder import write_file
from sa_zoo.training.config import Config, dump_config, load_config

CHECKPOINTS = "checkpoints"
MAY_CHANGE = {"checkpoint_steps", "tracker"}  # when a run is resumed
# Parameters of score terms that depend on positions alone, by their names in state dicts.
POSITIONAL = re.compile(r"(^|\.)(Delta|spread|alpha|terms\.\d+\.(row|col|w|v|P))$")


def check_run(out: Path, config: Config, resume: bool) -> Metrics | None:
    """The metrics of the run in the folder if it is finished, None if it has to start or to resume.

    Raises FileExistsError if the folder is not empty and `resume` is off, FileNotFoundError if there is nothing to
    resume, ValueError if the folder holds a run of another config.
    """
    if not resume:
        if out.exists() and any(out.iterdir()):
            raise FileExistsError(f"run folder: got {out}, which is not empty; expected a new --out, or --resume")
        return None
    if not (out / "train.toml").is_file():
        raise FileNotFoundError(f"run folder: got {out}, expected one with a run to resume")
    started, now = load_config(out / "train.toml").model_dump(), config.model_dump()
    for section, keys in started.items():
        for key, value in keys.items():
            if (got := now[section][key]) != value and key not in MAY_CHANGE:
                raise ValueError(f"{section}.{key}: got {got!r}, expected {value!r}, as in the run in {out}")
    return read_metrics(out) if (out / "metrics.json").is_file() else None


def begin_run(out: Path, config: Config) -> None:
    """Make the folder if it does not exist; called when data and model are loaded, so that a mistake leaves none."""
    (out / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    write_file(out / "train.toml", dump_config(config))


def write_history(out: Path, epochs: list[dict[str, Any]]) -> None:
    write_file(out / "history.jsonl", "".join(json.dumps(epoch) + "\n" for epoch in epochs))


def record_heads(out: Path, model: nn.Module, epoch: int) -> None:
    """Write row `epoch` of heads.safetensors, if the model has positional parameters; row 0 is the initialization.

    Later rows are dropped: a resumed run writes them again. Raises ValueError if the file lacks earlier ones.
    """
    rows = {name: value.detach().cpu() for name, value in model.named_parameters() if POSITIONAL.search(name)}
    if not rows:
        return
    path = out / "heads.safetensors"
    earlier = load_file(path) if epoch and path.is_file() else {}
    known = min(len(earlier.get(name, ())) for name in rows)
    if known < epoch:
        raise ValueError(f"{path}: got {known} recorded epochs, expected at least the {epoch} before this one")
    stacked = {name: torch.stack([*earlier.get(name, ())[:epoch], row]) for name, row in rows.items()}
    write_file(path, save(stacked, {"format": "pt"}))


def end_run(out: Path, metrics: Metrics) -> None:
    write_metrics(out, metrics)
    shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)
