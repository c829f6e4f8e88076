"""Labeled images by name: a Hub data set, a folder, or the digits of scikit-learn. Opening one decodes no pixels."""

from collections.abc import Iterable, Iterator, Mapping
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
METADATA_OR_ARCHIVES = {
    ".csv",
    ".jsonl",
    ".parquet",
    ".zip",
    ".tar",
    ".gz",
    ".tgz",
    ".bz2",
    ".xz",
    ".zst",
}
MOST_CLASSES = 2**16  # of a data set without names for them; ImageNet-21k has 21,841


class Refused(ValueError):
    """For a data folder that names files outside of it or addresses, or has images that are in no class."""


@dataclass(frozen=True)
class Images:
    """The images of a table. A column of `datasets` selects itself from the whole table at each access."""

    table: datasets.Dataset
    column: str
    mode: str | None  # that the data set asks for

    def __getitem__(self, row: int) -> Image.Image:
        return self._opened(self.table[row][self.column])

    def __iter__(self) -> Iterator[Image.Image]:
        return map(self._opened, self.table[self.column])

    def path(self, row: int) -> str:
        """The file of an image, if it has one to itself."""
        file = self.table[row][self.column]
        return file["path"] if file["bytes"] is None else ""

    def _opened(self, file: dict[str, Any]) -> Image.Image:
        picture = open_picture(
            Path(file["path"]) if file["bytes"] is None else BytesIO(file["bytes"])
        )
        return picture.convert(self.mode) if self.mode in MODES else picture


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
    found = _load(config)
    test: Any = next((found[name] for name in TEST_SPLITS if name in found), None)
    if "train" not in found and test is None:
        raise ValueError(
            f"data.name: got {config.name} with splits {', '.join(found)}, expected train or test"
        )
    train = (
        found["train"] if "train" in found else test.select([])
    )  # no image, if there is only a test split
    splits = {"train": train} | ({} if test is None else {"test": test})
    image, label = _columns(train.features, config)
    names = getattr(train.features[label], "names", None)
    labels, bound = {}, len(names) if names else MOST_CLASSES
    for split, data in splits.items():
        for chunk in data.data.column(image).chunks:
            paths = chunk.field("path").filter(chunk.field("bytes").is_null()).to_pylist()
            _check_inside(Path(config.name), paths, f"{datasets.config.DOWNLOADED_DATASETS_PATH}/")
        values = data[label][:]
        if not all(isinstance(value, int) and value >= 0 for value in values):
            raise ValueError(
                f"data.name: got {config.name}, whose {split} split has images without a class number"
            )
        if (largest := max(values, default=0)) >= bound:
            raise ValueError(
                f"data.name: got class {largest} in the {split} split, expected less than {bound}"
            )
        labels[split] = np.array(values, np.int64)
    classes = tuple(
        names or map(str, range(max(values.max(initial=0) for values in labels.values()) + 1))
    )
    title = config.title or (
        Path(config.name).resolve().name if Path(config.name).exists() else config.name
    )
    undecoded, mode = datasets.Image(decode=False), train.features[image].mode
    tables = {
        split: data.select_columns([image]).cast_column(image, undecoded)
        for split, data in splits.items()
    }
    return Source(
        title,
        {split: Images(table, image, mode) for split, table in tables.items()},
        labels,
        classes,
    )


def _digits() -> Source:
    """1,797 handwritten digits of 8x8 pixels (Alpaydin and Kaynak 1998, UCI), in 17 gray levels."""
    pixels, labels = load_digits(return_X_y=True)
    images = [
        Image.fromarray(x) for x in (pixels.reshape(-1, 8, 8) * (255 / 16)).round().astype(np.uint8)
    ]
    return Source("digits", {"train": images}, {"train": labels}, tuple("0123456789"))


