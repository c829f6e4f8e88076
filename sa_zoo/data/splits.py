"""Splits of a data set for a model: small ones decoded once and kept on the device, others decoded by workers."""

import math
import multiprocessing
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from sa_zoo.data.hold_out import Rows
from sa_zoo.data.images import LabeledImages, UnreadableImage
from sa_zoo.data.input_format import InputFormat, to_device
from sa_zoo.data.progress import MANY, say, shown
from sa_zoo.data.report import report_of
from sa_zoo.data.shared import shared

KEPT_BYTES = 2**31  # decoded data sets up to this size stay on the device
# Ctrl-C, queues of clusters, a closed terminal, and a queue's warning. Windows has two of them.
STOPS = [
    number for number in signal.Signals if number.name in {"SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"}
]


class Split(Dataset[Any]):
    """Decoded images of one split, kept on a device. A batch is (uint8 (B, C, H, W), int64 (B,), indices (B,))."""

    workers = 0
    epoch = 0  # of training, for augmentation by workers

    def __init__(self, images: Tensor, labels: np.ndarray, input_format: InputFormat) -> None:
        self.images = images
        self.labels = torch.from_numpy(labels).to(images.device)
        self.input_format = input_format

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: list[int] | np.ndarray) -> tuple[Any, Any, Any]:
        positions = torch.tensor(indices)
        on_device = to_device(positions, self.labels.device)
        return self.images[on_device], self.labels[on_device], positions

    def loader(self, **batches: Any) -> DataLoader[Any]:
        """Batches of `batch_size` images in order, or of the indices (B,) in `batch_sampler`."""
        return DataLoader(
            self,
            collate_fn=tuple,
            num_workers=self.workers,
            worker_init_fn=outlive_stops,
            **batches,
        )

    def first(self, count: int) -> Tensor:
        """The first images, normalized: float32 (count, C, H, W)"""
        images, *_ = self.__getitems__(np.arange(min(count, len(self))))
        return self.input_format.normalize(torch.as_tensor(images))


class StreamedSplit(Split):
    """Rows of a table, decoded by worker processes each time they are read. Batches hold NumPy arrays.

    Images become uint8 (C, H, W) of the model's size and color, resized and cropped as in timm's evaluation.
    """

    def __init__(
        self,
        data: LabeledImages,
        table: str,
        rows: np.ndarray,
        input_format: InputFormat,
        workers: int,
    ) -> None:
        self.source = data.images[table]
        self.rows = rows
        self.labels = torch.from_numpy(data.labels[table][rows])
        self.input_format = input_format
        self.workers = workers
        if workers < 0:
            self.workers = max(1, _cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        if multiprocessing.current_process().daemon:  # which may not have processes of its own
            self.workers = 0

    def __getitems__(self, indices: list[int] | np.ndarray) -> tuple[Any, Any, Any]:
        # torch would send tensors through /dev/shm, which may be too small
        images = [self.read(row).numpy() for row in self.rows[indices].tolist()]
        return np.stack(images), self.labels.numpy()[indices], np.array(indices)

    def read(self, row: int) -> Tensor:
        """Decode one image of the table. Raises UnreadableImage."""
        with self.source.naming(row):
            return self.input_format.resized(self.source[row])

    def kept(self, device: torch.device, unreadable: list[str]) -> Split:
        """The same split, decoded now and kept on a device. Appends unreadable images to a list."""
        images = torch.empty((len(self), *self.input_format.input_size), dtype=torch.uint8)
        rows: Any = self.rows.tolist()
        workers = self.workers if len(rows) > MANY else 0
        found = DataLoader(rows, None, collate_fn=self._try_to_read, num_workers=workers)
        with shown(rows, "decoding") as progress:
            for position, (_, image) in enumerate(zip(progress, found, strict=True)):
                if isinstance(image, str):
                    unreadable.append(image)
                else:
                    images[position] = torch.from_numpy(image)
        return Split(images.to(device), self.labels.numpy(), self.input_format)

    def _try_to_read(self, row: Any) -> np.ndarray | str:
        """An image, or the reason why it cannot be read."""
        try:
            return self.read(row).numpy()
        except UnreadableImage as error:
            return str(error)


def outlive_stops(_: int) -> None:
    """Keep a worker alive: queues and terminals signal all processes of a run, which then saves a checkpoint."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    # torch ends a hanging worker by SIGTERM, so it is delayed: by as long as SLURM waits before it kills
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(30))


def _cores() -> int:
    """Cores available to this process, or all cores if the system does not tell."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def fits(images: int, input_format: InputFormat) -> bool:
    """Whether so many decoded images stay on the device."""
    return images * math.prod(input_format.input_size) <= KEPT_BYTES


def splits_of(
    data: LabeledImages,
    rows: Rows,
    input_format: InputFormat,
    device: torch.device,
    workers: int = -1,
    augmentation: str = "",
    never_kept: Collection[str] = (),
) -> Mapping[str, Split]:
    """The splits with these rows, decoded and kept on the device if they are small, except those `never_kept`.

    Prints a report of them first, which ends with `augmentation`. Raises ValueError without test images, or with the
    list of unreadable images. If the splits are too large to keep and have many images, none is read yet.
    """
    if not len(rows["test"][1]):
        raise ValueError(
            f"data.name: got {data.name} without test images, expected a test split, or more images, of which a "
            "fifth become one"
        )
    channels, height, width = input_format.input_size
    images = sum(len(own) for _, own in rows.values())
    kept = rows.keys() - never_kept if fits(images, input_format) else set()
    all_kept = kept == rows.keys()
    report = shared(partial(report_of, data, rows, decode=images <= MANY and not all_kept))
    report.input = f"resized and cropped to {height}x{width} (data.image_size), {channels} channels{augmentation}"
    say(report.text())
    if workers:
        try:
            multiprocessing.Queue().close()
        except OSError as error:
            if not all_kept:
                raise ValueError(
                    f"data.workers: got {workers}, expected 0, as /dev/shm cannot be used: {error}"
                ) from error
            workers = 0
    streamed = {
        name: StreamedSplit(data, *own, input_format, workers) for name, own in rows.items()
    }
    splits: dict[str, Split] = {**streamed}
    unreadable = [] if all_kept else report.unreadable
    for name in kept:
        splits[name] = streamed[name].kept(device, unreadable)
    refuse_unreadable(list(dict.fromkeys(unreadable)))
    return splits


def refuse_unreadable(images: Sequence[str]) -> None:
    if images:
        named = "\n".join(images)
        raise ValueError(f"data.name: got {len(images)} images that cannot be read: {named}")
