"""What a run needs to resume: a safetensors file of tensors, a JSON file of everything else, and a manifest of both.

A checkpoint is a folder, which gets its name when it is complete. The last two are kept: if the newer one is damaged,
the run resumes from the older. No pickle.
"""

import shutil
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.optim import Optimizer

from sa_zoo.model_folder import SUMS, damage, new_folder, read_json, write_file, write_json, write_sums

Modules = Mapping[str, nn.Module]  # everything with weights, by a name of one word
TENSORS, COUNTERS = "state.safetensors", "state.json"
KEPT = 2


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoints of a folder, the newest first."""
    return sorted(folder.glob("epoch-*"), reverse=True)


def save_checkpoint(
    folder: Path, modules: Modules, optimizer: Optimizer, counters: dict[str, Any], files: Iterable[Path] = ()
) -> None:
    """Write folder/epoch-E-step-S, then remove all but the last two undamaged ones.

    `counters` holds epoch, step and whatever JSON can hold; `files` are copied along.
    """
    states, saved = {name: module.state_dict() for name, module in modules.items()}, optimizer.state_dict()
    states |= {f"optimizer.{number}": entries for number, entries in saved["state"].items()}
    values = {f"{name}.{key}": value for name, state in states.items() for key, value in state.items()}
    tensors = {key: value.detach().cpu().contiguous() for key, value in values.items() if isinstance(value, Tensor)}
    scalars = {key: value for key, value in values.items() if key not in tensors}
    final = folder / f"epoch-{counters['epoch']:05d}-step-{counters['step']:07d}"
    if final.exists():  # a damaged one, which this run did not resume from
        shutil.rmtree(final)
    with new_folder(final) as new:
        write_file(new / TENSORS, save(tensors, {"format": "pt"}))
        write_json(new / COUNTERS, {"counters": counters, "scalars": scalars, "groups": saved["param_groups"]})
        for path in files:
            write_file(new / path.name, path.read_bytes())
        write_sums(new, [path.name for path in new.iterdir()])
    # what is newer was damaged when the run resumed, and an older one counts only if it can still be read
    kept = [path for path in checkpoints(folder) if path <= final and not damage(path)][:KEPT]
    for other in set(folder.iterdir()).difference(kept):
        shutil.rmtree(other)


def load_checkpoint(folder: Path, modules: Modules, optimizer: Optimizer) -> dict[str, Any]:
    """Load the newest undamaged checkpoint of `folder` into modules and optimizer; return its counters, {} for none.

    Files that were saved along go back to where they were, next to `folder`. Warns of each damaged checkpoint; raises
    ValueError if all are damaged or the one to load is of another model.
    """
    messages = []
    for checkpoint in checkpoints(folder):
        if not (found := damage(checkpoint)):
            break
        messages.append(f"checkpoint: got {checkpoint}, truncated or damaged: {found}")
    else:
        if messages:
            raise ValueError("\n".join([*messages, "no other checkpoint is left: start again with a new --out"]))
        return {}
    for message in messages:
        warnings.warn(f"{message}; resuming from {checkpoint.name}", stacklevel=2)
    for name in read_json(checkpoint / SUMS).keys() - {TENSORS, COUNTERS}:
        write_file(folder.parent / name, (checkpoint / name).read_bytes())
    tensors, rest = load_file(checkpoint / TENSORS), read_json(checkpoint / COUNTERS)
    try:
        for name, module in modules.items():
            module.load_state_dict(_under(name, tensors))
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"checkpoint: got {checkpoint}, which is of another model: {reason}") from error
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
