"""Labeled images by name: a Hub data set, a folder, or the digits of scikit-learn. Opening one decodes no pixels.

A folder holds parquet files, in folders or with names that begin with train or test, or images in [SPLIT/]CLASS/.
Nothing else in it is read.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from glob import escape
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
from PIL import Image
from sklearn.datasets import load_digits

from sa_zoo.training.config import DataConfig
from sa_zoo.training.pictures import EXTENSIONS, MODES, open_picture

TEST_SPLITS = ("test", "validation", "valid", "val")
SPLIT = "|".join(("train", *TEST_SPLITS))
MOST_CLASSES = 2**16  # of a data set without names for them; ImageNet-21k has 21,841


@dataclass(frozen=True)
class Images:
    """The images of a table. Files are read from its column as it is stored: `datasets` decodes what it selects."""

    table: datasets.Dataset
    column: str
    mode: str | None  # that the data set asks for

    def __getitem__(self, row: int) -> Image.Image:
        file = self._file(row)
        content = Path(file["path"]) if file["bytes"] is None else BytesIO(file["bytes"])
        picture = open_picture(content)
        return picture.convert(self.mode) if self.mode in MODES else picture

    def path(self, row: int) -> str:
        """The file of an image, if it has one to itself."""
        file = self._file(row)
        return file["path"] if file["bytes"] is None else ""

    def content(self, row: int) -> bytes:
        """An image as it is stored."""
        file = self._file(row)
        return Path(file["path"]).read_bytes() if file["bytes"] is None else file["bytes"]

    def names_and_sizes(self) -> Iterator[tuple[str, int]]:
        """The file name of each image, if it has one, and its size in bytes. Reads no image."""
        column = self.table.data.column(self.column)
        paths = pc.struct_field(column, "path").to_pylist()
        sizes = pc.binary_length(pc.struct_field(column, "bytes")).to_pylist()
        for path, size in zip(paths, sizes, strict=True):
            yield path or "", Path(path).stat().st_size if size is None else size

    def _file(self, row: int) -> Any:
        return self.table.data.column(self.column)[row].as_py()


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
    folder = _folder(config.name)
    found = _digits() if config.name == "digits" else _load(config, folder)
    splits = _train_and_test(found, config.name)
    features = splits["train"].features
    image, label = _columns(features, config)
    names = getattr(features[label], "names", None)
    images = {}
    labels = {}
    for split, table in splits.items():
        if folder:
            _check_inside(folder, table.data.column(image))
        images[split] = Images(table, image, features[image].mode)
        labels[split] = _class_numbers(table[label][:], names, f"{config.name}, split {split}")
    if not names:
        names = map(str, range(1 + max(numbers.max(initial=0) for numbers in labels.values())))
    title = folder.name if folder else config.name
    return Source(config.title or title, images, labels, tuple(names))


def _digits() -> Any:
    """1,797 handwritten digits of 8x8 pixels (Alpaydin and Kaynak 1998, UCI), in 17 gray levels."""
    pixels, labels = load_digits(return_X_y=True)
    pixels = (pixels.reshape(-1, 8, 8) * (255 / 16)).round().astype(np.uint8)
    # as PGM, whose bytes are the same with any version of Pillow
    images = [{"bytes": b"P5 8 8 255\n" + x.tobytes(), "path": None} for x in pixels]
    return {"train": _table(images, labels, list("0123456789"))}


def _table(images: Sequence[Any], labels: Any, names: list[str]) -> datasets.Dataset:
    """Images or their files, and their classes by name or number."""
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=names))
    return datasets.Dataset.from_dict({"image": images, "label": labels}, features)


def _folder(name: str) -> Path | None:
    """The folder of that name, without links and ".." in its path; None for a data set of the Hub."""
    path = Path(os.path.expanduser(name))  # noqa: PTH111  Path raises for an unknown user
    if path.is_dir():
        return path.resolve()
    # a Hub name is NAME or OWNER/NAME; anything else is meant as a folder
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise FileNotFoundError(
            f"data.name: got {name}, expected a folder of images or of parquet files"
        )
    return None


def _load(config: DataConfig, folder: Path | None) -> Any:
    name = config.name
    try:
        if not folder:
            return datasets.load_dataset(name, revision=config.revision or None)
        places = os.walk(folder, followlinks=True)
        files = sorted(f"{place}/{file}" for place, _, names in places for file in names)
        parquet = [path for path in files if path.endswith(".parquet")]
        if parquet:
            return datasets.load_dataset("parquet", data_files=_by_split(folder, parquet))
    except Exception as error:  # a file may lead to an error of any type
        if folder or not isinstance(error, OSError):
            cause = error.__cause__ or error
            raise ValueError(
                f"data.name: got {name}, expected images or parquet files that can be read: "
                f"{type(cause).__name__}: {cause}"
            ) from error
        raise FileNotFoundError(
            f"data.name: {name} is not cached here and could not be downloaded from the Hub ({error}). With a network, "
            f"run once to fill {datasets.config.HF_DATASETS_CACHE}. Without one, download the parquet files of "
            f"https://huggingface.co/datasets/{name} elsewhere, put them into a folder here as train-*.parquet and "
            f"test-*.parquet, for example data/{name.split('/')[-1]}, and set data.name to that folder"
        ) from error
    return _image_tables(folder, files)


def _by_split(folder: Path, files: list[str]) -> dict[str, list[str]]:
    """Files by the split that begins their name or that of a folder; if none does, all are to train on."""
    named = defaultdict(list)
    for path in files:
        found = re.search(f"/({SPLIT})", path.removeprefix(str(folder)), re.IGNORECASE)
        if found:
            named[found[1].lower()].append(escape(path))  # `datasets` takes names for patterns
    return named or {"train": list(map(escape, files))}


def _image_tables(folder: Path, files: list[str]) -> dict[str, datasets.Dataset]:
    """Tables of the images in [SPLIT/]CLASS/. Raises ValueError for an image that is in no folder of a class."""
    rows = defaultdict(list)
    for path in files:
        if Path(path).suffix.lower() not in EXTENSIONS:
            continue
        found = re.fullmatch(
            f"{re.escape(str(folder))}/(({SPLIT})/)?([^/]+)/[^/]+", path, re.IGNORECASE
        )
        if not found:
            raise ValueError(
                f"data.name: got {folder} with images in {Path(path).parent}, expected [SPLIT/]CLASS/IMAGE"
            )
        rows[(found[2] or "train").lower()].append((path, found[3]))
    classes = sorted({label for split in rows.values() for _, label in split})
    if len(classes) < 2:
        raise FileNotFoundError(
            f"data.name: got {folder}, expected images or parquet files in it: a folder per class, two at least"
        )
    tables = {}
    for split, pairs in rows.items():
        paths, labels = zip(*pairs, strict=True)
        tables[split] = _table(paths, labels, classes)
    return tables


def _check_inside(folder: Path, images: Any) -> None:
    """Raise ValueError if a column of images refers to a file that is not in the folder."""
    for chunk in images.chunks:
        for path in chunk.field("path").filter(chunk.field("bytes").is_null()).to_pylist():
            if not path.startswith(f"{folder}/") or "/../" in path:
                raise ValueError(
                    f"data.name: got {folder}, which refers to {path}, expected images inside of it"
                )


def _train_and_test(found: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The training split, empty if there is none, and the test split, if there is one."""
    splits: dict[str, Any] = {}
    if "test" in found:
        splits["test"] = found["test"]
    for split in ("validation", "valid", "val"):
        if split in found:
            splits.setdefault("validation", found[split])
    if "test" not in splits and "validation" in splits:
        splits["test"] = splits.pop("validation")
    if "train" in found:
        splits["train"] = found["train"]
    elif splits:
        splits["train"] = splits["test"].select([])
    else:
        raise ValueError(
            f"data.name: got {name} with splits {', '.join(found)}, expected train or test"
        )
    return splits


