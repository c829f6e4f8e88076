"""Splits of a Source for a model: small ones decoded once and kept on the device, others decoded by workers."""

import gc
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from PIL import Image
from timm.data import create_transform
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from sa_zoo.data.report import report_of
from sa_zoo.data.sources import Rows, Source, UnreadableImage
from sa_zoo.training.augment import HOLD_OUT, counter_hash, permutation
from sa_zoo.training.config import AugmentConfig
from sa_zoo.training.device import to_device
from sa_zoo.training.model import InputFormat
from sa_zoo.training.progress import MANY, shown

SPLITS = ("train", "validation", "test")
TEST_SHARE = 0.2  # of a data set without a test split
COLORS = {1: "L", 3: "RGB"}  # mode of an image by its channels
KEPT_BYTES = 2**31  # decoded data sets up to this size stay on the device


class Split(Dataset[Any]):
    """Decoded images of one split, kept on a device. A batch is (uint8 (B, C, H, W), int64 (B,), indices (B,))."""

    workers = 0

    def __init__(self, images: Tensor, labels: np.ndarray, input_format: InputFormat) -> None:
        self.images = images
        self.labels = torch.from_numpy(labels).to(images.device)
        self.input_format = input_format

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: list[int] | np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        positions = torch.tensor(indices)
        on_device = to_device(positions, self.labels.device)
        return self.images[on_device], self.labels[on_device], positions

    def loader(self, batch_size: int) -> DataLoader[Any]:
        """Every image once, in order."""
        return DataLoader(self, batch_size, collate_fn=tuple, num_workers=self.workers)

    def first(self, count: int) -> Tensor:
        """The first images, normalized: float32 (count, C, H, W)"""
        images, *_ = next(iter(self.loader(count)))
        return self.input_format.normalize(images)

    def loader_in_order(self, batches: np.ndarray) -> Iterable[Any]:
        """The images of these indices (batches, B), batch by batch."""
        return DataLoader(self, batch_sampler=batches, collate_fn=tuple, num_workers=self.workers)


