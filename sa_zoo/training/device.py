"""The device of a run: its Accelerator, the caller's process, and errors when another process ends."""

import logging
import os
import random
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState, GradientState, PartialState

from sa_zoo.training.config import Config, parse_config

_logger = logging.getLogger(__name__)
# Every Accelerator shares them: a new one would take the precision of the caller's and change its accumulation.
SHARED: tuple[Any, ...] = (PartialState, AcceleratorState, GradientState)


@contextmanager
def random_numbers_as_found(devices: Iterable[int] = ()) -> Iterator[None]:
    """Leave the caller's random numbers as they are."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def process_as_found() -> Iterator[None]:
    """Leave the caller's Accelerators, process group and random numbers as they are."""
    states = [shared._shared_state for shared in SHARED]
    for shared in SHARED:
        shared._shared_state = {}
    group = torch.distributed.is_initialized()
    try:
        with random_numbers_as_found(range(torch.cuda.device_count())):
            yield
    finally:
        if torch.distributed.is_initialized() and not group:
            torch.distributed.destroy_process_group()
        for shared, state in zip(SHARED, states, strict=True):
            shared._shared_state = state


def open_accelerator(**settings: Any) -> Accelerator:
    """A new Accelerator. Without a GPU it needs `cpu=True`; otherwise each process would train alone."""
    return Accelerator(cpu=not torch.accelerator.is_available(), **settings)


def computes_in_bf16() -> bool:
    """Whether the device has instructions for bfloat16. Emulated by a CPU, it is far slower than float32."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if torch.accelerator.is_available():
        return True
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def launched(config: Config) -> Config:
    """The config with a definite precision: its own, or that of `accelerate launch`. Warns if the two differ."""
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    chosen = config.train.precision or precision
    if chosen == "auto":
        chosen = "bf16" if computes_in_bf16() else "no"
    if precision not in ("no", chosen):  # "no" is also the default of the launcher
        _logger.warning(
            "train.precision: got %s from the launcher, but the config says %s, which counts",
            precision,
            chosen,
        )
    train = config.train.model_dump() | {"precision": chosen}
    return parse_config(config.model_dump() | {"train": train})


# Variables that `accelerate launch` sets
DIVIDING = {"ACCELERATE_USE_FSDP": "FSDP", "ACCELERATE_USE_DEEPSPEED": "DeepSpeed"}


def join_processes() -> None:
    """Connect the processes that a launcher started. Raises ValueError for FSDP and DeepSpeed."""
    for variable, name in DIVIDING.items():
        if os.environ.get(variable, "false").lower() == "true":
            raise ValueError(
                f"accelerate: got {name}, which divides the network, expected DDP (configs/accelerate/ddp.yaml): "
                "checkpoints hold whole networks"
            )
    PartialState(cpu=not torch.accelerator.is_available())


def check_machine(config: Config) -> None:
    """Raise ValueError for settings that this machine or the launcher rules out."""
    tracker = config.train.tracker
    if config.train.precision == "fp16" and not torch.accelerator.is_available():
        raise ValueError("train.precision: got fp16, expected bf16 or no on a CPU")
    if tracker and find_spec(tracker) is None:
        raise ValueError(
            f"train.tracker: got {tracker}, which is not installed: pip install {tracker}"
        )


def accelerator_of(config: Config, out: Path) -> Accelerator:
    """The Accelerator of a run."""
    return open_accelerator(
        mixed_precision=config.train.precision,
        gradient_accumulation_steps=config.train.accumulation,
        # only the classifier has gradients in the first epochs
        kwargs_handlers=[
            DistributedDataParallelKwargs(find_unused_parameters=config.train.head_epochs > 0)
        ],
        log_with=config.train.tracker or None,
        project_dir=out,
    )


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