def _columns(features: Mapping[str, Any], config: DataConfig) -> tuple[str, str]:
    """The column of images and that of labels: as the config says, or the only one of class labels, or a usual name."""
    names = ", ".join(features)
    got = f"data.name: got {config.name} with columns {names}"
    images = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    if len(images) != 1:
        raise ValueError(f"{got}, expected one of images")
    if config.label_column:
        if config.label_column not in features:
            raise ValueError(
                f"data.label_column: got {config.label_column}, expected one of {names}"
            )
        return images[0], config.label_column
    labels = [name for name in features if isinstance(features[name], datasets.ClassLabel)]
    if len(labels) != 1:
        labels = [name for name in ("label", "labels", "fine_label") if name in features]
    if not labels:
        raise ValueError(f"{got}, expected labels, or data.label_column")
    return images[0], labels[0]


def _class_numbers(values: list[Any], names: list[str] | None, where: str) -> np.ndarray:
    """Labels (N,). Raises ValueError for an image without a class or with one that is too large."""
    bound = len(names) if names else MOST_CLASSES
    for value in set(values):
        if not isinstance(value, int) or not 0 <= value < bound:
            raise ValueError(
                f"data.name: got class {value} in {where}, expected a number from 0 to {bound - 1}"
            )
    return np.array(values, np.int64)
