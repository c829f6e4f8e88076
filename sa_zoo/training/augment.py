"""Randomness by counter, and what it does to training images.

Nothing here keeps a state: the order of an epoch is a function of (seed, epoch), the crop of an image one of
(seed, epoch, index). So neither workers, processes nor a resumed run change what the model sees.
Mixup alone pairs the images of one part of a batch, and so depends on how a batch is cut.
"""

import random
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from timm.data.mixup import Mixup
from timm.data.random_erasing import RandomErasing
from torch import Tensor

from sa_zoo.training.config import AugmentConfig

ORDER, CROP_ROWS, CROP_COLUMNS, FLIP, ERASE, STEP, HOLD_OUT, SMALL_ROWS, SMALL_COLUMNS = range(
    9
)  # one stream of numbers each


def counter_hash(*counters: int | np.ndarray) -> np.ndarray:
    """64 well mixed bits of a few integers, by the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    state = np.zeros(1, np.uint64)
    for counter in counters:
        state = state + np.asarray(counter).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


def permutation(n: int, *counters: int) -> np.ndarray:
    """An order of range(n) that the counters alone decide, on any machine and with any NumPy."""
    return np.argsort(counter_hash(*counters, np.arange(n)), kind="stable")


def sent(values: Tensor, device: torch.device) -> Tensor:
    """values on a device. A GPU is not waited for: while it works on a step, the host prepares the next ones."""
    if device.type != "cuda" or not values.is_cpu:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Sets what a step draws beside its images: dropout differs between processes, mixup's share does not."""
    shared = int(counter_hash(STEP, seed, step)[0])
    random.seed(shared)
    np.random.seed(shared % 2**32)
    torch.manual_seed(int(counter_hash(STEP, seed, step, rank)[0] >> np.uint64(1)))


class Augment:
    """Random crop with padding, flip, erasing, mixup and cutmix of one batch, on its device.

    Images come as uint8 (B, C, H, W) and leave as normalised float32; labels leave as int64 (B,), or as
    probabilities (B, classes) where mixup or cutmix mixes them.
    """

    def __init__(
        self,
        config: AugmentConfig,
        seed: int,
        classes: int,
        normalise: Callable[[Tensor], Tensor],
        device: torch.device,
    ) -> None:
        self.config, self.seed, self.normalise = config, seed, normalise
        self.erasing = RandomErasing(config.random_erasing, mode="const", device=device)
        self.mixup = None
        if config.mixup or config.cutmix:
            self.mixup = Mixup(config.mixup, config.cutmix, label_smoothing=config.label_smoothing, num_classes=classes)

    def __call__(self, images: Tensor, labels: Tensor, indices: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        counters = indices.cpu().numpy()
        images = self._crop_and_flip(images, counters, epoch)
        if epoch < self.config.small_epochs:
            images = self._small(images, counters, epoch)
        images = self.normalise(images)
        if self.config.random_erasing:
            self._erase(images, counters, epoch)
        return self.mixup(images, labels) if self.mixup else (images, labels)

    def _crop_and_flip(self, images: Tensor, counters: np.ndarray, epoch: int) -> Tensor:
        padding = self.config.crop_padding
        if not padding and not self.config.flip:
            return images
        height, width = images.shape[-2:]
        rows = np.arange(height) + self._offsets(CROP_ROWS, counters, epoch)  # (B, H)
        columns = np.arange(width) + self._offsets(CROP_COLUMNS, counters, epoch)  # (B, W)
        if self.config.flip:
            drawn_in = 0 if self.config.alternate_flips else epoch
            flipped = (counter_hash(FLIP, self.seed, drawn_in, counters) >> np.uint64(63)).astype(bool)
            flipped ^= self.config.alternate_flips and bool(epoch % 2)
            columns[flipped] = columns[flipped, ::-1]
        rows, columns = (sent(torch.from_numpy(x), images.device) for x in (rows, columns))
        batch = torch.arange(len(images), device=images.device)
        padded = F.pad(images, (padding,) * 4)  # black, as the images are not yet normalised
        # index b, h, w broadcast to (B, H, W); the channel axis between them moves to the end
        return padded[batch[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)

    def _small(self, images: Tensor, counters: np.ndarray, epoch: int) -> Tensor:
        size = self.config.small_size
        if not self.config.small_crop:
            return F.interpolate(images.float(), (size, size), mode="bicubic", antialias=True).clamp_(0, 255)
        room = np.uint64(images.shape[-1] - size + 1)
        top, left = (
            torch.from_numpy((counter_hash(s, self.seed, epoch, counters) % room).astype(np.int64))[:, None]
            for s in (SMALL_ROWS, SMALL_COLUMNS)
        )
        rows, columns = top + torch.arange(size), left + torch.arange(size)
        batch = torch.arange(len(images))
        return images[batch[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)

    def _offsets(self, stream: int, counters: np.ndarray, epoch: int) -> np.ndarray:
        choices = np.uint64(2 * self.config.crop_padding + 1)
        return (counter_hash(stream, self.seed, epoch, counters) % choices).astype(np.int64)[:, None]

    def _erase(self, images: Tensor, counters: np.ndarray, epoch: int) -> None:
        for image, number in zip(images, counter_hash(ERASE, self.seed, epoch, counters), strict=True):
            random.seed(int(number))
            self.erasing(image)
