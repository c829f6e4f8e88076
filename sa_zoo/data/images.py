"""Labeled images in tables: read, named and compared without decoding pixels."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b, sha256
from io import BytesIO
from pathlib import Path
from typing import Any

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
    def hashes(self) -> np.ndarray:
        """Hashes of the bytes of all images, read once: uint64 (N,)."""
        with shown(range(len(self.table)), "reading") as rows:
            found = [blake2b(self.content(row), digest_size=8).digest() for row in rows]
        return np.frombuffer(b"".join(found), "<u8")

    def names_and_sizes(self) -> list[tuple[str, int]]:
        """The file name of each image, if it has one, and its size in bytes. Reads no image."""
        stored = self.table.data.column(self.column)
        paths = pc.struct_field(stored, "path").to_pylist()
        sizes = pc.binary_length(pc.struct_field(stored, "bytes")).to_pylist()
        return [
            (Path(path or "").name, Path(path).stat().st_size if path and size is None else size)
            for path, size in zip(paths, sizes, strict=True)
        ]


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


def digest_of(data: LabeledImages) -> dict[str, Any]:
    """Images per split and class, and a hash of names, sizes and labels; independent of the location of the data.

    Reads no image, so it misses changed pixels in a file of the same size.
    """
    images: Counter[str] = Counter()
    everything: list[Any] = [data.classes]
    for split, labels in sorted(data.labels.items()):
        images.update(f"{split} images of {data.classes[label]}" for label in labels.tolist())
        everything += [split, labels.tolist(), data.images[split].names_and_sizes()]
    text = repr(everything).encode(errors="surrogatepass")
    return {"images": images, "hash": sha256(text).hexdigest()}


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The differences between two digests, in words."""
    had, has = Counter(before["images"]), Counter(now["images"])
    found = [f"{has[key]} {key}, not {had[key]}" for key in sorted((had - has) | (has - had))]
    return listed(found) or "images of other names or sizes, or in another order"