def _load(config: DataConfig) -> Any:
    name, folder = config.name, Path(config.name)
    # a Hub name is NAME or OWNER/NAME; anything else is meant as a folder
    if not folder.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise FileNotFoundError(
            f"data.name: got {name}, expected a folder of images or of parquet files"
        )
    try:
        _check_card(folder)
        builder = datasets.load_dataset_builder(name, revision=config.revision or None)
        builder = _by_class(folder, builder) if folder.is_dir() else builder
        _check_inside(folder, chain.from_iterable((builder.config.data_files or {}).values()))
        builder.download_and_prepare()
        return builder.as_dataset()
    except Refused:
        raise
    except (EmptyDatasetError, DataFilesNotFoundError) as error:
        raise FileNotFoundError(
            f"data.name: got {name}, expected images or parquet files in it: {error}"
        ) from error
    except Exception as error:  # what a file of somebody can lead to has no bounds
        if folder.exists() or not isinstance(error, OSError):
            cause = error.__cause__ or error
            expected = f"images or parquet files that can be read: {type(cause).__name__}: {cause}"
            raise ValueError(f"data.name: got {name}, expected {expected}") from error
        raise FileNotFoundError(
            f"data.name: {name} is not cached here and could not be downloaded from the Hub ({error}). With a network, "
            f"run once to fill {datasets.config.HF_DATASETS_CACHE}. Without one, download the parquet files of "
            f"https://huggingface.co/datasets/{name} elsewhere, put them into a folder here as train-*.parquet and "
            f"test-*.parquet, for example data/{name.split('/')[-1]}, and set data.name to that folder"
        ) from error


def _by_class(folder: Path, builder: Any) -> Any:
    """The builder for images in [SPLIT/]CLASS/; `datasets` itself looks for words such as "test" anywhere in a path.

    A folder of something else keeps its builder. Raises Refused for an image that is in no folder of a class.
    """
    suffixes = {
        Path(path).suffix.lower()
        for path in chain.from_iterable((builder.config.data_files or {}).values())
    }
    if builder.name != "imagefolder" or suffixes & METADATA_OR_ARCHIVES or _configs(folder):
        return builder
    folders = [
        path for path in folder.iterdir() if path.is_dir() and any(map(Path.is_dir, path.iterdir()))
    ]
    deep = {path.name.lower(): path for path in folders}
    # train is first: `datasets` takes folders for labels once it has seen two
    places = {split: deep[split] for split in ("train", *TEST_SPLITS) if split in deep} or {
        "train": folder
    }
    patterns = {
        split: f"{place.relative_to(folder)}/**".removeprefix("./")
        for split, place in places.items()
    }
    builder = datasets.load_dataset_builder(str(folder), data_files=patterns)
    for split, paths in builder.config.data_files.items():
        for of_class in {
            Path(path).parent for path in paths if Path(path).suffix.lower() in builder.EXTENSIONS
        }:
            if not of_class.parent.samefile(places[split]):
                raise Refused(
                    f"data.name: got {folder} with images in {of_class}, expected [SPLIT/]CLASS/IMAGE"
                )
    return builder


def _configs(folder: Path) -> Any:
    """What the metadata of a folder says about its files."""
    card = folder / "README.md"
    return DatasetCard.load(card).data.get("configs") if card.is_file() else None


def _check_card(folder: Path) -> None:
    """Raise Refused if the metadata of a folder name addresses: `datasets` would look for files there at once."""
    if "://" in yaml_dump(_configs(folder)) or (folder / ".huggingface.yaml").exists():
        raise Refused(
            f"data.name: got {folder}, whose metadata has addresses, expected images inside of it"
        )


def _check_inside(folder: Path, paths: Iterable[str | None], *more: str) -> None:
    """Raise Refused if one of the files of a data set in a folder is neither in it nor below one of `more`."""
    inside = (f"{folder.absolute()}/", f"{folder.resolve()}/", *more)
    for path in paths if folder.is_dir() else ():
        if path is not None and (not path.startswith(inside) or "/../" in path):
            raise Refused(
                f"data.name: got {folder}, which refers to {path}, expected images inside of it"
            )


def _columns(features: Mapping[str, Any], config: DataConfig) -> tuple[str, str]:
    """The column of images and that of labels: as the config says, or the only one of class labels, or a usual name."""
    names, got = ", ".join(features), f"data.name: got {config.name} with columns"
    images = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    labels = [
        name for name, feature in features.items() if isinstance(feature, datasets.ClassLabel)
    ]
    if len(labels) != 1:
        labels = [name for name in ("label", "labels", "fine_label") if name in features]
    if config.label_column:
        labels = [name for name in features if name == config.label_column]
    if len(images) != 1:
        raise ValueError(f"{got} {names}, expected one of images")
    if config.label_column and not labels:
        raise ValueError(f"data.label_column: got {config.label_column}, expected one of {names}")
    if not labels:
        raise ValueError(
            f"{got} {names}, expected labels: a folder per class, two at least, or data.label_column"
        )
    return images[0], labels[0]
