"""Labeled images by name: a folder, a Hub data set, or the digits of scikit-learn. Opening one decodes no pixels."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b, sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
from huggingface_hub import repo_exists
from PIL import Image
from sklearn.datasets import load_digits
from timm.utils import natural_key

from sa_zoo.data.picture_folder import SPLIT_WORDS, Found, table_of, tables_in
from sa_zoo.data.pictures import open_picture
from sa_zoo.folders.messages import did_you_mean, listed
from sa_zoo.training.config import DataConfig
from sa_zoo.training.progress import shown

LABELS = (datasets.ClassLabel, datasets.Value)
Rows = dict[str, tuple[str, np.ndarray]]  # split -> (table of a Source, rows of that table)
MOST_NUMBERED = 2**16  # classes of a data set without names for them; ImageNet-21k has 21,841


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
        return open_picture(self.file(row))

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
        path = self.path(row)
        image = f"image {row} of the {self.split} split"
        return f"{path}, {image}" if path else image

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
class Source:
    """Images and labels (N,) per split, and the names of the classes.

    "train" is always present, if need be empty; "validation" and "test" only if the data have them.
    """

    name: str
    images: Mapping[str, Images]
    labels: Mapping[str, np.ndarray]
    classes: tuple[str, ...]
    origins: Mapping[str, str] = field(default_factory=dict)  # by split, such as "folder val/"
    skipped: Mapping[str, int] = field(default_factory=dict)  # files by "KIND in PLACE"


def open_source(config: DataConfig) -> Source:
    """The Source of a config. Raises FileNotFoundError if there is none, ValueError if it has no usable labels."""
    folder = _folder(config)
    if folder:
        found, origins, skipped = tables_in(folder)
    else:
        found, origins, skipped = _digits() if config.name == "digits" else _from_hub(config)
    chosen = _chosen(found, config)
    tables = {split: found[name] for split, name in chosen.items()}
    tables.setdefault("train", next(iter(tables.values())).select([]))
    image, label = _columns(tables["train"].features, config)
    names = _class_names(tables, label)
    numbers: dict[Any, int] = {}
    for number, name in enumerate(names):
        numbers |= {name: number, number: number}
    labels = {}
    for split, table in tables.items():
        values = table[label][:]
        wrong = [value for value in values if value not in numbers]
        if wrong:
            raise ValueError(
                f"data.name: got class {wrong[0]} in {config.name}, split {chosen[split]}, expected a number from 0 to "
                f"{len(names) - 1} ({len(wrong)} of {len(values)} images; where labels are hidden, choose another "
                f"split as data.{split}_split)"
            )
        labels[split] = np.array([numbers[value] for value in values], np.int64)
    others = found.keys() - chosen.values()
    return Source(
        config.title or (folder.name if folder else config.name),
        {split: _images(table, image, split, folder) for split, table in tables.items()},
        labels,
        tuple(names),
        {split: origins[name] for split, name in chosen.items()},
        {**skipped, **{f"images of split {name}": len(found[name]) for name in others}},
    )


def digest_of(source: Source) -> dict[str, Any]:
    """Images per split and class, and a hash of names, sizes and labels; independent of the location of the data.

    Reads no image, so it misses changed pixels in a file of the same size.
    """
    images: Counter[str] = Counter()
    everything: list[Any] = [source.classes]
    for split, labels in sorted(source.labels.items()):
        images.update(f"{split} images of {source.classes[label]}" for label in labels.tolist())
        everything += [split, labels.tolist(), source.images[split].names_and_sizes()]
    text = repr(everything).encode(errors="surrogatepass")
    return {"images": images, "hash": sha256(text).hexdigest()}


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The differences between two digests, in words."""
    had, has = Counter(before["images"]), Counter(now["images"])
    found = [f"{has[key]} {key}, not {had[key]}" for key in sorted((had - has) | (has - had))]
    return listed(found) or "images of other names or sizes, or in another order"


def _images(table: datasets.Dataset, column: str, split: str, folder: Path | None) -> Images:
    """Raises ValueError if the column refers to a file outside the folder."""
    if not isinstance(table.features[column], datasets.Image):
        table = table.cast_column(column, datasets.Image())
    stored = table.data.column(column)
    paths = pc.struct_field(stored, "path").filter(pc.struct_field(stored, "bytes").is_null())
    for path in filter(None, paths.to_pylist()):
        if folder and not Path(os.path.normpath(path)).is_relative_to(folder):
            raise ValueError(
                f"data.name: got {folder}, which refers to {path}, expected images inside of it"
            )
    return Images(table, column, split)


def _digits() -> Found:
    """1,797 handwritten digits of 8x8 pixels (Alpaydin and Kaynak 1998, UCI), in 17 gray levels."""
    pixels, labels = load_digits(return_X_y=True)
    pixels = (pixels.reshape(-1, 8, 8) * (255 / 16)).round().astype(np.uint8)
    # PGM: the same bytes with any version of Pillow
    images = [{"bytes": b"P5 8 8 255\n" + x.tobytes(), "path": None} for x in pixels]
    table = table_of(images, labels)
    return {"train": table}, {"train": "scikit-learn"}, {}


