"""Labelled images by name: a Hub data set, a folder, or the digits of scikit-learn. Opening one decodes no pixels."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets.data_files import EmptyDatasetError
from datasets.exceptions import DataFilesNotFoundError, DatasetGenerationError
from PIL import Image
from sklearn.datasets import load_digits

from sa_zoo.training.config import DataConfig
from sa_zoo.training.pictures import MODES, open_picture

TEST_SPLITS = ("test", "validation", "valid", "val")


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

    def _opened(self, file: dict[str, Any]) -> Image.Image:
        picture = open_picture(Path(file["path"]) if file["bytes"] is None else BytesIO(file["bytes"]))
        return picture.convert(self.mode) if self.mode in MODES else picture


@dataclass(frozen=True)
class Source:
    """Images (a sequence of PIL images) and labels (N,) per split, and the names of the classes."""

    name: str
    images: Mapping[str, Any]
    labels: Mapping[str, np.ndarray]
    classes: tuple[str, ...]
    gray_as_color: bool = False  # whether an RGB model gets gray images, repeated per channel


def open_source(config: DataConfig) -> Source:
    """The Source of a config. Raises FileNotFoundError if there is none, ValueError if it has no usable labels."""
    if config.name == "digits":
        return _digits()
    found = _load(config)
    if "train" not in found:
        raise ValueError(f"data.name: got {config.name} with splits {', '.join(found)}, expected one called train")
    test = next((found[name] for name in TEST_SPLITS if name in found), None)
    splits = {"train": found["train"]} | ({} if test is None else {"test": test})
    image, label = _columns(found["train"].features, config)
    labels = {}
    for split, data in splits.items():
        _check_inside(Path(config.name), data.data.column(image))
        values = data[label][:]
        if not all(isinstance(value, int) and value >= 0 for value in values):
            raise ValueError(f"data.name: got {config.name}, whose {split} split has images without a class number")
        labels[split] = np.array(values, np.int64)
    classes = getattr(found["train"].features[label], "names", None)
    classes = tuple(classes or map(str, range(max(values.max() for values in labels.values()) + 1)))
    for split, numbers in labels.items():
        if (largest := numbers.max(initial=0)) >= len(classes):
            raise ValueError(f"data.name: got class {largest} in the {split} split, expected less than {len(classes)}")
    title = config.title or (Path(config.name).resolve().name if Path(config.name).exists() else config.name)
    undecoded, mode = datasets.Image(decode=False), found["train"].features[image].mode
    tables = {split: data.select_columns([image]).cast_column(image, undecoded) for split, data in splits.items()}
    return Source(title, {split: Images(table, image, mode) for split, table in tables.items()}, labels, classes)


def _digits() -> Source:
    """1,797 handwritten digits of 8x8 pixels (Alpaydin and Kaynak 1998, UCI), in 17 gray levels."""
    pixels, labels = load_digits(return_X_y=True)
    gray = (pixels.reshape(-1, 8, 8) * (255 / 16)).round().astype(np.uint8)
    images = [Image.fromarray(x) for x in gray]
    return Source("digits", {"train": images}, {"train": labels}, tuple("0123456789"), gray_as_color=True)


def _load(config: DataConfig) -> Any:
    name = config.name
    # a Hub name is NAME or OWNER/NAME; anything else is meant as a folder
    if not Path(name).exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise FileNotFoundError(f"data.name: got {name}, expected a folder of images or of parquet files")
    try:
        return datasets.load_dataset(name, revision=config.revision or None)
    except (EmptyDatasetError, DataFilesNotFoundError) as error:
        raise FileNotFoundError(f"data.name: got {name}, expected images or parquet files in it: {error}") from error
    except DatasetGenerationError as error:
        raise ValueError(f"data.name: {name} cannot be read: {error.__cause__ or error}") from error
    except OSError as error:
        raise FileNotFoundError(
            f"data.name: {name} is not cached here and could not be downloaded from the Hub ({error}). With a network, "
            f"run once to fill {datasets.config.HF_DATASETS_CACHE}. Without one, download the parquet files of "
            f"https://huggingface.co/datasets/{name} elsewhere, put them into a folder here as train-*.parquet and "
            f"test-*.parquet, for example data/{name.split('/')[-1]}, and set data.name to that folder"
        ) from error


def _check_inside(folder: Path, images: Any) -> None:
    """Raise ValueError if a data set in a folder names image files elsewhere, or addresses in a network."""
    inside = (f"{folder.absolute()}/", f"{folder.resolve()}/", f"{datasets.config.DOWNLOADED_DATASETS_PATH}/")
    for chunk in images.chunks if folder.is_dir() else []:
        for path in chunk.field("path").filter(chunk.field("bytes").is_null()).to_pylist():
            if path is not None and (not path.startswith(inside) or "/../" in path):
                raise ValueError(f"data.name: got {folder}, which refers to {path}, expected images inside of it")


def _columns(features: Mapping[str, Any], config: DataConfig) -> tuple[str, str]:
    """The column of images and that of labels: as the config says, or the only one of class labels, or a usual name."""
    names, got = ", ".join(features), f"data.name: got {config.name} with columns"
    images = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    labels = [name for name, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
    if len(labels) != 1:
        labels = [name for name in ("label", "labels", "fine_label") if name in features]
    if config.label_column:
        labels = [name for name in features if name == config.label_column]
    if len(images) != 1:
        raise ValueError(f"{got} {names}, expected one of images")
    if config.label_column and not labels:
        raise ValueError(f"data.label_column: got {config.label_column}, expected one of {names}")
    if not labels:
        raise ValueError(f"{got} {names}, expected labels: a folder per class, or data.label_column")
    return images[0], labels[0]
