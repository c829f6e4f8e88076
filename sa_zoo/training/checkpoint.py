"""What a run needs to resume: one safetensors file of tensors and one JSON file of everything else, in one folder.

The folder gets its final name only when it is complete, and the one before it is removed only then. No pickle.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from sa_zoo.model_folder import new_folder, write_file, write_json

TENSORS, COUNTERS = "state.safetensors", "state.json"


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
    """Write folder/epoch-E-step-S, then remove older ones. `counters` is anything that JSON holds."""
    tensors = {f"{name}.{key}": value for name, module in modules.items() for key, value in module.state_dict().items()}
    state, groups = _flattened(optimizer)
    tensors |= {f"optimizer.{key}": value for key, value in state.items() if isinstance(value, Tensor)}
    scalars = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
    tensors = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    final = folder / f"epoch-{epoch:05d}-step-{step:07d}"
    if not final.exists():  # it does if the run was interrupted right after saving
        with new_folder(final) as new:
            write_file(new / TENSORS, save(tensors, {"format": "pt"}))
            write_json(new / COUNTERS, {"counters": counters, "optimizer": {"state": scalars, "groups": groups}})
    for older in folder.iterdir():
        if older != final:
            shutil.rmtree(older)


def load_checkpoint(
    folder: Path, modules: dict[str, nn.Module], optimizer: torch.optim.Optimizer
) -> dict[str, Any] | None:
    """Load the newest checkpoint of `folder` into the modules and the optimizer, and return its counters.

    None if there is none yet. Raises ValueError if it is damaged or belongs to another model.
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
    _load_flattened(optimizer, state | rest["optimizer"]["state"], rest["optimizer"]["groups"])
    return rest["counters"]


def _flattened(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The state by "parameter number.name", and the options of each group."""
    whole = optimizer.state_dict()
    state = {f"{number}.{key}": v for number, entries in whole["state"].items() for key, v in entries.items()}
    groups = [{key: v for key, v in group.items() if key != "params"} for group in whole["param_groups"]]
    return state, groups


def _load_flattened(optimizer: torch.optim.Optimizer, flat: dict[str, Any], groups: list[dict[str, Any]]) -> None:
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
                # the strides of an uninterrupted run: other ones change the order of sums, and so their rounding
                entries[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