class StreamedSplit(Split):
    """Rows of a table of a Source, decoded by worker processes each time they are read.

    Images become uint8 (C, H, W) of the model's size and color, resized and cropped as in timm's evaluation.
    """

    def __init__(
        self, source: Source, table: str, rows: np.ndarray, input_format: InputFormat
    ) -> None:
        self.pictures = source.images[table]
        self.rows = rows
        self.labels = torch.from_numpy(source.labels[table][rows])
        self.input_format = input_format
        self.transform = create_transform(**vars(input_format), normalize=False)
        self.workers = max(1, _cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    def __getitems__(self, indices: list[int] | np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        positions = torch.tensor(indices)
        images = [self.read(row) for row in self.rows[indices].tolist()]
        return torch.stack(images), self.labels[positions], positions

    def loader_in_order(self, batches: np.ndarray) -> Iterable[Any]:
        # a garbage collection writes to every object and would copy shared memory into each worker
        gc.freeze()
        try:
            yield from super().loader_in_order(batches)
        finally:
            gc.unfreeze()

    def read(self, row: int) -> Tensor:
        """Decode one image of the table. Raises UnreadableImage."""
        with self.pictures.naming(row):
            return self._decoded(self.pictures[row])

    def _decoded(self, image: Image.Image) -> Tensor:
        channels, height, width = self.input_format.input_size
        if channels in COLORS:
            image = image.convert(COLORS[channels])  # as timm's train.py does
        found = len(image.getbands())
        if found != channels:
            expected = f"{channels}; convert the images, or set model.args.in_chans to 1 or 3"
            raise ValueError(f"got {found} channels (mode {image.mode}), expected {expected}")
        if image.size != (width, height):
            return self.transform(image)
        return torch.from_numpy(np.array(image)).view(height, width, channels).permute(2, 0, 1)

    def kept(self, device: torch.device, unreadable: list[str]) -> Split:
        """The same split, decoded now and kept on a device. Appends unreadable images to a list."""
        images = torch.empty((len(self), *self.input_format.input_size), dtype=torch.uint8)
        with shown(self.rows.tolist(), "decoding") as rows:
            for position, row in enumerate(rows):
                try:
                    images[position] = self.read(row)
                except UnreadableImage as error:
                    unreadable.append(str(error))
        return Split(images.to(device), self.labels.numpy(), self.input_format)


def _cores() -> int:
    """Cores available to this process, or all cores if the system does not tell."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def splits_of(
    source: Source,
    validation: float,
    input_format: InputFormat,
    device: torch.device,
    names: Iterable[str] = SPLITS,
    hold_out: str = "content",
    augment: AugmentConfig | None = None,
) -> Mapping[str, Split]:
    """The splits of these names, decoded and kept on the device if they are small.

    Prints a report of them first; `augment` only adds to the report. The held-out images depend on the data alone: all
    models and seeds share them. Raises ValueError without test images, or with the list of unreadable images. If the
    splits are too large to keep and have many images, only headers are checked.
    """
    every = rows_of(source, validation, hold_out)
    rows = {name: every[name] for name in names}
    if "test" in rows and not len(rows["test"][1]):
        raise ValueError(
            f"data.name: got {source.name} without test images, expected a test split, or more images, of which a "
            "fifth become one"
        )
    streamed = {name: StreamedSplit(source, *own, input_format) for name, own in rows.items()}
    images = sum(map(len, streamed.values()))
    small = images * math.prod(input_format.input_size) <= KEPT_BYTES
    report = report_of(source, rows, images <= MANY and not small, _input(input_format, augment))
    PartialState().print(report.text(), file=sys.stderr, flush=True)
    splits: Mapping[str, Split] = streamed
    unreadable = report.unreadable
    if small:
        unreadable = []
        splits = {name: split.kept(device, unreadable) for name, split in streamed.items()}
    refuse_unreadable(unreadable)
    return splits


def _input(input_format: InputFormat, augment: AugmentConfig | None) -> str:
    """The preprocessing of an image, for the report."""
    channels, height, width = input_format.input_size
    text = f"resized and cropped to {height}x{width} (data.image_size), {channels} channels"
    if augment:
        changes = augment.model_dump(exclude_defaults=True)
        text += f"; training images also by {changes or 'nothing'} (augment)"
    return text


def refuse_unreadable(images: Sequence[str]) -> None:
    if images:
        named = "\n".join(images)
        raise ValueError(f"data.name: got {len(images)} images that cannot be read: {named}")


def rows_of(source: Source, validation: float, hold_out: str = "content") -> Rows:
    """Split -> (table of the source, rows of the table). Missing splits are held out of "train".

    "content" holds out by the bytes of images, "position" by their place; "everything" leaves no training images.
    """
    rows = {name: (name, np.arange(len(labels))) for name, labels in source.labels.items()}
    if hold_out == "everything":
        return {"test": rows["train"]}
    if hold_out == "position":
        rows.pop("validation", None)
    shares = {"test": TEST_SHARE, "validation": validation}
    held_out = {name: share for name, share in shares.items() if name not in rows}
    train = rows["train"][1]
    by_content = hold_out == "content" and any(held_out.values())
    if by_content:
        hashes = source.images["train"].hashes
        train = np.argsort(hashes, kind="stable")  # independent of file names
    for name, share in held_out.items():
        if by_content:
            draws = counter_hash(HOLD_OUT, SPLITS.index(name), hashes[train]) / 2.0**64
            held = _held_out(draws, source.labels["train"][train], share)
        else:
            first = permutation(len(train), HOLD_OUT)[: round(share * len(train))]
            held = np.isin(np.arange(len(train)), first)
        rows[name] = "train", train[held]
        train = train[~held]
    rows["train"] = "train", train
    return rows


def _held_out(draws: np.ndarray, labels: np.ndarray, share: float) -> np.ndarray:
    """Whether each image is held out: its draw, from 0 to 1, is below the share, independent of other images.

    Small classes may be far from the share. Their lowest draws then bring the count to at least half the share and at
    most one and a half: every class of several images has some held out, and keeps some.
    """
    held = np.zeros(len(draws), bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        own = draws[members]
        expected = share * len(members)
        least = math.ceil(expected / 2)
        most = min(max(least, int(1.5 * expected)), len(members) - 1)
        count = max(least, int((own < share).sum()))
        held[members[own.argsort(kind="stable")[: min(count, most)]]] = True
    return held