def _folder(config: DataConfig) -> Path | None:
    """The resolved folder of a config; None for a data set of the Hub."""
    name = config.name
    path = Path(os.path.expanduser(name))  # noqa: PTH111  Path raises for an unknown user
    if config.config and path.is_dir():
        name = f"{name}/{config.config}"
        path /= config.config
    if path.is_dir():
        return path.resolve()
    # a Hub name is NAME or OWNER/NAME; anything else is a folder, and so is a name in an existing folder
    is_hub_name = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name)
    if path.exists() or not is_hub_name or ("/" in name and path.parent.is_dir()):
        raise FileNotFoundError(
            f"data.name: got {name}, expected a folder of images or of parquet files{_near(path)}"
        )
    return None


def _near(path: Path) -> str:
    with suppress(OSError):
        return did_you_mean(path.name, [other.name for other in path.parent.iterdir()])
    return ""


def _from_hub(config: DataConfig) -> Found:
    name = config.name
    none_here = f"data.name: got {name}, and there is no such folder here{_near(Path(name))}"
    is_there = True
    offline = None
    try:
        is_there = repo_exists(name, repo_type="dataset")
    except Exception as error:  # of many types
        offline = error
    if not is_there:
        raise FileNotFoundError(
            f"{none_here}, nor a data set of the Hub, where names are OWNER/NAME (for private ones set HF_TOKEN)"
        )
    before = datasets.config.HF_HUB_OFFLINE
    try:
        # without a network, use the cache at once, not after six attempts to connect
        datasets.config.HF_HUB_OFFLINE = before or bool(offline)
        tables = datasets.load_dataset(
            name, config.config or None, revision=config.revision or None
        )
    except OSError as error:
        raise FileNotFoundError(
            f"{none_here}; as a data set of the Hub (OWNER/NAME), {name} is not cached here and could not be "
            f"downloaded ({offline or error}). With a network, run once to fill {datasets.config.HF_DATASETS_CACHE}. "
            f"Without one, download the parquet files of https://huggingface.co/datasets/{name} elsewhere, put them "
            f"into a folder here as train-*.parquet and test-*.parquet, for example data/{name.split('/')[-1]}, and "
            "set data.name to that folder"
        ) from error
    except Exception as error:  # of any type
        # `datasets` lists the configurations if it needs one
        key = "data.config" if "available" in str(error).lower() else "data.name"
        cause = error.__cause__ or error
        raise ValueError(
            f"{key}: got {getattr(config, key[5:])!r} for {name}, expected a data set of images that can be read: "
            f"{type(cause).__name__}: {cause}"
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = before
    by_name = {str(split): table for split, table in tables.items()}
    return by_name, {split: f"split {split} on the Hub" for split in by_name}, {}


def _chosen(found: Mapping[str, Any], config: DataConfig) -> dict[str, str]:
    """The name of each split among those found: the configured one, or a usual one."""
    asked = {split: getattr(config, f"{split}_split") for split in SPLIT_WORDS}
    free = {each.lower(): each for each in found if each not in asked.values()}
    chosen = {split: each for split, each in asked.items() if each}
    for split, usual in SPLIT_WORDS.items():
        for word in usual:
            if word in free:
                chosen.setdefault(split, free[word])
    if "test" not in chosen and "validation" in chosen and not asked["validation"]:
        chosen["test"] = chosen.pop("validation")
    if not chosen.keys() & {"train", "test"} or not set(found).issuperset(chosen.values()):
        raise ValueError(
            f"data: got {config.name} with splits {', '.join(found)}, expected train or test, or data.train_split and "
            "data.test_split among them"
        )
    return chosen


def _columns(features: Mapping[str, Any], config: DataConfig) -> tuple[str, str]:
    """The columns of images and labels. Labels: as configured, or the only ClassLabel, or a usual name."""
    images = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    # bytes, or a dict of them, as pandas writes them
    images = images or [name for name, feature in features.items() if "binary" in str(feature)]
    labels = [name for name in features if isinstance(features[name], datasets.ClassLabel)]
    if len(labels) != 1:
        labels = [name for name in ("label", "labels", "fine_label") if name in features]
    label = config.label_column or [*labels, ""][0]
    if len(images) != 1 or not isinstance(features.get(label), LABELS):
        raise ValueError(
            f"data.label_column: got {label or 'nothing'}, expected one of {', '.join(features)} with one class per "
            f"image, and one of images, in {config.name}"
        )
    return images[0], label


def _class_names(tables: Mapping[str, Any], label: str) -> list[str]:
    """The class names of the data, or the texts in all splits, or numbers."""
    feature = tables["train"].features[label]
    if isinstance(feature, datasets.ClassLabel):
        return feature.names
    # class_encode_column would sort 1, 10, 2, and look at one split only
    values = {value for table in tables.values() for value in table.unique(label)} - {None, ""}
    if feature.dtype.endswith("string"):
        return sorted(sorted(values), key=natural_key)
    return [str(number) for number in range(min(MOST_NUMBERED, 1 + int(max(values, default=0))))]
