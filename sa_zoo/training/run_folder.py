"""A run folder. It is published as a Hub repository.

- model.safetensors, config.json: the last or best epoch, for timm.create_model("local-dir:RUN", pretrained=True)
- train.toml: the effective config
- history.jsonl: one line per epoch
- heads.safetensors: the positional parameters at initialization and after every epoch, (epochs + 1, *shape) each
- attention.safetensors: mean attention over test images, if attention depends on content
- metrics.json: all measurements; written after training, so a folder with it holds a finished run
- checkpoints/, best.safetensors: during training only
"""

import json
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sa_zoo.folders.metrics import Metrics, write_metrics
from sa_zoo.folders.write import (
    SUMS,
    check_inside,
    new_folder,
    write_file,
    write_tensors,
    write_timm_files,
)
from sa_zoo.models.network import AttentionNetwork, attention_in, block_of, terms_in
from sa_zoo.models.terms import declared
from sa_zoo.training.checkpoint import remove_all_but
from sa_zoo.training.config import Config, dump_config, load_config

if sys.platform != "win32":
    import fcntl

CHECKPOINTS = "checkpoints"
START = "checkpoints/start"  # the network with the weights of model.init
HEADS = "heads.safetensors"
BEST = "best.safetensors"  # weights of the best epoch so far
MAPPED_IMAGES = 100  # maps are averaged over them, as in the paper's Figure 6
RECORDED_AT_ONCE = 5  # images whose maps are held in memory
# when a run is resumed; the digest of the data decides whether they are the same
MAY_CHANGE = {"train": {"checkpoint_steps", "tracker"}, "data": {"name", "workers"}}


def is_finished(out: Path, config: Config, resume: bool) -> bool:
    """Whether the run in the folder is finished; otherwise it has to start or resume.

    Raises FileExistsError if the folder is not empty and `resume` is off, FileNotFoundError if there is nothing to
    resume, ValueError if the folder holds a run of another config or its checkpoints are a link to elsewhere.
    """
    if not resume:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise FileExistsError(
                f"run folder: got {out}, which is not empty; expected a new --out, or --resume"
            )
        return False
    if not (out / "train.toml").is_file():
        raise FileNotFoundError(
            f"run folder: got {out} without train.toml, expected one with a run to resume"
        )
    check_inside(out, CHECKPOINTS)
    finished = (out / "metrics.json").is_file()
    if (out / SUMS).is_file() and not finished:
        raise FileNotFoundError(
            f"run folder: got a finished run in {out} without metrics.json; "
            f"`sa-zoo evaluate {out} --json {out}/metrics.json` writes a new one"
        )
    _check_same(config, out / "train.toml")
    return finished


def check_writable(out: Path) -> None:
    """Raise PermissionError if the folder can be neither changed nor created."""
    place = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not os.access(place, os.W_OK):
        raise PermissionError(f"run folder: got {out}, but {place} cannot be written")


def _check_same(config: Config, path: Path) -> None:
    """Raise ValueError for the first key with another value than in the run of the folder."""
    try:
        started = load_config(path).model_dump()
    except ValueError as error:
        raise ValueError(f"{path}: got a damaged file: {error}") from error
    for section, keys in config.model_dump(exclude=MAY_CHANGE).items():
        for key, got in keys.items():
            expected = started[section][key]
            if got != expected:
                raise ValueError(
                    f"{section}.{key}: got {got!r}, expected {expected!r}, as in the run in {path.parent}"
                )


@contextmanager
def begin_run(out: Path, config: Config, model: nn.Module, base_model: str) -> Iterator[None]:
    """Create the folder if it does not exist, and lock it. Called when nothing is left that a mistake could stop.

    Raises ValueError if another process trains in it. The system ends the lock with the process. Windows has none.
    """
    if not (out / "train.toml").is_file():
        with new_folder(out) as new:
            (new / CHECKPOINTS).mkdir()
            if config.model.init:
                (new / START).mkdir()
                write_timm_files(new / START, model)
                write_metrics(new / START, Metrics(base_model=base_model))
            write_file(new / "train.toml", dump_config(config))
    with ExitStack() as stack:
        if sys.platform != "win32":
            folder = os.open(out, os.O_RDONLY)
            stack.callback(os.close, folder)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(
                    f"run folder: got {out}, in which another process trains"
                ) from error
        # some keys may have changed since the run began
        write_file(out / "train.toml", dump_config(config))
        yield


def write_history(out: Path, epochs: list[dict[str, Any]]) -> None:
    write_file(out / "history.jsonl", "".join(json.dumps(epoch) + "\n" for epoch in epochs))


def best_epoch(epochs: list[dict[str, Any]]) -> int:
    """The most accurate epoch on the validation images; of several, the one with the lowest loss."""
    scores = [(epoch["validation"]["top1"], -epoch["validation"]["loss"]) for epoch in epochs]
    return 1 + scores.index(max(scores))


def record_heads(out: Path, model: nn.Module, epoch: int) -> None:
    """Write row `epoch` of heads.safetensors if the model has positional parameters; row 0 is the initialization.

    Drops later rows: a resumed run writes them again.
    """
    parameters = declared(model, "positional_parameters")
    if not parameters:
        return
    earlier = load_file(out / HEADS) if epoch else {}
    rows = {
        name: torch.stack([*earlier.get(name, ())[:epoch], row.detach().cpu()])
        for name, row in parameters.items()
    }
    write_tensors(out / HEADS, rows)


@torch.no_grad()
def record_maps(out: Path, model: nn.Module, images: Tensor) -> None:
    """Write the attention of the middle pixel of a network of attention, averaged over images (B, C, R H, R W).

    Each tensor of the file is (N_h, H, W), under the name of its layer. Nothing is written for purely positional
    attention or for other networks.
    """
    if not isinstance(model, AttentionNetwork):
        return
    if all(term.positional for term in terms_in(model).values()):
        return
    layers = attention_in(model.blocks)
    grids = model.layout.grids(images.shape[2:])
    sums: dict[str, Any] = defaultdict(float)
    for some in images.split(RECORDED_AT_ONCE):
        for path, P in zip(layers, model.attention_maps(some), strict=True):
            height, width = grids[block_of(path)]
            middle = P[..., height // 2 * width + width // 2, :]  # (N_h, T) or (B, N_h, T)
            rows = middle.cpu().expand(len(some), -1, -1).unflatten(-1, [height, width])
            sums[f"blocks.{path}"] += rows.sum(dim=0)
    named = {name: total / len(images) for name, total in sums.items()}
    write_tensors(out / "attention.safetensors", named)


def remove_checkpoints(out: Path) -> None:
    (out / BEST).unlink(missing_ok=True)
    with suppress(OSError):  # such as for a folder with files of others
        shutil.rmtree(out / START, ignore_errors=True)
        remove_all_but([], out / CHECKPOINTS)
        (out / CHECKPOINTS).rmdir()
