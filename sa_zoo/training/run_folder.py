"""A run folder, which is a Hub repository: what was trained is what is published.

- model.safetensors, config.json: the last epoch, for timm.create_model("local-dir:RUN", pretrained=True)
- train.toml: the effective config
- history.jsonl: one line per epoch
- heads.safetensors: the positional parameters at initialization and after every epoch
- metrics.json: what was measured; written last, so that a folder with it is finished
- checkpoints/: while training only, removed once metrics.json is there
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
from safetensors.torch import save
from timm.models._hub import save_config_for_hf
from torch import nn

from sa_zoo.training.checkpoint import write_file, write_json
from sa_zoo.training.config import Config, dump_config, load_config
from sa_zoo.training.data import InputFormat

MAY_CHANGE = {"checkpoint_steps", "tracker"}  # between a run and its resumption


def check_run(out: Path, config: Config, resume: bool) -> dict[str, Any] | None:
    """The metrics of the run in the folder if it is finished; None if it is to begin or to go on.

    Raises FileExistsError where the folder is not empty and `resume` is off, FileNotFoundError where there is nothing
    to resume, ValueError where the folder holds a run of another config.
    """
    if not resume:
        if out.exists() and any(out.iterdir()):
            raise FileExistsError(f"run folder: got {out}, which is not empty; expected a new --out, or --resume")
        return None
    if not (out / "train.toml").is_file():
        raise FileNotFoundError(f"run folder: got {out}, expected one with a run to resume")
    _check_same(load_config(out / "train.toml"), config, out)
    return json.loads((out / "metrics.json").read_text()) if (out / "metrics.json").is_file() else None


def begin_run(out: Path, config: Config) -> None:
    """Makes the folder, or takes it as it is; only once data and model are there, so that a mistake leaves nothing."""
    out.mkdir(parents=True, exist_ok=True)
    write_file(out / "train.toml", dump_config(config).encode())
    (out / "checkpoints").mkdir(exist_ok=True)


def _check_same(started: Config, config: Config, out: Path) -> None:
    before, now = started.model_dump(), config.model_dump()
    for section, keys in before.items():
        for key, value in keys.items():
            if value != now[section][key] and key not in MAY_CHANGE:
                raise ValueError(
                    f"{section}.{key}: got {now[section][key]!r}, expected {value!r}, as the run in {out} began"
                )


def write_history(out: Path, epochs: list[dict[str, Any]]) -> None:
    write_file(out / "history.jsonl", "".join(json.dumps(epoch) + "\n" for epoch in epochs).encode())


def publish_weights(out: Path, model: nn.Module, form: InputFormat, classes: tuple[str, ...]) -> None:
    """Writes the two files that timm.create_model("local-dir:OUT", pretrained=True) reads."""
    # a tag names the weights that timm offers, which these are not
    about = {"label_names": list(classes), "pretrained_cfg": {"tag": ""}}
    weights = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    write_file(out / "model.safetensors", save(weights, {"format": "pt"}))
    written = out / ".config.json"
    save_config_for_hf(model, str(written), about, data_config={"input_size": form.input_size})
    config = json.loads(written.read_text())
    written.unlink()
    config["model_args"].pop("num_classes", None)  # transformers refuses it there; timm reads the one outside
    write_json(out / "config.json", config)


def finish(out: Path, metrics: dict[str, Any]) -> None:
    write_json(out / "metrics.json", metrics)
    shutil.rmtree(out / "checkpoints", ignore_errors=True)


def environment(device: torch.device, processes: int) -> dict[str, Any]:
    """Where a number was measured."""
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
    """Of a checkout that this file lies in; empty for an installed package."""
    checkout = Path(__file__).parents[2]
    if not (checkout / ".git").exists():
        return ""
    found = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}
    )
    return found.stdout.strip() if found.returncode == 0 else ""
