"""Checkpoints of a run: a safetensors file of tensors, a JSON file of everything else, and a manifest of both.

A checkpoint is a folder. It gets its name when it is complete. The last two are kept: if the newer one is damaged,
the run resumes from the older. No pickle.
"""

import re
import shutil
import warnings
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from sa_zoo.data.progress import is_main_process
from sa_zoo.data.shared import shared
from sa_zoo.folders.check import refusing
from sa_zoo.folders.write import (
    SUMS,
    damage,
    new_folder,
    read_json,
    write_file,
    write_json,
    write_sums,
    write_tensors,
)

STATE_FILES = TENSORS, COUNTERS = "state.safetensors", "state.json"
KEPT_CHECKPOINTS = 2
OWN = r"epoch-\d{5,}-step-\d{7,}"  # names of checkpoints; nothing else is read or removed


class Counters(BaseModel):
    """Progress of a run. Together with weights and optimizer state, it is enough to resume."""

    epoch: int = 0
    step: int = 0  # in the epoch
    loss_sum: float = 0.0  # over the images of the epoch so far
    correct: float = 0.0  # of these images
    step_seconds: float = 0.0  # in training steps, over the run
    seconds: float = 0.0  # with validation and saving, over the run
    cpu_seconds: float = 0.0  # of all threads of this process in that time
    history: list[dict[str, Any]] = []
    scaler: dict[str, Any] = {}  # of the loss, with fp16
    data: dict[str, Any] = {}  # a digest of the images


def checkpoints(folder: Path, pattern: str = OWN) -> list[Path]:
    """All checkpoints of a folder, newest first: folders named like checkpoints, no links."""
    named = (path for path in folder.glob("*") if re.fullmatch(pattern, path.name))
    return sorted((path for path in named if path.is_dir() and not path.is_symlink()), reverse=True)


def save_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer,
    counters: Counters,
    files: Iterable[Path] = (),
) -> None:
    """Write folder/epoch-E-step-S with copies of `files`, then remove all but the last two undamaged ones."""
    saved = optimizer.state_dict()
    values = {f"model.{key}": value for key, value in model.state_dict().items()}
    for number, state in saved["state"].items():
        values |= {f"optimizer.{number}.{key}": value for key, value in state.items()}
    tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
    scalars = {key: value for key, value in values.items() if key not in tensors}
    groups = tree_map_only(Tensor, Tensor.item, saved["param_groups"])
    rest = {"counters": counters.model_dump(), "scalars": scalars, "groups": groups}
    final = folder / f"epoch-{counters.epoch:05d}-step-{counters.step:07d}"
    if final in checkpoints(folder):
        if not damage(final, *STATE_FILES):
            return  # the run resumed from it
        shutil.rmtree(final)
    with new_folder(final) as new:
        write_tensors(new / TENSORS, tensors)
        try:
            write_json(new / COUNTERS, rest)
        except TypeError as error:
            raise ValueError(
                f"optim.name: got an optimizer whose state cannot be saved: {error}"
            ) from error
        for path in files:
            write_file(new / path.name, path.read_bytes())
        write_sums(new, [path.name for path in new.iterdir()])
    # newer checkpoints were damaged when the run resumed; older ones count only if they can still be read
    older = (path for path in checkpoints(folder) if path <= final)
    kept = islice((path for path in older if not damage(path, *STATE_FILES)), KEPT_CHECKPOINTS)
    remove_all_but(kept, folder)


def remove_all_but(kept: Iterable[Path], folder: Path) -> None:
    """Remove all other checkpoints of a folder, complete or not; files of others stay."""
    incomplete = checkpoints(folder, rf"\.{OWN}\.incomplete")
    for other in {*checkpoints(folder), *incomplete}.difference(kept):
        shutil.rmtree(other)


def load_checkpoint(folder: Path, model: nn.Module, optimizer: Optimizer) -> Counters:
    """Load the newest undamaged checkpoint of `folder` into model and optimizer; returns its counters.

    Without checkpoints, the counters are new. Files saved in the checkpoint are restored next to `folder`.
    Warns of each damaged checkpoint; raises ValueError if all are damaged or the one to load is of another run.
    The main process reads it for all.
    """
    newest = shared(partial(_newest, folder))
    if not newest:
        return Counters()
    checkpoint, tensors, rest = newest
    try:
        weights = {}
        for key, value in tensors.items():
            if key.startswith("model."):
                weights[key.removeprefix("model.")] = value
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"checkpoint: got {checkpoint}, which is of another model: {reason}"
        ) from error
    try:
        _load_optimizer(optimizer, tensors | rest["scalars"], rest["groups"])
        counters = Counters.model_validate(rest["counters"])
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        reason = " ".join(repr(error).split())
        raise ValueError(
            f"checkpoint: got {checkpoint / COUNTERS}, which no run wrote: {reason}"
        ) from error
    if is_main_process():
        for name in read_json(checkpoint / SUMS).keys() - STATE_FILES:
            if name == Path(name).name:
                write_file(folder.parent / name, (checkpoint / name).read_bytes())
    return counters


def _newest(folder: Path) -> tuple[Path, dict[str, Tensor], dict[str, Any]] | None:
    """The newest undamaged checkpoint, its tensors and everything else; None without any.

    Warns of damaged ones; raises ValueError if all are.
    """
    messages: list[str] = []
    for checkpoint in checkpoints(folder):
        found = damage(checkpoint, *STATE_FILES)
        if not found:
            for message in messages:
                warnings.warn(f"{message}; resuming from {checkpoint.name}", stacklevel=3)
            with refusing(str(checkpoint)):
                return checkpoint, load_file(checkpoint / TENSORS), read_json(checkpoint / COUNTERS)
        messages.append(f"checkpoint: got {checkpoint}, truncated or damaged: {found}")
    if messages:
        messages.append("no other checkpoint is left: start again with a new --out")
        raise ValueError("\n".join(messages))
    return None


def _load_optimizer(optimizer: Optimizer, values: dict[str, Any], groups: Any) -> None:
    """Load the values named optimizer.NUMBER.NAME into the state of parameter NUMBER."""
    state: dict[int, dict[str, Any]] = defaultdict(dict)
    for key, value in values.items():
        if key.startswith("optimizer."):
            _, number, name = key.split(".", 2)
            state[int(number)][name] = value
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for parameter, loaded in optimizer.state.items():
        for name, value in loaded.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                # keep the strides of an uninterrupted run: others change the order of sums and their rounding
                loaded[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
