"""A run folder, which is also a Hub repository: what was trained is what is published.

- model.safetensors, config.json: the last epoch, for timm.create_model("local-dir:RUN", pretrained=True)
- train.toml: the effective config
- history.jsonl: one line per epoch
- heads.safetensors: the positional parameters at initialization and after every epoch
- metrics.json: what was measured; written after training, so that a folder with it holds a finished run
- checkpoints/: during training only
"""

import json
import platform
import re
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from sa_zoo.metrics import Metrics, read_metrics, write_metrics
from sa_zoo.model_folder import SUMS, new_folder, write_file
from sa_zoo.training.config import Config, dump_config, load_config

CHECKPOINTS = "checkpoints"
MAY_CHANGE = {"checkpoint_steps", "tracker"}  # when a run is resumed


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
        raise FileNotFoundError(f"run folder: got {out} without train.toml, expected one with a run to resume")
    finished = (out / "metrics.json").is_file()
    if (out / SUMS).is_file() and not finished:
        again = f"sa-zoo evaluate {out} --json {out}/metrics.json"
        raise FileNotFoundError(
            f"run folder: got a finished run in {out} without metrics.json; `{again}` writes a new one"
        )
    try:
        started, now = load_config(out / "train.toml").model_dump(), config.model_dump()
    except ValueError as error:
        raise ValueError(f"{out / 'train.toml'}: got a damaged file: {error}") from error
    for section, keys in started.items():
        for key, value in keys.items():
            if (got := now[section][key]) != value and key not in MAY_CHANGE:
                raise ValueError(f"{section}.{key}: got {got!r}, expected {value!r}, as in the run in {out}")
    return read_metrics(out) if finished else None


def begin_run(out: Path, config: Config) -> None:
    """Make the folder if it does not exist; called when data and model are loaded, so that a mistake leaves none."""
    if not (out / "train.toml").is_file():
        with new_folder(out) as new:
            (new / CHECKPOINTS).mkdir()
            write_file(new / "train.toml", dump_config(config))
    write_file(out / "train.toml", dump_config(config))  # when a run is resumed, some keys may change


def write_history(out: Path, epochs: list[dict[str, Any]]) -> None:
    write_file(out / "history.jsonl", "".join(json.dumps(epoch) + "\n" for epoch in epochs))


def end_run(out: Path, metrics: Metrics) -> None:
    write_metrics(out, metrics)


def remove_checkpoints(out: Path) -> None:
    shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)


def environment(device: torch.device, processes: int) -> dict[str, str | int]:
    """Versions and hardware of a measurement."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*:\s*(.*)$", info.read_text() if info.is_file() else "", re.MULTILINE)
    return {
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "timm", "accelerate", "datasets", "numpy")},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu": names[0] if names else platform.machine(),
        "threads": torch.get_num_threads(),
        "processes": processes,
        "sa_zoo_commit": _commit(),
    }


def _commit() -> str:
    """The commit of the checkout that this file is in; empty for an installed package."""
    checkout = Path(__file__).parents[2]
    if not (checkout / ".git").exists() or not shutil.which("git"):
        return ""
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else ""
