"""Labeled images by name: a Hub data set, a folder, or the digits of scikit-learn. Opening one decodes no pixels."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets.data_files import EmptyDatasetError
from datasets.exceptions import DataFilesNotFoundError
from huggingface_hub import DatasetCard
from huggingface_hub.utils import yaml_dump
from PIL import Image
from sklearn.datasets import load_digits

from sa_zoo.training.config import DataConfig
from sa_zoo.training.pictures import MODES, open_picture

TEST_SPLITS = ("test", "validation", "valid", "val")
METADATA_OR_ARCHIVES = re.compile(
    r".*\.(csv|jsonl|parquet|zip|tar|gz|tgz|bz2|xz|zst)", re.IGNORECASE
)
MOST_CLASSES = 2**16  # of a data set without names for them; ImageNet-21k has 21,841


class Refused(ValueError):
    """For a data folder that names files outside of it or addresses, or has images that are in no class."""


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

    def _file(self, row: int) -> Any:
        return self.table.data.column(self.column)[row].as_py()


@dataclass(frozen=True)
class Source:
    """Images (a sequence of PIL images) and labels (N,) per split, and the names of the classes."""

    name: str
    images: Mapping[str, Any]
    labels: Mapping[str, np.ndarray]
    classes: tuple[str, ...]


def open_source(config: DataConfig) -> Source:
    """The Source of a config. Raises FileNotFoundError if there is none, ValueError if it has no usable labels."""
    if config.name == "digits":
        return _digits()
    folder = _folder(config.name)
    splits = _train_and_test(_load(config, folder), config.name)
    features = splits["train"].features
    image, label = _columns(features, config)
    names = getattr(features[label], "names", None)
    images, labels = {}, {}
    for split, table in splits.items():
        labels[split] = _class_numbers(table[label][:], names, split, config.name)
        if folder:
            files = table.data.column(image).combine_chunks()
            outside = files.field("path").filter(files.field("bytes").is_null())
            _check_inside(
                folder, outside.to_pylist(), str(datasets.config.DOWNLOADED_DATASETS_PATH)
            )
        images[split] = Images(table, image, features[image].mode)
    count = 1 + max(numbers.max(initial=0) for numbers in labels.values())
    title = config.title or (folder.name if folder else config.name)
    return Source(title, images, labels, tuple(names or map(str, range(count))))


def _digits() -> Source:
    """1,797 handwritten digits of 8x8 pixels (Alpaydin and Kaynak 1998, UCI), in 17 gray levels."""
    pixels, labels = load_digits(return_X_y=True)
    pixels = (pixels.reshape(-1, 8, 8) * (255 / 16)).round().astype(np.uint8)
    images = [Image.fromarray(x) for x in pixels]
    return Source("digits", {"train": images}, {"train": labels}, tuple("0123456789"))


def _folder(name: str) -> Path | None:
    """The folder of that name, without links and ".." in its path; None for a data set of the Hub."""
    path = Path(os.path.expanduser(name))  # noqa: PTH111  Path raises for an unknown user
    if path.is_dir():
        return path.resolve()
    # a Hub name is NAME or OWNER/NAME; anything else is meant as a folder
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        expected = "a folder of images or of parquet files"
        raise FileNotFoundError(f"data.name: got {name}, expected {expected}")
    return None


def _load(config: DataConfig, folder: Path | None) -> Any:
    name = config.name
    try:
        if folder:
            _check_card(folder)
        source = str(folder or name)
        builder = datasets.load_dataset_builder(source, revision=config.revision or None)
        if folder:
            builder = _by_class(folder, builder)
            _check_inside(folder, _files(builder))
        builder.download_and_prepare()
        return builder.as_dataset()
    except Refused:
        raise
    except (EmptyDatasetError, DataFilesNotFoundError) as error:
        expected = f"images or parquet files in it: {error}"
        raise FileNotFoundError(f"data.name: got {name}, expected {expected}") from error
    except Exception as error:  # Files may cause errors of any type
        if folder or not isinstance(error, OSError):
            cause = error.__cause__ or error
            expected = f"images or parquet files that can be read: {type(cause).__name__}: {cause}"
            raise ValueError(f"data.name: got {name}, expected {expected}") from error
        raise FileNotFoundError(
            f"data.name: {name} is not cached here and could not be downloaded from the Hub ({error}). With a network, "
            f"run once to fill {datasets.config.HF_DATASETS_CACHE}. Without one, download the parquet files of "
            f"https://huggingface.co/datasets/{name} elsewhere, put them into a folder here as train-*.parquet and "
            f"test-*.parquet, for example data/{name.split('/')[-1]}, and set data.name to that folder"
        ) from error


def _files(builder: Any) -> list[str]:
    return list(chain.from_iterable((builder.config.data_files or {}).values()))


def _by_class(folder: Path, builder: Any) -> Any:
    """The builder for images in [SPLIT/]CLASS/; `datasets` itself looks for words such as "test" anywhere in a path.

    A folder of something else keeps its builder. Raises Refused for an image that is in no folder of a class.
    """
    others = any(map(METADATA_OR_ARCHIVES.fullmatch, _files(builder)))
    if builder.name != "imagefolder" or others or _configs(folder):
        return builder
    folders = filter(Path.is_dir, folder.iterdir())
    deep = {path.name.lower(): path for path in folders if any(map(Path.is_dir, path.iterdir()))}
    # train is first: `datasets` takes folders for labels once it has seen two
    places = {split: deep[split] for split in ("train", *TEST_SPLITS) if split in deep}
    places = places or {"train": folder}
    patterns = {
        split: f"{place.relative_to(folder)}/**".removeprefix("./")
        for split, place in places.items()
    }
    builder = datasets.load_dataset_builder(str(folder), data_files=patterns)
    for split, paths in builder.config.data_files.items():
        images = (path for path in map(Path, paths) if path.suffix.lower() in builder.EXTENSIONS)
        for of_class in {image.parent for image in images}:
            if not of_class.parent.samefile(places[split]):
                got = f"{folder} with images in {of_class}"
                raise Refused(f"data.name: got {got}, expected [SPLIT/]CLASS/IMAGE")
    return builder


def _configs(folder: Path) -> Any:
    """What the metadata of a folder says about its files."""
    card = folder / "README.md"
    return DatasetCard.load(card).data.get("configs") if card.is_file() else None


def _check_card(folder: Path) -> None:
    """Raise Refused if the metadata of a folder name addresses: `datasets` would look for files there at once."""
    if "://" in yaml_dump(_configs(folder)) or (folder / ".huggingface.yaml").exists():
        got = f"{folder}, whose metadata has addresses"
        raise Refused(f"data.name: got {got}, expected images inside of it")


def _check_inside(folder: Path, paths: Iterable[str], *more: str) -> None:
    """Raise Refused if one of the files of a data set in a folder is neither in it nor below one of `more`."""
    inside = tuple(f"{place}/" for place in (folder, *more))
    for path in paths:
        if not path.startswith(inside) or "/../" in path:
            got = f"{folder}, which refers to {path}"
            raise Refused(f"data.name: got {got}, expected images inside of it")


def _train_and_test(found: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The training split, empty if there is none, and the test split, if there is one."""
    splits = {}
    for split in TEST_SPLITS:
        if split in found:
            splits.setdefault("test", found[split])
    if "train" in found:
        splits["train"] = found["train"]
    elif splits:
        splits["train"] = splits["test"].select([])
    else:
        got = f"{name} with splits {', '.join(found)}"
        raise ValueError(f"data.name: got {got}, expected train or test")
    return splits


