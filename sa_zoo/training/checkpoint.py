"""What a stopped run needs to go on: one safetensors file of tensors, one JSON of everything else, in one folder.

A folder appears under its final name only when it is whole, and the one before it goes only then. No pickle anywhere.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

TENSORS, COUNTERS = "state.safetensors", "state.json"


def write_file(path: Path, content: bytes) -> None:
    """The file whole or not at all, also when the power fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    write_file(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def newest_checkpoint(folder: Path) -> Path | None:
    return max(folder.glob("epoch-*"), default=None)


def save_checkpoint(
    folder: Path,
    epoch: int,
    step: int,
    modules: dict[str, nn.Module],
    optimizer: torch.optim.Optimizer,
    counters: dict[str, Any],
) -> None:
    """Writes folder/epoch-E-step-S and then removes older ones. `counters` is whatever JSON holds."""
    tensors = {f"{name}.{key}": value for name, module in modules.items() for key, value in module.state_dict().items()}
    state, groups = _split_optimizer(optimizer)
    tensors |= {f"optimizer.{key}": value for key, value in state.items() if isinstance(value, Tensor)}
    scalars = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
    final = folder / f"epoch-{epoch:05d}-step-{step:07d}"
    with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as temporary:
        whole = Path(temporary) / final.name
        whole.mkdir()
        tensors = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        write_file(whole / TENSORS, save(tensors, {"format": "pt"}))
        write_json(whole / COUNTERS, {"counters": counters, "optimizer": {"state": scalars, "groups": groups}})
        if not final.exists():  # else saved already, and interrupted right after
            whole.replace(final)
    for older in folder.iterdir():
        if older != final:
            shutil.rmtree(older)


def load_checkpoint(
    folder: Path, modules: dict[str, nn.Module], optimizer: torch.optim.Optimizer
) -> dict[str, Any] | None:
    """Puts the newest checkpoint of `folder` into the modules and the optimiser and returns its counters.

    None where there is none yet. Raises ValueError where it is damaged or belongs to another model.
    """
    newest = newest_checkpoint(folder)
    if newest is None:
        return None
    try:
        tensors = load_file(newest / TENSORS)
        rest = json.loads((newest / COUNTERS).read_text())
    except (SafetensorError, json.JSONDecodeError, OSError) as error:
        raise ValueError(f"checkpoint: got {newest}, truncated or damaged: {error}") from error
    for name, module in modules.items():
        state = {key.removeprefix(f"{name}."): t for key, t in tensors.items() if key.startswith(f"{name}.")}
        try:
            module.load_state_dict(state)
        except RuntimeError as error:
            differences = " ".join(str(error).split())
            raise ValueError(f"checkpoint: got {newest}, which is of another model: {differences}") from error
    state = {key.removeprefix("optimizer."): t for key, t in tensors.items() if key.startswith("optimizer.")}
    _join_optimizer(optimizer, state | rest["optimizer"]["state"], rest["optimizer"]["groups"])
    return rest["counters"]


def _split_optimizer(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The state flat, by "parameter number.name"; and of each group what is not its parameters."""
    whole = optimizer.state_dict()
    state = {f"{number}.{key}": v for number, entries in whole["state"].items() for key, v in entries.items()}
    groups = [{key: v for key, v in group.items() if key != "params"} for group in whole["param_groups"]]
    return state, groups


def _join_optimizer(optimizer: torch.optim.Optimizer, flat: dict[str, Any], groups: list[dict[str, Any]]) -> None:
    state: dict[int, dict[str, Any]] = {}
    for key, value in flat.items():
        number, _, name = key.partition(".")
        state.setdefault(int(number), {})[name] = value
    fresh = optimizer.state_dict()["param_groups"]
    joined = [{**group, "params": now["params"]} for group, now in zip(groups, fresh, strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": joined})
    for parameter, entries in optimizer.state.items():
        for name, value in entries.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                # strides as an unbroken run has them, as another order of summing would round otherwise
                entries[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
