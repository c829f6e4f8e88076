"""What was understood of a data set, for people to read before anything is trained or measured on it."""

import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import blake2b
from multiprocessing.pool import ThreadPool

import numpy as np
from accelerate import PartialState
from pydantic import BaseModel

from sa_zoo.training.config import AugmentConfig
from sa_zoo.training.pictures import size_of_picture
from sa_zoo.training.progress import MANY, shown
from sa_zoo.training.sources import Images, Source
from sa_zoo.training.splits import StreamedSplit

SIZE = "%dx%d"  # width, height
LISTED = 3  # items of a long list
HEIC = {".heic", ".heif", ".hif"}
Rows = Mapping[str, tuple[str, np.ndarray]]  # split -> (table of the source, rows of that table)


class Report(BaseModel):
    name: str
    classes: list[str]  # in their order
    skipped: dict[str, int]  # files by "KIND in PLACE"
    decoded: bool  # all images, for what is unreadable or the same; otherwise headers were read
    input: str = ""  # what becomes of an image
    origins: dict[str, str] = {}  # by split
    images: dict[str, list[int]] = {}  # per class, by split
    sizes: dict[str, int] = {}  # images by WIDTHxHEIGHT
    unreadable: list[str] = []
    same: list[str] = []  # images with the same bytes in training and another split

    def text(self) -> str:
        """A few lines, whatever the number of classes, places and sizes."""
        total = sum(map(sum, self.images.values()))
        names = [f"{number} {name}" for number, name in enumerate(self.classes)]
        if len(names) > 2 * LISTED:
            names[LISTED:-LISTED] = ["..."]
        lines = [
            f"data: {self.name}, {total} images, {len(self.classes)} classes: {', '.join(names)}"
        ]
        for split, counts in self.images.items():
            lines += self._lines_of(split, np.array(counts))
        lines.append(f"  sizes: {self._sizes()}")
        if self.input:
            lines.append(f"  input: {self.input}")
        if self.skipped:
            lines.append(f"  skipped: {self._skipped()}")
        if self.same:
            lines.append(f"  same bytes in two splits: {len(self.same)}: {_listed(self.same)}")
        if self.unreadable:
            lines.append(f"  unreadable: {len(self.unreadable)}")
        if not self.decoded:
            lines.append("  only headers were read; `sa-zoo data` decodes every image")
        return "\n".join(lines)

    def _lines_of(self, split: str, counts: np.ndarray) -> list[str]:
        if not counts.any():
            return []
        least, most = int(counts.argmin()), int(counts.argmax())
        smallest, largest = self.classes[least], self.classes[most]
        line = f"  {split}: {counts.sum()} images, {self.origins[split]}; {counts[least]}"
        if counts[least] < counts[most]:
            line += f" ({smallest}) to {counts[most]} ({largest})"
        line += " per class"
        missing = [self.classes[number] for number in np.flatnonzero(counts == 0)]
        if not missing:
            return [line]
        return [line, f"  no {split} images: {_listed(missing)}"]

    def _sizes(self) -> str:
        order = sorted(
            self.sizes, key=lambda size: np.prod([int(side) for side in size.split("x")])
        )
        if len(order) < 2:
            return ", ".join(order)
        usual = max(order, key=self.sizes.__getitem__)
        return f"{order[0]} to {order[-1]}, most often {usual} ({self.sizes[usual]})"

    def _skipped(self) -> str:
        places = defaultdict(list)
        counts: Counter[str] = Counter()
        for key, count in self.skipped.items():
            kind, _, place = key.partition(" in ")
            counts[kind] += count
            places[kind].append(place)
        parts = []
        for kind, count in counts.most_common():
            where = f" in {_listed(places[kind])}" if places[kind] != [""] else ""
            hint = " (pip install pillow-heif to read them)" if kind in HEIC else ""
            parts.append(f"{count} {kind}{where}{hint}")
        return _listed(parts)


def _listed(items: Sequence[str]) -> str:
    more = f" and {len(items) - LISTED} more" if len(items) > LISTED else ""
    return ", ".join(items[:LISTED]) + more


def report_of(
    source: Source, rows: Rows, decode: bool | None = None, input_text: str = ""
) -> Report:
    """Look at every image: `decode` them all, or read headers only (default: decode unless they are many)."""
    if decode is None:
        decode = sum(len(own) for _, own in rows.values()) <= MANY
    report = Report(
        name=source.name,
        classes=list(source.classes),
        skipped=dict(source.skipped),
        decoded=decode,
        input=input_text,
    )
    trained: dict[bytes, str] = {}
    for split, (table, own) in rows.items():
        origin = source.origins.get(table, table)
        report.origins[split] = origin if split == table else f"held out from {origin}"
        counts = np.bincount(source.labels[table][own], minlength=len(source.classes))
        report.images[split] = counts.tolist()
        images = source.images[table]
        with ThreadPool() as pool, shown(own.tolist(), f"checking {split}") as progress:
            looks = pool.imap(partial(_look, images, decode), own.tolist())
            for row in progress:
                size, digest, error = next(looks)
                name = images.path(row) or f"image {row} of the {table} split"
                if error:
                    report.unreadable.append(f"{name}: {error}")
                    continue
                report.sizes[size] = report.sizes.get(size, 0) + 1
                if split == "train" and digest:
                    trained[digest] = name
                elif digest in trained:
                    report.same.append(f"{name} = {trained[digest]}")
    return report


def _look(images: Images, decode: bool, row: int) -> tuple[str, bytes, str]:
    """Size, digest of the bytes if decoded, and why it cannot be read."""
    try:
        if not decode:
            return SIZE % size_of_picture(images.file(row)), b"", ""
        return SIZE % images[row].size, blake2b(images.content(row)).digest(), ""
    except Exception as error:  # Pillow raises many types
        return "", b"", " ".join(str(error).split()) or type(error).__name__


def check_data(
    source: Source, splits: Mapping[str, StreamedSplit], augment: AugmentConfig | None = None
) -> None:
    """Print the report of the images that a run reads. Raises ValueError with every image that cannot be read."""
    rows = {name: (split.table, split.rows) for name, split in splits.items()}
    channels, height, width = next(iter(splits.values())).input_size
    text = f"resized and cropped to {height}x{width} (data.image_size), {channels} channels"
    if augment:
        changes = augment.model_dump(exclude_defaults=True)
        words = [f"{key} {value}".removesuffix(" True") for key, value in changes.items()]
        text += f"; training images also by {', '.join(words) or 'nothing'} (augment)"
    report = report_of(source, rows, input_text=text)
    if PartialState().is_main_process:
        print(report.text(), file=sys.stderr, flush=True)
    refuse_unreadable(report)


def refuse_unreadable(report: Report) -> None:
    if report.unreadable:
        raise ValueError(
            f"data.name: got {report.name} with {len(report.unreadable)} images that cannot be read, expected "
            "none:\n" + "\n".join(report.unreadable)
        )
