"""Labeled images by name: a folder, a Hub data set, or the digits of scikit-learn. Opening one decodes no pixels."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
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

from sa_zoo.folders.check import did_you_mean
from sa_zoo.training.config import DataConfig
from sa_zoo.training.picture_folder import SPLIT_WORDS, Found, table_of, tables_in
from sa_zoo.training.pictures import MODES, open_picture

MOST_CLASSES = 2**16  # of a data set without names for them; ImageNet-21k has 21,841


@dataclass(frozen=True)
class Images:
    """The images of a table. Files are read from its column as it is stored: `datasets` decodes what it selects."""

    table: datasets.Dataset
    column: str
    mode: str | None  # that the data set asks for

    def __getitem__(self, row: int) -> Image.Image:
        picture = open_picture(self.file(row))
        return picture.convert(self.mode) if self.mode in MODES else picture

    def file(self, row: int) -> Path | BytesIO:
        """The file of an image, or its bytes."""
        stored = self._stored(row)
        return Path(stored["path"]) if stored["bytes"] is None else BytesIO(stored["bytes"])

    def path(self, row: int) -> str:
        """The file of an image, if it has one to itself."""
        stored = self._stored(row)
        return stored["path"] if stored["bytes"] is None else ""

    def content(self, row: int) -> bytes:
        """An image as it is stored."""
        file = self.file(row)
        return file.read_bytes() if isinstance(file, Path) else file.getvalue()

    def names_and_sizes(self) -> Iterator[tuple[str, int]]:
        """The file name of each image, if it has one, and its size in bytes. Reads no image."""
        column = self.table.data.column(self.column)
        paths = pc.struct_field(column, "path").to_pylist()
        sizes = pc.binary_length(pc.struct_field(column, "bytes")).to_pylist()
        for path, size in zip(paths, sizes, strict=True):
            if path and size is None:
                size = Path(path).stat().st_size
            yield path or "", size or 0

    def _stored(self, row: int) -> Any:
        stored = self.table.data.column(self.column)[row].as_py()
        # no image at all is an empty one, which cannot be read
        return stored if stored and any(stored.values()) else {"bytes": b"", "path": None}


@dataclass(frozen=True)
class Source:
    """Images and labels (N,) per split, and the names of the classes.

    "train" is always there, empty if there is none; "validation" and "test" only if the data have them.
    """

    name: str
    images: Mapping[str, Any]  # Images, or another sequence of PIL images
    labels: Mapping[str, np.ndarray]
    classes: tuple[str, ...]
    origins: Mapping[str, str] = field(default_factory=dict)  # by split, such as "folder val/"
    skipped: Mapping[str, int] = field(default_factory=dict)  # files by "KIND in PLACE"


def open_source(config: DataConfig) -> Source:
    """The Source of a config. Raises FileNotFoundError if there is none, ValueError if it has no usable labels."""
    folder = _folder(config)
    asked = {split: getattr(config, f"{split}_split") for split in SPLIT_WORDS}
    found = _found(config, folder, filter(None, asked.values()))
    chosen = _chosen(found.tables, config.name, asked)
    tables = {split: found.tables[name] for split, name in chosen.items()}
    tables.setdefault("train", next(iter(tables.values())).select([]))
    image, label = _columns(tables["train"].features, config)
    names = _class_names(tables, label)
    images = {}
    labels = {}
    for split, table in tables.items():
        images[split] = _images(table, image, folder)
        where = f"{config.name}, split {chosen.get(split, split)}"
        labels[split] = _class_numbers(table[label][:], names, where, split)
    if not names:
        classes = 1 + max(numbers.max(initial=0) for numbers in labels.values())
        names = [*map(str, range(classes))]
    origins = {split: found.origins[name] for split, name in chosen.items()}
    skipped = dict(found.skipped)
    for name in found.tables.keys() - chosen.values():
        skipped[f"images of split {name}"] = len(found.tables[name])
    title = config.title or (folder.name if folder else config.name)
    return Source(title, images, labels, tuple(names), origins, skipped)


def _found(config: DataConfig, folder: Path | None, splits: Iterable[str]) -> Found:
    if folder:
        return tables_in(folder, splits)
    return _digits() if config.name == "digits" else _from_hub(config)


def _images(table: datasets.Dataset, column: str, folder: Path | None) -> Images:
    if not isinstance(table.features[column], datasets.Image):
        table = table.cast_column(column, datasets.Image())
    if folder:
        _check_inside(folder, table.data.column(column))
    return Images(table, column, table.features[column].mode)


def _digits() -> Found:
    """1,797 handwritten digits of 8x8 pixels (Alpaydin and Kaynak 1998, UCI), in 17 gray levels."""
    pixels, labels = load_digits(return_X_y=True)
    pixels = (pixels.reshape(-1, 8, 8) * (255 / 16)).round().astype(np.uint8)
    # as PGM, whose bytes are the same with any version of Pillow
    images = [{"bytes": b"P5 8 8 255\n" + x.tobytes(), "path": None} for x in pixels]
    table = table_of(images, labels)
    return Found({"train": table}, {"train": "scikit-learn"}, {})


def _folder(config: DataConfig) -> Path | None:
    """The folder of a config, without links and ".." in its path; None for a data set of the Hub."""
    name = config.name
    path = Path(os.path.expanduser(name))  # noqa: PTH111  Path raises for an unknown user
    if config.config and path.is_dir():
        name = f"{name}/{config.config}"
        path /= config.config
    if path.is_dir():
        return path.resolve()
    # a Hub name is NAME or OWNER/NAME; anything else is meant as a folder, as is a name in one that exists
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
    offline: Exception | None = None
    try:
        is_there = repo_exists(name, repo_type="dataset")
    except Exception as error:  # of many types
        offline = error
    if not is_there:
        raise FileNotFoundError(
            f"{none_here}, nor a data set of the Hub, where names are OWNER/NAME as in uoft-cs/cifar10 (for private "
            "ones set HF_TOKEN)"
        )
    before = datasets.config.HF_HUB_OFFLINE
    try:
        # without a network, look into the cache at once, not after six attempts to connect
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
        # `datasets` lists the configurations if one has to be chosen
        key = "data.config" if "available" in str(error).lower() else "data.name"
        cause = error.__cause__ or error
        raise ValueError(
            f"{key}: got {getattr(config, key[5:])!r} for {name}, expected a data set of images that can be read: "
            f"{type(cause).__name__}: {cause}"
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = before
    by_name = {str(split): table for split, table in tables.items()}
    return Found(by_name, {split: f"split {split} on the Hub" for split in by_name}, {})


def _check_inside(folder: Path, images: Any) -> None:
    """Raise ValueError if a column of images refers to a file that is not in the folder."""
    for chunk in images.chunks:
        for path in chunk.field("path").filter(chunk.field("bytes").is_null()).to_pylist():
            if path and not Path(os.path.normpath(path)).is_relative_to(folder):
                raise ValueError(
                    f"data.name: got {folder}, which refers to {path}, expected images inside of it"
                )


def _chosen(found: Mapping[str, Any], name: str, asked: Mapping[str, str]) -> dict[str, str]:
    """The name of each split among those found: as asked for, or a usual one."""
    names = ", ".join(found)
    chosen = {split: given for split, given in asked.items() if given}
    for split, given in chosen.items():
        if given not in found:
            raise ValueError(f"data.{split}_split: got {given}, expected one of {names}")
    for split, usual in SPLIT_WORDS.items():
        free = [each for each in found if each not in chosen.values() and each.lower() in usual]
        if free:
            chosen.setdefault(split, min(free, key=lambda each: usual.index(each.lower())))
    if "test" not in chosen and "validation" in chosen and not asked["validation"]:
        chosen["test"] = chosen.pop("validation")
    if not chosen.keys() & {"train", "test"}:
        expected = "train or test, or data.train_split and data.test_split"
        raise ValueError(f"data.name: got {name} with splits {names}, expected {expected}")
    return chosen


def _columns(features: Mapping[str, Any], config: DataConfig) -> tuple[str, str]:
    """The column of images and that of labels: as the config says, or the only one of class labels, or a usual name."""
    names = ", ".join(features)
    got = f"data.name: got {config.name} with columns {names}"
    images = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    # bytes, or a dict of them, as pandas writes them
    images = images or [name for name, feature in features.items() if "binary" in str(feature)]
    if len(images) != 1:
        raise ValueError(f"{got}, expected one of images")
    labels = [name for name in features if isinstance(features[name], datasets.ClassLabel)]
    if config.label_column:
        labels = [config.label_column]
    elif len(labels) != 1:
        labels = [name for name in ("label", "labels", "fine_label") if name in features]
    if not labels:
        raise ValueError(f"{got}, expected labels, or data.label_column")
    kind = features.get(labels[0])
    if not isinstance(kind, datasets.ClassLabel | datasets.Value):
        expected = f"one of {names}, with one class per image"
        got = f"{labels[0]} of {kind}" if kind else labels[0]
        raise ValueError(f"data.label_column: got {got}, expected {expected}")
    return images[0], labels[0]


def _class_names(tables: Mapping[str, Any], label: str) -> list[str] | None:
    """The names that the data have, or the texts of all splits; none for numbers."""
    feature = tables["train"].features[label]
    if not feature.dtype.endswith("string"):
        return getattr(feature, "names", None)
    # class_encode_column would sort 1, 10, 2, and look at one split only
    texts = {text for table in tables.values() for text in table.unique(label) if text}
    return sorted(sorted(texts), key=natural_key)


def _class_numbers(
    values: list[Any], names: list[str] | None, where: str, split: str
) -> np.ndarray:
    """Labels (N,). Raises ValueError for images without a class or with one that is too large."""
    bound = len(names) if names else MOST_CLASSES
    numbers = {name: number for number, name in enumerate(names or ())}
    values = [numbers.get(value, value) for value in values]
    wrong = [value for value in values if not isinstance(value, int) or not 0 <= value < bound]
    if wrong:
        raise ValueError(
            f"data.name: got class {wrong[0]} in {where}, expected a number from 0 to {bound - 1} ({len(wrong)} of "
            f"{len(values)} images; where labels are hidden, choose another split as data.{split}_split)"
        )
    return np.array(values, np.int64)
