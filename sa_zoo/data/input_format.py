"""The input of a model: size, resizing and normalization of images."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform, resolve_input_data_config
from torch import Tensor, nn

COLORS = {1: "L", 3: "RGB"}  # mode of an image by its channels

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
    crop_mode: str = "center"

    @cached_property
    def transform(self) -> Any:
        """timm's evaluation transform, without normalization."""
        return create_transform(**vars(self), normalize=False)

    def resized(self, image: Image.Image) -> Tensor:
        """uint8 (C, H, W) of the model's size and color, resized and cropped as in timm's evaluation.

        Raises ValueError for an image of other channels that cannot be converted.
        """
        channels, height, width = self.input_size
        image = self.in_color(image)
        if image.size != (width, height) or self.crop_pct != 1.0:
            return self.transform(image)
        return torch.from_numpy(np.array(image)).view(height, width, channels).permute(2, 0, 1)

    def in_color(self, image: Image.Image) -> Image.Image:
        """The image with the model's channels. Raises ValueError if it cannot be converted."""
        channels, *_ = self.input_size
        if channels in COLORS:
            image = image.convert(COLORS[channels])  # as timm's train.py does
        found = len(image.getbands())
        if found != channels:
            expected = f"{channels}; convert the images, or set model.args.in_chans to 1 or 3"
            raise ValueError(f"got {found} channels (mode {image.mode}), expected {expected}")
        return image

    def normalize(self, images: Tensor) -> Tensor:
        """uint8 (B, C, H, W) -> float32 of the same shape, channels last in memory for fast convolutions."""
        mean, std = (
            to_device(torch.tensor(x), images.device).view(-1, 1, 1) * 255
            for x in (self.mean, self.std)
        )
        return images.to(torch.float32, memory_format=torch.channels_last).sub_(mean).div_(std)


def input_format_of(model: nn.Module, image_size: int = 0) -> InputFormat:
    """The input format of a model. `image_size`, if not 0, applies unless the model fixes the size."""
    given = image_size or getattr(model, "_traits", {}).get("img_size")
    data = resolve_input_data_config(model, {"img_size": given})
    channels = data["input_size"][0]
    mean, std = (tuple(data[key]) * (channels // len(data[key])) for key in ("mean", "std"))
    rest = (data[key] for key in ("interpolation", "crop_pct", "crop_mode"))
    return InputFormat(data["input_size"], mean, std, *rest)
