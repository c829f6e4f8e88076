"""Random numbers by counter, and the augmentation of training images.

The order of an epoch is a function of (seed, epoch), the crop of an image a function of (seed, epoch, index).
Workers, processes and resuming therefore do not change the training images. Only mixup depends on how a batch is
divided: it pairs the images of a micro-batch.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from timm.data.mixup import Mixup
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torchvision.transforms.functional import pad

from sa_zoo.data.hold_out import counter_hash
from sa_zoo.data.input_format import to_device
from sa_zoo.training.config import AugmentConfig

Normalize = Callable[[Tensor], Tensor]  # uint8 (B, C, H, W) -> float32 (B, C, H, W)
# independent streams of numbers
ORDER, CROP_ROWS, CROP_COLUMNS, FLIP = range(4)
STEP = 5  # 6 is HOLD_OUT of data/hold_out.py
VIEW, ERASE = 7, 8


def permutation(n: int, *counters: int) -> np.ndarray:
    """A permutation of range(n), determined by the counters alone, on any machine and with any NumPy."""
    return np.argsort(counter_hash(*counters, np.arange(n)), kind="stable")


def image_size(config: AugmentConfig, epoch: int, height: int, width: int) -> tuple[int, int]:
    """The size of the training images of an epoch."""
    quarters = 2 if epoch < config.half_epochs else 3 if epoch < config.small_epochs else 4
    return height * quarters // 4, width * quarters // 4


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed the other random numbers of a step. Dropout differs between processes; the mixup ratio does not."""
    shared = int(counter_hash(STEP, seed, step)[0])
    _seed(shared, int(counter_hash(STEP, seed, step, rank)[0]))


def seed_view(seed: int, epoch: int, row: int) -> None:
    """Seed the random numbers of the augmentation of one image."""
    number = int(counter_hash(VIEW, seed, epoch, row)[0])
    _seed(number, number)


def _seed(number: int, number_of_torch: int) -> None:
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number_of_torch >> 1)


@dataclass
class Augment:
    """Random crop with padding, flip, small images in early epochs, erasing, mixup and cutmix of one batch.

    uint8 images (B, C, H, W) -> normalized float32, on their device. int64 labels (B,) are unchanged; mixup and cutmix
    turn them into probabilities (B, classes).
    """

    config: AugmentConfig
    seed: int
    classes: int
    normalize: Normalize

    def __post_init__(self) -> None:
        config = self.config
        self.label_smoothing = config.label_smoothing  # of the loss
        self.mixup = None
        if config.mixup or config.cutmix:
            self.mixup = Mixup(
                config.mixup,
                config.cutmix,
                label_smoothing=config.label_smoothing,
                num_classes=self.classes,
            )
            self.label_smoothing = 0.0

    def __call__(
        self, images: Tensor, labels: Tensor, indices: Tensor, epoch: int
    ) -> tuple[Tensor, Tensor]:
        config = self.config
        if config.crop_padding or config.flip or config.alternate_flips:
            images = self._crop_and_flip(images, indices.cpu().numpy(), epoch)
        size = image_size(config, epoch, *images.shape[-2:])
        if size != images.shape[-2:]:
            images = F.interpolate(images.float(), size, mode="bicubic", antialias=True)
            images = images.clamp_(0, 255)
        images = self.normalize(images)
        if config.re_prob:
            self._erase(images, indices, epoch)
        return self.mixup(images, labels) if self.mixup else (images, labels)

    def _erase(self, images: Tensor, indices: Tensor, epoch: int) -> None:
        """Erase a rectangle in some normalized images, in place, as timm's loader does."""
        erase = RandomErasing(self.config.re_prob, device=images.device)
        numbers = counter_hash(ERASE, self.seed, epoch, indices.cpu().numpy())
        for image, number in zip(images, numbers.tolist(), strict=True):
            random.seed(number)
            erase(image)

    def _crop_and_flip(self, images: Tensor, counters: np.ndarray, epoch: int) -> Tensor:
        padding = self.config.crop_padding
        height, width = images.shape[-2:]
        mode = "reflect" if self.config.crop_fill == "reflect" else "constant"
        if mode == "reflect" and padding >= min(height, width):
            raise ValueError(
                f"augment.crop_padding: got {padding}, expected less than the {min(height, width)} pixels that "
                "crop_fill = reflect repeats"
            )

        def draw(stream: int) -> np.ndarray:  # (B, 1)
            return counter_hash(stream, self.seed, epoch, counters)[:, None]

        y = draw(CROP_ROWS) % (2 * padding + 1) + np.arange(height, dtype=np.uint64)  # (B, H)
        x = draw(CROP_COLUMNS) % (2 * padding + 1) + np.arange(width, dtype=np.uint64)  # (B, W)
        if self.config.alternate_flips:
            flipped = (counter_hash(FLIP, self.seed, 0, counters) + epoch) % 2
            x = np.where(flipped[:, None], x[:, ::-1], x)
        elif self.config.flip:
            x = np.where(draw(FLIP) >> 63, x[:, ::-1], x)
        rows = to_device(torch.from_numpy(y.astype(np.int64)), images.device)
        columns = to_device(torch.from_numpy(x.astype(np.int64)), images.device)
        batch = torch.arange(len(images), device=images.device)[:, None, None]
        # a constant of 0 is black: the images are not normalized yet
        padded = pad(images, [padding], padding_mode=mode)
        # the three indices broadcast to (B, H, W); the channel axis between them moves to the end
        cropped = padded[batch, :, rows[:, :, None], columns[:, None, :]]
        return cropped.permute(0, 3, 1, 2)
