"""The device of a run: its Accelerator, copies of tensors to it, and errors when another process ends."""

import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor

from sa_zoo.training.config import Config, parse_config

_logger = logging.getLogger(__name__)


def open_accelerator(**settings: Any) -> Accelerator:
    """A new Accelerator. Without a GPU it needs `cpu=True`; otherwise each process would train alone."""
    AcceleratorState._reset_state()  # all Accelerators of a process share it, with the precision of the first
    GradientState._reset_state()
    return Accelerator(cpu=not torch.accelerator.is_available(), **settings)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy to a device. Copies to a GPU do not block: the host prepares the next steps meanwhile."""
    if device.type != "cuda" or not values.is_cpu:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def open_launched(config: Config, out: Path) -> tuple[Config, Accelerator]:
    """The config and its Accelerator. `accelerate launch` sets the precision if the config does not.

    Warns if the two precisions differ. Raises ValueError for settings ruled out by this machine or the launcher.
    """
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    chosen = config.train.precision or launched
    if launched not in ("no", chosen):  # "no" is also the default of the launcher
        _logger.warning(
            "train.precision: got %s from the launcher, but the config says %s, which counts",
            launched,
            chosen,
        )
    train = config.train.model_dump() | {"precision": chosen}
    config = parse_config(config.model_dump() | {"train": train})
    tracker = config.train.tracker
    if chosen == "fp16" and not torch.accelerator.is_available():
        raise ValueError("train.precision: got fp16, expected bf16 or no on a CPU")
    if tracker and find_spec(tracker) is None:
        raise ValueError(
            f"train.tracker: got {tracker}, which is not installed: pip install {tracker}"
        )
    accelerator = open_accelerator(
        mixed_precision=chosen,
        gradient_accumulation_steps=config.train.accumulation,
        log_with=tracker or None,
        project_dir=out,
    )
    if accelerator.distributed_type == DistributedType.FSDP:
        raise ValueError(
            "accelerate: got FSDP, which divides the network, expected DDP (configs/accelerate/ddp.yaml): "
            "checkpoints hold whole networks"
        )
    return config, accelerator


# Part of a RuntimeError of torch -> the process that ended
LOST = {
    "gloo|NCCL": "another process of the run has ended",
    "DataLoader worker": "a process that decodes images has ended",
}


@contextmanager
def report_lost_process() -> Iterator[None]:
    """Turn torch's error about an ended process into a ConnectionError with the cause and a remedy."""
    try:
        try:
            yield
        except ConnectionError:
            time.sleep(1)  # torch interrupts this once it sees the ended process
            raise
    except RuntimeError as error:
        for pattern, what in LOST.items():
            if re.search(pattern, str(error)):
                raise ConnectionError(
                    f"{what}: its output or the system's log says why, and --resume continues the run ({error})"
                ) from error
        raise
