"""What a run needs to resume: one safetensors file of tensors and one JSON file of everything else, in one folder.

The folder gets its final name only when it is complete, and the previous checkpoint is removed only then. No pickle.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.optim import Optimizer

from sa_zoo.model_folder import new_folder, write_file, write_json

Modules = Mapping[str, nn.Module]  # everything with weights, by a name of one word
TENSORS, COUNTERS = "state.safetensors", "state.json"


def newest_checkpoint(folder: Path) -> Path | None:
    return max(folder.glob("epoch-*"), default=None)


def save_checkpoint(folder: Path, modules: Modules, optimizer: Optimizer, counters: dict[str, Any]) -> None:
    """Write folder/epoch-E-step-S, then remove older ones. `counters` holds epoch, step and whatever JSON can hold."""
    states, saved = {name: module.state_dict() for name, module in modules.items()}, optimizer.state_dict()
    states |= {f"optimizer.{number}": entries for number, entries in saved["state"].items()}
    values = {f"{name}.{key}": value for name, state in states.items() for key, value in state.items()}
    tensors = {key: value.detach().cpu().contiguous() for key, value in values.items() if isinstance(value, Tensor)}
    scalars = {key: value for key, value in values.items() if key not in tensors}
    final = folder / f"epoch-{counters['epoch']:05d}-step-{counters['step']:07d}"
    if not final.exists():  # it does if the run was interrupted right after saving
        with new_folder(final) as new:
            write_file(new / TENSORS, save(tensors, {"format": "pt"}))
            write_json(new / COUNTERS, {"counters": counters, "scalars": scalars, "groups": saved["param_groups"]})
    for older in folder.iterdir():
        if older != final:
            shutil.rmtree(older)


def load_checkpoint(folder: Path, modules: Modules, optimizer: Optimizer) -> dict[str, Any]:
    """Load the newest checkpoint of `folder` into modules and optimizer; return its counters, {} if there is none.

    Raises ValueError if it is damaged or belongs to another model.
    """
    newest = newest_checkpoint(folder)
    if newest is None:
        return {}
    try:
        tensors = load_file(newest / TENSORS)
        rest = json.loads((newest / COUNTERS).read_text())
    except (SafetensorError, json.JSONDecodeError, OSError) as error:
        raise ValueError(f"checkpoint: got {newest}, truncated or damaged: {error}") from error
    try:
        for name, module in modules.items():
            module.load_state_dict(_under(name, tensors))
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"checkpoint: got {newest}, which is of another model: {reason}") from error
    state: dict[int, dict[str, Any]] = {}
    for key, value in _under("optimizer", tensors | rest["scalars"]).items():
        number, _, name = key.partition(".")
        state.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": rest["groups"]})
    for parameter, entries in optimizer.state.items():
        for name, value in entries.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                # the strides of an uninterrupted run: other ones change the order of sums, and so their rounding
                entries[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    return rest["counters"]


def _under(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values whose key starts with "name.", by the rest of that key."""
    return {key.removeprefix(f"{name}."): value for key, value in values.items() if key.startswith(f"{name}.")}
