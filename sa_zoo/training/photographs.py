"""Training images by timm's augmentation of photographs, decoded and augmented by the workers in every epoch."""

from dataclasses import asdict
from typing import Any

import numpy as np
from timm.data import create_transform
from torch import Tensor

from sa_zoo.data.input_format import InputFormat
from sa_zoo.data.splits import StreamedSplit
from sa_zoo.training.augment import seed_view
from sa_zoo.training.config import RESIZED_CROPS, AugmentConfig
from sa_zoo.training.device import random_numbers_as_found


def check_policy(name: str) -> None:
    """Raise ValueError for a policy of augmentation unknown to timm."""
    try:
        create_transform(is_training=True, auto_augment=name)
    except Exception as error:  # timm raises many types
        raise ValueError(
            f"augment.auto_augment: got {name!r}, expected a policy of timm: {error}"
        ) from error


def photograph_transform(config: AugmentConfig, input_format: InputFormat) -> Any:
    """timm's training transform: PIL image -> uint8 (C, H, W). Erasing follows normalization, as in timm's loader."""
    keys = config.model_dump(include={"scale", *RESIZED_CROPS}, exclude={"re_prob"})
    settings = asdict(input_format) | keys | {"color_jitter": config.color_jitter or None}
    return create_transform(**settings, is_training=True, normalize=False)


class Photographs(StreamedSplit):
    """The split with augmented images, each a function of the seed, the epoch and its row."""

    def __init__(self, split: StreamedSplit, config: AugmentConfig, seed: int) -> None:
        vars(self).update(vars(split))
        self.transform = photograph_transform(config, split.input_format)
        self.seed = seed

    def __getitems__(self, indices: list[int] | np.ndarray) -> tuple[Any, Any, Any]:
        with random_numbers_as_found():
            return super().__getitems__(indices)

    def read(self, row: int) -> Tensor:
        seed_view(self.seed, self.epoch, row)
        with self.source.naming(row):
            augmented: Tensor = self.transform(self.input_format.in_color(self.source[row]))
        return augmented
