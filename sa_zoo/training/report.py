"""What was understood of a data set, for people to read before anything is trained or measured on it."""

import sys
from collections import Counter
from collections.abc import Mapping
from functools import partial
from multiprocessing.pool import ThreadPool

import numpy as np
from accelerate import PartialState
from pydantic import BaseModel

from sa_zoo.folders.check import listed
from sa_zoo.training.config import AugmentConfig
from sa_zoo.training.pictures import size_of_picture
from sa_zoo.training.progress import MANY, shown
from sa_zoo.training.sources import Images, Source
from sa_zoo.training.splits import (
    StreamedSplit,
    UnreadableImage,
    are_small,
    name_of,
    naming,
    refuse_unreadable,
)

SHOWN = 3  # classes at either end
Rows = Mapping[str, tuple[str, np.ndarray]]  # split -> (table of the source, rows of that table)


class Report(BaseModel):
    name: str
    classes: list[str]  # in their order
    input: str  # what becomes of an image
    skipped: dict[str, int] = {}  # files by "KIND in PLACE"
    origins: dict[str, str] = {}  # by split
    images: dict[str, list[int]] = {}  # per class, by split
    sizes: dict[str, int] = {}  # images by WIDTHxHEIGHT
    unreadable: list[str] = []
    same: list[str] = []  # images of other splits with the bytes of a training image

    def text(self) -> str:
        """A few lines, whatever the number of classes, places and sizes."""
        total = sum(map(sum, self.images.values()))
        names = [f"{number} {name}" for number, name in enumerate(self.classes)]
        if len(names) > 2 * SHOWN:
            names[SHOWN:-SHOWN] = ["..."]
        lines = [
            f"data: {self.name}, {total} images, {len(self.classes)} classes: {', '.join(names)}"
        ]
        for split, counts in self.images.items():
            if any(counts):
                order = sorted(zip(counts, self.classes, strict=True))
                ends = " to ".join(f"{count} ({name})" for count, name in (order[0], order[-1]))
                origin = self.origins[split]
                lines.append(f"{split}: {sum(counts)} images from {origin}; {ends} per class")
                if not order[0][0]:
                    missing = [name for count, name in order if not count]
                    lines.append(f"no {split} images: {listed(missing)}")
        details = {
            "sizes": _counted(self.sizes),
            "input": self.input,
            "skipped": _counted(self.skipped),
            "same bytes as a training image": listed(self.same),
            "unreadable": len(self.unreadable),
        }
        lines += [f"{key}: {value}" for key, value in details.items() if value]
        if ".hei" in " ".join(self.skipped):
            lines.append("pip install pillow-heif to read HEIC")
        return "\n  ".join(lines)


def _counted(counts: Mapping[str, int]) -> str:
    return listed([f"{name} ({count})" for name, count in Counter(counts).most_common()])


def report_of(source: Source, rows: Rows, decode: bool = True, input_text: str = "") -> Report:
    """Look at every image: `decode` them, or read their headers only."""
    report = Report(name=source.name, classes=list(source.classes), input=input_text)
    report.skipped = dict(source.skipped)
    looks: Counter[tuple[str, str]] = Counter()
    trained = np.empty(0, np.uint64)
    if "train" in rows and (decode or are_few(rows)):
        table, own = rows["train"]
        trained = source.images[table].hashes[own]
    for split, (table, own) in rows.items():
        images, labels = source.images[table], source.labels[table]
        held_out = ", held out" if split != table and len(own) < len(labels) else ""
        report.origins[split] = f"{source.origins.get(table, table)}{held_out}"
        counts = np.bincount(labels[own], minlength=len(source.classes))
        report.images[split] = counts.tolist()
        with ThreadPool() as pool, shown(own.tolist(), f"checking {split}") as progress:
            found = pool.imap(partial(_look, images, table, decode), own.tolist())
            looks.update(next(found) for _ in progress)
        if split != "train" and len(trained):
            same = own[np.isin(images.hashes[own], trained)]
            report.same += [name_of(images, table, row) for row in same.tolist()]
    report.sizes = {size: count for (size, _), count in looks.items() if size}
    report.unreadable = [fault for _, fault in looks if fault]
    return report


def are_few(rows: Rows) -> bool:
    """Whether looking at every byte of the images takes little time."""
    return sum(len(own) for _, own in rows.values()) <= MANY


def _look(images: Images, table: str, decode: bool, row: int) -> tuple[str, str]:
    """Size of an image, or why it cannot be read."""
    try:
        with naming(images, table, row):
            width, height = images[row].size if decode else size_of_picture(images.file(row))
    except UnreadableImage as error:
        return "", str(error)
    return f"{width}x{height}", ""


def check_data(
    source: Source, splits: Mapping[str, StreamedSplit], augment: AugmentConfig | None = None
) -> None:
    """Print the report of the images that a run reads. Raises ValueError with every image that cannot be read.

    Images that will be kept are decoded then, and those that cannot be read are reported then.
    """
    rows = {name: (split.table, split.rows) for name, split in splits.items()}
    channels, height, width = next(iter(splits.values())).input_size
    text = f"resized and cropped to {height}x{width} (data.image_size), {channels} channels"
    if augment:
        changes = augment.model_dump(exclude_defaults=True)
        text += f"; training images also by {changes or 'nothing'} (augment)"
    small = are_small(splits)
    decode = are_few(rows) and not small
    report = report_of(source, rows, decode, text)
    if PartialState().is_main_process:
        print(report.text(), file=sys.stderr, flush=True)
    if not small:
        refuse_unreadable(report.unreadable)
