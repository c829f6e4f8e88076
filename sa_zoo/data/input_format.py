"""The input of a model: size, resizing and normalization of images."""

from dataclasses import dataclass

import torch
from torch import Tensor

Size = tuple[int, int, int]  # channels, height, width


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy to a device. Copies to a GPU do not block: the host prepares the next steps meanwhile."""
    if device.type != "cuda" or not values.is_cpu:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class InputFormat:
    """Arguments of timm's transforms."""

    input_size: Size
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    crop_pct: float

    def normalize(self, images: Tensor) -> Tensor:
        """uint8 (B, C, H, W) -> float32 of the same shape, channels last in memory for fast convolutions."""
        mean, std = (
            to_device(torch.tensor(x), images.device).view(-1, 1, 1) * 255
            for x in (self.mean, self.std)
        )
        return images.to(torch.float32, memory_format=torch.channels_last).sub_(mean).div_(std)
