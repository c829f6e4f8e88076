"""Splits of a Source for a model: decoded once and kept on the device if small, else decoded by worker processes."""

import gc
import math
import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from sa_zoo.training.augment import HOLD_OUT, permutation
from sa_zoo.training.device import to_device
from sa_zoo.training.model import InputFormat
from sa_zoo.training.sources import Images, Source

SPLITS = ("train", "validation", "test")
TEST_SHARE = 0.2  # of a data set without a test split
KEPT_BYTES = 2**31  # decoded data sets up to this size stay on the device


class UnreadableImage(ValueError):
    """Names an image that cannot be used, in one line, also after torch has added the traceback of a worker to it."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.rpartition("UnreadableImage: ")[2].split()))


class Split(Dataset[Any]):
    """Decoded images of one split, kept on a device. A batch is (uint8 (B, C, H, W), int64 (B,), indices (B,))."""

    workers = 0

    def __init__(self, images: Tensor, labels: np.ndarray) -> None:
        self.images, self.labels = images, torch.from_numpy(labels).to(images.device)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: list[int] | np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        positions = torch.tensor(indices)
        on_device = to_device(positions, self.labels.device)
        return self.images[on_device], self.labels[on_device], positions

    def loader(self, batch_size: int) -> DataLoader[Any]:
        """Every image once, in order."""
        return DataLoader(self, batch_size, collate_fn=tuple, num_workers=self.workers)

    def loader_in_order(self, batches: np.ndarray) -> Iterable[Any]:
        """The images of these indices (batches, B), batch by batch."""
        return DataLoader(self, batch_sampler=batches, collate_fn=tuple, num_workers=self.workers)


class StreamedSplit(Split):
    """A Split whose images are decoded by worker processes each time they are read."""

    def __init__(self, decode: "Decoder", source: Source, table: str, rows: np.ndarray) -> None:
        self.decode, self.table, self.encoded, self.rows = decode, table, source.images[table], rows
        self.labels = torch.from_numpy(source.labels[table][rows])
        cores = (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )
        self.workers = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    def __getitems__(self, indices: list[int] | np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        images, positions = self.encoded, torch.tensor(indices)
        decoded = [
            self.decode.read(images.__getitem__, images, self.table, int(row))
            for row in self.rows[indices]
        ]
        return torch.stack(decoded), self.labels[positions], positions

    def loader_in_order(self, batches: np.ndarray) -> Iterable[Any]:
        gc.freeze()  # a collection writes to every object, and each worker would get a copy of what it shares
        try:
            yield from super().loader_in_order(batches)
        finally:
            gc.unfreeze()


class Decoder:
    """PIL image -> uint8 (C, H, W) of the model's size and color, resized and cropped as in timm's evaluation."""

    def __init__(self, input_format: InputFormat) -> None:
        self.input_size = input_format.input_size
        self.transform = create_transform(**vars(input_format), normalize=False)

    def __call__(self, image: Image.Image) -> Tensor:
        channels, height, width = self.input_size
        image = image.convert(
            {1: "L", 3: "RGB"}.get(channels, image.mode)
        )  # as timm's train.py does
        if (found := len(image.getbands())) != channels:
            got = f"got {found} channels (mode {image.mode})"
            raise ValueError(
                f"{got}, expected {channels}; convert the images, or set model.args.in_chans to 1 or 3"
            )
        if image.size != (width, height):
            return self.transform(image)
        return torch.from_numpy(np.array(image)).view(height, width, channels).permute(2, 0, 1)

    def read(
        self, image_of: Callable[[int], Image.Image], images: Any, table: str, row: int
    ) -> Tensor:
        """Decode one of the images. Raises UnreadableImage."""
        try:
            return self(image_of(row))
        except Exception as error:
            file = f"{path}, " if isinstance(images, Images) and (path := images.path(row)) else ""
            where = f"{file}image {row} of the {table} split"
            raise UnreadableImage(f"{where}: {error or type(error).__name__}") from error

    def table(self, source: Source, table: str) -> Tensor:
        """All images of a table, uint8 (N, C, H, W)."""
        decoded = torch.empty((len(source.labels[table]), *self.input_size), dtype=torch.uint8)
        images = iter(source.images[table])
        for row in range(len(decoded)):
            decoded[row] = self.read(lambda _: next(images), source.images[table], table, row)
        return decoded


def splits_of(
    source: Source,
    validation: float,
    input_format: InputFormat,
    device: torch.device,
    names: Iterable[str] = SPLITS,
) -> dict[str, Split]:
    """The splits of these names. The held-out images depend on the data alone: all models and seeds share them."""
    rows = _rows(source, validation)
    chosen = {name: rows[name] for name in names}
    if "test" in chosen and not len(chosen["test"][1]):
        expected = "a test split, or more images, of which a fifth become one"
        raise ValueError(f"data.name: got {source.name} without test images, expected {expected}")
    decode = Decoder(input_format)
    tables = {table for table, _ in chosen.values()}
    if (
        sum(len(source.labels[table]) for table in tables) * math.prod(input_format.input_size)
        > KEPT_BYTES
    ):
        return {
            name: StreamedSplit(decode, source, table, rows)
            for name, (table, rows) in chosen.items()
        }
    # once and in order: random access to an Arrow table costs more than decoding
    decoded = {table: decode.table(source, table) for table in tables}
    return {
        name: Split(decoded[table][torch.from_numpy(rows)].to(device), source.labels[table][rows])
        for name, (table, rows) in chosen.items()
    }


def _rows(source: Source, validation: float) -> dict[str, tuple[str, np.ndarray]]:
    """Split -> (table of the source, rows of that table)."""
    rows = {table: np.arange(len(labels)) for table, labels in source.labels.items()}
    if "test" in rows:
        table, test = "test", rows["test"]
    else:
        table, (rows["train"], test) = "train", _hold_out(rows["train"], TEST_SHARE)
    train, held_out = _hold_out(rows["train"], validation)
    return {"train": ("train", train), "validation": ("train", held_out), "test": (table, test)}


def _hold_out(rows: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    order = permutation(len(rows), HOLD_OUT)
    held = round(share * len(rows))
    return np.sort(rows[order[held:]]), np.sort(rows[order[:held]])
