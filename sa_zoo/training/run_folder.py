"""A run folder, which is also a Hub repository: what was trained is what is published.

- model.safetensors, config.json: the last epoch, for timm.create_model("local-dir:RUN", pretrained=True)
- train.toml: the effective config
- history.jsonl: one line per epoch
- heads.safetensors: the positional parameters at initialization and after every epoch
- metrics.json: what was measured; written after training, so that a folder with it holds a finished run
- checkpoints/: during training only
"""

import json
import os
import platform
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from sa_zoo.metrics import Metrics, read_metrics, write_metrics
from sa_zoo.model_folder import write_file
from sa_zoo.training.config import Config, dump_config, load_config

MAY_CHANGE = {"checkpoint_steps", "tracker"}  # between a run and its resumption


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
    _check_same(load_config(out / "train.toml"), config, out)
    return read_metrics(out) if (out / "metrics.json").is_file() else None


def begin_run(out: Path, config: Config) -> None:
    """Make the folder, if it is not there; called once data and model are there, so that a mistake leaves no folder."""
    (out / "checkpoints").mkdir(parents=True, exist_ok=True)
    write_file(out / "train.toml", dump_config(config))


def _check_same(started: Config, config: Config, out: Path) -> None:
    before, now = started.model_dump(), config.model_dump()
    for section, keys in before.items():
        for key, value in keys.items():
            if value != now[section][key] and key not in MAY_CHANGE:
                raise ValueError(
                    f"{section}.{key}: got {now[section][key]!r}, expected {value!r}, as in the run in {out}"
                )


def write_history(out: Path, epochs: list[dict[str, Any]]) -> None:
    write_file(out / "history.jsonl", "".join(json.dumps(epoch) + "\n" for epoch in epochs))


def finish(out: Path, metrics: Metrics) -> None:
    write_metrics(out, metrics)
    shutil.rmtree(out / "checkpoints", ignore_errors=True)


def environment(device: torch.device, processes: int) -> dict[str, str | int]:
    """Versions and hardware of a measurement."""
    packages = ("torch", "timm", "accelerate", "datasets", "numpy")
    return {
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "processes": processes,
        "sa_zoo_commit": _commit(),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    """The commit of the checkout that this file is in; empty for an installed package."""
    checkout = Path(__file__).parents[2]
    if not (checkout / ".git").exists():
        return ""
    found = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}
    )
    return found.stdout.strip() if found.returncode == 0 else ""
