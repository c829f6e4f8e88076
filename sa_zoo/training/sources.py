"""Labelled images by name: a Hub data set, a folder, or the digits that come with scikit-learn. No pixel is read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets.data_files import EmptyDatasetError
from datasets.exceptions import DataFilesNotFoundError, DatasetGenerationError
from huggingface_hub.errors import HfHubHTTPError
from PIL import Image
from sklearn.datasets import load_digits

from sa_zoo.training.config import DataConfig

TEST_SPLITS = ("test", "validation", "valid", "val")


@dataclass(frozen=True)
class Source:
    """Per split, the images (a sequence of PIL images) and their labels (N,); and the names of the classes."""

    name: str
    images: Mapping[str, Any]
    labels: Mapping[str, np.ndarray]
    classes: tuple[str, ...]
    gray_as_color: bool = False  # whether a model for RGB gets gray images three times


def open_source(config: DataConfig) -> Source:
    """Names, labels and undecoded images of a data set.

    Raises FileNotFoundError if it is neither local nor on the Hub, ValueError if it has no usable labels.
    """
    if config.name == "digits":
        return _digits()
    title = config.title or (Path(config.name).resolve().name if Path(config.name).exists() else config.name)
    found = _load(config)
    test = next((name for name in TEST_SPLITS if name in found), None)
    if "train" not in found:
        raise ValueError(f"data.name: got {config.name} with splits {', '.join(found)}, expected one called train")
    features = found["train"].features
    image, label = _image_column(features, config), _label_column(features, config)
    kept = {"train": found["train"]} | ({"test": found[test]} if test else {})
    labels = {split: np.asarray(data[label], dtype=object) for split, data in kept.items()}
    for split, values in labels.items():
        if not all(isinstance(value, int) and value >= 0 for value in values):
            raise ValueError(f"data.name: got {config.name}, whose {split} split has images without a class number")
    labels = {split: values.astype(np.int64) for split, values in labels.items()}
    names = getattr(features[label], "names", None) or map(str, range(max(v.max() for v in labels.values()) + 1))
    return Source(title, {split: data[image] for split, data in kept.items()}, labels, tuple(names))


def _digits() -> Source:
    """1,797 handwritten digits of 8x8 pixels (Alpaydin and Kaynak 1998, UCI), gray in 17 steps."""
    pixels, labels = load_digits(return_X_y=True)
    gray = (pixels.reshape(-1, 8, 8) * (255 / 16)).round().astype(np.uint8)
    names = tuple(str(digit) for digit in range(10))
    return Source("digits", {"train": [Image.fromarray(x) for x in gray]}, {"train": labels}, names, True)


def _load(config: DataConfig) -> Mapping[str, Any]:
    # a Hub name is NAME or OWNER/NAME; anything else was meant as a folder
    if not Path(config.name).exists() and (config.name.startswith((".", "/", "~")) or config.name.count("/") > 1):
        raise FileNotFoundError(f"data.name: got {config.name}, expected a folder of images or of parquet files")
    try:
        return datasets.load_dataset(config.name, revision=config.revision or None)
    except (EmptyDatasetError, DataFilesNotFoundError) as error:
        raise FileNotFoundError(
            f"data.name: got {config.name}, expected images or parquet files in it: {error}"
        ) from error
    except DatasetGenerationError as error:
        raise ValueError(f"data.name: {config.name} cannot be read: {error.__cause__ or error}") from error
    except (OSError, HfHubHTTPError) as error:  # a network can be missing in many ways
        raise FileNotFoundError(_where_to_put(config.name, error)) from error


def _where_to_put(name: str, error: Exception) -> str:
    return (
        f"data.name: {name} is not cached here and could not be downloaded from the Hub ({error}). With a network, run "
        f"once to fill {datasets.config.HF_DATASETS_CACHE}. Without one, download the parquet files of "
        f"https://huggingface.co/datasets/{name} elsewhere, put them into a folder here as train-*.parquet and "
        f"test-*.parquet, for example data/{name.split('/')[-1]}, and set data.name to that folder"
    )


def _image_column(features: Mapping[str, Any], config: DataConfig) -> str:
    found = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    if len(found) != 1:
        raise ValueError(f"data.name: got {config.name} with columns {', '.join(features)}, expected one of images")
    return found[0]


def _label_column(features: Mapping[str, Any], config: DataConfig) -> str:
    """The column that the config names; otherwise the only one of class labels; otherwise one with a usual name."""
    if config.label_column:
        if config.label_column not in features:
            raise ValueError(f"data.label_column: got {config.label_column}, expected one of {', '.join(features)}")
        return config.label_column
    found = [name for name, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
    if len(found) == 1:
        return found[0]
    usual = [name for name in ("label", "labels", "fine_label") if name in features]
    if not usual:
        raise ValueError(
            f"data.name: got {config.name} with columns {', '.join(features)}, expected labels: a folder per class, "
            f"or data.label_column"
        )
    return usual[0]
