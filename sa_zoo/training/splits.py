"""Train, validation and test of a Source, resized to what a model takes.

Decoded once and kept on the device if that is small, decoded by worker processes otherwise.
"""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from timm.data import create_transform
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from sa_zoo.training.augment import HOLD_OUT, permutation
from sa_zoo.training.device import to_device
from sa_zoo.training.model import InputFormat
from sa_zoo.training.sources import Source

TEST_SHARE = 0.2  # of a data set without a test split
KEPT_BYTES = 2**31  # decoded data sets up to this size stay on the device


@dataclass(frozen=True)
class Splits:
    train: "Split"
    validation: "Split"
    test: "Split"


class Split(Dataset):
    """Decoded images of one split, kept on a device. A batch is (uint8 (B, C, H, W), int64 (B,), indices (B,))."""

    workers = 0

    def __init__(self, images: Tensor, labels: np.ndarray) -> None:
        self.images, self.labels = images, torch.from_numpy(labels).to(images.device)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        positions = torch.tensor(indices)
        on_device = to_device(positions, self.labels.device)
        return self.images[on_device], self.labels[on_device], positions

    def loader(self, batch_size: int) -> DataLoader:
        """Every image once, in order."""
        return DataLoader(self, batch_size, collate_fn=_unchanged, num_workers=self.workers)

    def loader_in_order(self, batches: Iterable[np.ndarray]) -> DataLoader:
        """The images of these indices, batch by batch."""
        ordered = [batch.tolist() for batch in batches]
        return DataLoader(self, batch_sampler=ordered, collate_fn=_unchanged, num_workers=self.workers)


class StreamedSplit(Split):
    """A Split whose images are decoded by worker processes each time they are read."""

    def __init__(self, decode: "Decoder", source: Source, table: str, rows: np.ndarray) -> None:
        self.decode, self.table, self.encoded, self.rows = decode, table, source.images[table], rows.tolist()
        self.labels = torch.from_numpy(source.labels[table][rows])
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.workers = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        rows = [self.rows[i] for i in indices]
        images = torch.stack([self.decode(self.encoded[row], _name(self.table, row)) for row in rows])
        positions = torch.tensor(indices)
        return images, self.labels[positions], positions


def _name(table: str, row: int) -> str:
    return f"image {row} of the {table} split"


def _unchanged(batch: Any) -> Any:
    return batch


class Decoder:
    """PIL image -> uint8 (C, H, W) of the model's size, resized and cropped as in timm's evaluation."""

    def __init__(self, input_format: InputFormat, gray_as_color: bool) -> None:
        self.input_size, self.gray_as_color = input_format.input_size, gray_as_color
        self.transform = create_transform(
            input_format.input_size,
            interpolation=input_format.interpolation,
            crop_pct=input_format.crop_pct,
            normalize=False,
        )

    def __call__(self, image: Image.Image, name: str) -> Tensor:
        channels, height, width = self.input_size
        # a palette holds RGB colors
        if image.mode == "P" or (image.mode == "L" and channels == 3 and self.gray_as_color):
            image = image.convert("RGB")
        if len(image.getbands()) != channels:
            raise ValueError(
                f"{name}: got {len(image.getbands())} channels (mode {image.mode}), expected {channels}; "
                f"convert the images, or build the model for them with model.args.in_chans"
            )
        if image.size != (width, height):
            return self.transform(image)
        pixels = np.array(image)
        return torch.from_numpy(pixels).view(height, width, channels).permute(2, 0, 1)


def splits_of(source: Source, validation: float, input_format: InputFormat, device: torch.device) -> Splits:
    """Train, validation and test. The held-out images depend on the data alone: all models and seeds share them."""
    return Splits(**_splits(source, _rows(source, validation), input_format, device))


def evaluation_split(source: Source, input_format: InputFormat, device: torch.device) -> Split:
    """The test split; the others are not decoded."""
    return _splits(source, {"test": _rows(source, 0)["test"]}, input_format, device)["test"]


def _rows(source: Source, validation: float) -> dict[str, tuple[str, np.ndarray]]:
    """Split -> (the table of the source that it is taken from, the rows of that table)."""
    train = np.arange(len(source.labels["train"]))
    if "test" in source.labels:
        test = "test", np.arange(len(source.labels["test"]))
    else:
        train, held_out = _hold_out(train, TEST_SHARE)
        test = "train", held_out
    train, held_out = _hold_out(train, validation)
    return {"train": ("train", train), "validation": ("train", held_out), "test": test}


def _hold_out(rows: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    order = permutation(len(rows), HOLD_OUT)
    held = round(share * len(rows))
    return np.sort(rows[order[held:]]), np.sort(rows[order[:held]])


def _splits(
    source: Source, wanted: Mapping[str, tuple[str, np.ndarray]], input_format: InputFormat, device: torch.device
) -> dict[str, Split]:
    decode = Decoder(input_format, source.gray_as_color)
    tables = {table for table, _ in wanted.values()}
    if sum(len(source.labels[table]) for table in tables) * math.prod(input_format.input_size) > KEPT_BYTES:
        return {name: StreamedSplit(decode, source, table, rows) for name, (table, rows) in wanted.items()}
    # once and in order: random access to an Arrow table costs more than decoding
    kept = {table: _decoded(decode, source, table) for table in tables}
    return {
        name: Split(kept[table][torch.from_numpy(rows)].to(device), source.labels[table][rows])
        for name, (table, rows) in wanted.items()
    }


def _decoded(decode: Decoder, source: Source, table: str) -> Tensor:
    kept = torch.empty((len(source.labels[table]), *decode.input_size), dtype=torch.uint8)
    row = -1
    try:
        for row, image in enumerate(source.images[table]):
            kept[row] = decode(image, _name(table, row))
    except UnidentifiedImageError as error:
        raise ValueError(f"{_name(table, row + 1)}: got a file that is not an image: {error}") from error
    return kept
