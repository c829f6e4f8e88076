"""A report of a data set, to read before training or evaluation on it."""

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from pydantic import BaseModel

from sa_zoo.data.hold_out import Rows
from sa_zoo.data.image_file import size_of_image
from sa_zoo.data.images import Images, LabeledImages, UnreadableImage
from sa_zoo.data.progress import MANY, shown
from sa_zoo.folders.messages import listed

SHOWN_CLASSES = 3  # classes at either end


class Report(BaseModel):
    name: str
    classes: list[str]  # in their order
    input: str = ""  # preprocessing of an image
    skipped: dict[str, int] = {}  # files by "KIND in PLACE"
    origins: dict[str, str] = {}  # by split
    images: dict[str, list[int]] = {}  # per class, by split
    sizes: dict[str, int] = {}  # images by WIDTHxHEIGHT
    unreadable: list[str] = []
    same: list[str] = []  # images of other splits with the bytes of a training image

    def text(self) -> str:
        """A few lines, for any number of classes, places and sizes."""
        total = sum(map(sum, self.images.values()))
        names = [f"{number} {name}" for number, name in enumerate(self.classes)]
        if len(names) > 2 * SHOWN_CLASSES:
            names[SHOWN_CLASSES:-SHOWN_CLASSES] = ["..."]
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


def report_of(data: LabeledImages, rows: Rows, decode: bool) -> Report:
    """Check every image: `decode` it; or read the headers if images are few, otherwise nothing."""
    report = Report(name=data.name, classes=data.classes, skipped=data.skipped)
    looks: Counter[tuple[str, str]] = Counter()
    trained = np.empty(0, np.uint64)
    few = sum(len(own) for _, own in rows.values()) <= MANY
    if "train" in rows and (decode or few):  # hashing reads every byte
        table, own = rows["train"]
        trained = data.images[table].content_hashes[own]
    for split, (table, own) in rows.items():
        images, labels = data.images[table], data.labels[table]
        held_out = (
            f", held out by {data.drawn_by}" if split != table and len(own) < len(labels) else ""
        )
        report.origins[split] = f"{data.origins.get(table, table)}{held_out}"
        report.images[split] = np.bincount(labels[own], minlength=len(data.classes)).tolist()
        if not (decode or few):
            continue
        pool = ThreadPoolExecutor()  # multiprocessing.pool needs /dev/shm
        try:
            found = pool.map(partial(_look, images, decode), own.tolist())
            with shown(own.tolist(), f"checking {split}") as progress:
                looks.update(next(found) for _ in progress)
        finally:
            pool.shutdown(cancel_futures=True)
        if split != "train" and len(trained):
            same = own[np.isin(images.content_hashes[own], trained)]
            report.same += map(images.name, same.tolist())
    report.sizes = {size: count for (size, _), count in looks.items() if size}
    report.unreadable = [fault for _, fault in looks if fault]
    return report


def _look(images: Images, decode: bool, row: int) -> tuple[str, str]:
    """Size of an image and an empty text, or an empty text and the reason why it cannot be read."""
    try:
        with images.naming(row):
            width, height = images[row].size if decode else size_of_image(images.file(row))
    except UnreadableImage as error:
        return "", str(error)
    return f"{width}x{height}", ""
