"""Where a run computes: the Accelerator of this process, and tensors on their way to its device."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor


def open_accelerator(**settings: Any) -> Accelerator:
    """A new Accelerator for this process.

    Without a GPU it gets `cpu=True`: otherwise several CPU processes would each train alone.
    """
    AcceleratorState._reset_state()  # one per process, which refuses another precision
    GradientState._reset_state()
    return Accelerator(cpu=not torch.accelerator.is_available(), **settings)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy to a device, without waiting for a GPU: while it computes one step, the host prepares the next ones."""
    if device.type != "cuda" or not values.is_cpu:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
