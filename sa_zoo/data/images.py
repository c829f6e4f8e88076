"""Labeled images in tables: read, named and compared without decoding pixels."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b, sha256
from io import BytesIO
from os.path import commonprefix
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import pyarrow.compute as pc
from PIL import Image

from sa_zoo.data.image_file import open_image
from sa_zoo.data.progress import shown
from sa_zoo.folders.messages import listed


class UnreadableImage(ValueError):
    """Names an unusable image in one line, even after torch adds the traceback of a worker."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.rpartition("UnreadableImage: ")[2].split()))


@dataclass(frozen=True)
class Images:
    """The images of a table, read from the stored column: rows selected by `datasets` would be decoded."""

    table: datasets.Dataset
    column: str
    split: str  # of the table, in messages

    def __getitem__(self, row: int) -> Image.Image:
        return open_image(self.file(row))

    def file(self, row: int) -> Path | BytesIO:
        """The file of an image, or its bytes."""
        stored = self.table.data.column(self.column)[row].as_py() or {"bytes": b""}
        if stored["bytes"] is None and stored["path"]:
            return Path(stored["path"])
        return BytesIO(stored["bytes"] or b"")  # a missing image is empty, and refused later

    def path(self, row: int) -> str:
        """The path of an image in a file of its own; otherwise empty."""
        file = self.file(row)
        return str(file) if isinstance(file, Path) else ""

    def content(self, row: int) -> bytes:
        """The stored bytes of an image."""
        file = self.file(row)
        return file.read_bytes() if isinstance(file, Path) else file.getvalue()

    def name(self, row: int) -> str:
        """The name of an image in messages."""
        return ", ".join(filter(None, [self.path(row), f"image {row} of the {self.split} split"]))

    @contextmanager
    def naming(self, row: int) -> Iterator[None]:
        """Turn any error into an UnreadableImage."""
        try:
            yield
        except Exception as error:
            raise UnreadableImage(f"{self.name(row)}: {error or type(error).__name__}") from error

    @cached_property
    def content_hashes(self) -> np.ndarray:
        """Hashes of the bytes of all images, read once: uint64 (N,)."""
        with shown(range(len(self.table)), "reading") as rows:
            return _hashes(map(self.content, rows))

    @cached_property
    def names(self) -> list[str]:
        """Paths below the folder common to all images; empty for those without one. Reads no image."""
        paths = self._stored("path").to_pylist()
        start = commonprefix(list(filter(None, paths))).rfind("/") + 1  # noqa: RUF071  up to a slash
        return [(path or "")[start:] for path in paths]

    @cached_property
    def sizes(self) -> list[int]:
        """Sizes in bytes. Reads no image."""
        paths = self._stored("path").to_pylist()
        sizes = pc.binary_length(self._stored("bytes")).to_pylist()
        return [
            os.path.getsize(path) if path and size is None else size  # noqa: PTH202  Path is slow
            for path, size in zip(paths, sizes, strict=True)
        ]

    def _stored(self, field: str) -> Any:
        return pc.struct_field(self.table.data.column(self.column), field)


def _hashes(values: Iterable[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(blake2b(x, digest_size=8).digest() for x in values), "<u8")


@dataclass(frozen=True)
class LabeledImages:
    """Images and labels (N,) per split, and the names of the classes.

    "train" is always present, if need be empty; "validation" and "test" only if the data have them.
    """

    name: str
    images: Mapping[str, Images]
    labels: Mapping[str, np.ndarray]
    classes: tuple[str, ...]
    origins: Mapping[str, str] = field(default_factory=dict)  # by split, such as "folder val/"
    skipped: Mapping[str, int] = field(default_factory=dict)  # files by "KIND in PLACE"
    drawn_by: Literal["content", "name"] = "content"  # where images are held out of training

    @cached_property
    def hashes(self) -> np.ndarray:
        """A hash of each training image, which decides whether it is held out: uint64 (N,)"""
        images = self.images["train"]
        if self.drawn_by == "content":
            return images.content_hashes
        return _hashes(map(str.encode, images.names))


def digest_of(data: LabeledImages) -> dict[str, Any]:
    """Images per split and class, a hash of names and labels, and one of these and sizes.

    Independent of the location of the data. Reads no image, so it misses changed pixels in a file of the same size.
    """
    images: Counter[str] = Counter()
    named: list[Any] = [data.classes]
    sizes = []
    for split, labels in sorted(data.labels.items()):
        images.update(f"{split} images of {data.classes[label]}" for label in labels.tolist())
        named += [split, labels.tolist(), data.images[split].names]
        sizes.append(data.images[split].sizes)
    names = _sha256(named)
    return {"images": images, "names": names, "hash": _sha256([names, sizes])}


def _sha256(values: list[Any]) -> str:
    return sha256(repr(values).encode(errors="surrogatepass")).hexdigest()


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The differences between two digests, in words."""
    had, has = Counter(before["images"]), Counter(now["images"])
    found = [f"{has[key]} {key}, not {had[key]}" for key in sorted((had - has) | (has - had))]
    return listed(found) or "images of other names or sizes, or in another order"