def _columns(features: Mapping[str, Any], config: DataConfig) -> tuple[str, str]:
    """The column of images and that of labels: as the config says, or the only one of class labels, or a usual name."""
    names = ", ".join(features)
    got = f"data.name: got {config.name} with columns {names}"
    images = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    labels = [name for name in features if isinstance(features[name], datasets.ClassLabel)]
    if len(images) != 1:
        raise ValueError(f"{got}, expected one of images")
    if config.label_column:
        if config.label_column not in features:
            raise ValueError(
                f"data.label_column: got {config.label_column}, expected one of {names}"
            )
        return images[0], config.label_column
    if len(labels) != 1:
        labels = [name for name in ("label", "labels", "fine_label") if name in features]
    if not labels:
        expected = "labels: a folder per class, two at least, or data.label_column"
        raise ValueError(f"{got}, expected {expected}")
    return images[0], labels[0]


def _class_numbers(values: list[Any], names: list[str] | None, split: str, data: str) -> np.ndarray:
    """Labels (N,). Raises ValueError for an image without a class or with one that is too large."""
    if not all(isinstance(value, int) and value >= 0 for value in values):
        got = f"{data}, whose {split} split has images without a class number"
        raise ValueError(f"data.name: got {got}")
    bound = len(names) if names else MOST_CLASSES
    largest = max(values, default=0)
    if largest >= bound:
        got = f"class {largest} in the {split} split"
        raise ValueError(f"data.name: got {got}, expected less than {bound}")
    return np.array(values, np.int64)
