"""Labelled images by name: a Hub data set, a folder, or the digits that come with scikit-learn.

A Source knows names and labels and has read no pixel. `splits_of` turns it into train, validation and test, resized
to what the model takes: decoded once and kept on the device where that is small, decoded by workers where it is not.
"""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from datasets.data_files import EmptyDatasetError
from datasets.exceptions import DataFilesNotFoundError, DatasetGenerationError
from huggingface_hub.errors import HfHubHTTPError
from PIL import Image, UnidentifiedImageError
from sklearn.datasets import load_digits
from timm.data import create_transform
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from sa_zoo.training.augment import HOLD_OUT, permutation, sent
from sa_zoo.training.config import DataConfig

TEST_SPLITS = ("test", "validation", "valid", "val")
TEST_SHARE = 0.2  # of a data set that brings no test split
KEPT_BYTES = 2**31  # decoded data sets up to this size stay on the device


@dataclass(frozen=True)
class InputFormat:
    """What a model takes: channels, height, width; and the normalisation its weights expect."""

    input_size: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    crop_pct: float

    def normalise(self, images: Tensor) -> Tensor:
        """uint8 (B, C, H, W) -> float32 of the same shape, channels last in memory, where convolutions are fastest."""
        mean, std = (sent(torch.tensor(x), images.device).view(-1, 1, 1) * 255 for x in (self.mean, self.std))
        return images.to(torch.float32, memory_format=torch.channels_last).sub_(mean).div_(std)


@dataclass(frozen=True)
class Source:
    """Named pictures: per split, the images (a sequence of PIL images) and their labels (N,), and what classes mean."""

    name: str
    images: Mapping[str, Any]
    labels: Mapping[str, np.ndarray]
    classes: tuple[str, ...]
    gray_as_colour: bool = False  # whether gray may be repeated for a model that takes colours


@dataclass(frozen=True)
class Splits:
    train: "Split"
    validation: "Split"
    test: "Split"


class Split(Dataset):
    """Decoded images of one split, kept on a device. A batch is (uint8 (B, C, H, W), int64 (B,), indices (B,))."""

    workers = 0

    def __init__(self, images: Tensor, labels: np.ndarray) -> None:
        self.images, self.labels = images, torch.from_numpy(labels).to(images.device)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        where = torch.tensor(indices)
        there = sent(where, self.labels.device)
        return self.images[there], self.labels[there], where

    def loader(self, batch_size: int) -> DataLoader:
        """Every image once, in order."""
        return DataLoader(self, batch_size, collate_fn=_as_it_is, num_workers=self.workers)

    def loader_in_order(self, batches: Iterable[np.ndarray]) -> DataLoader:
        """These indices, batch by batch."""
        ordered = [batch.tolist() for batch in batches]
        return DataLoader(self, batch_sampler=ordered, collate_fn=_as_it_is, num_workers=self.workers)


class StreamedSplit(Split):
    """The same, decoded by worker processes each time it is asked for."""

    def __init__(self, decode: "Decoder", source: "Source", table: str, rows: np.ndarray) -> None:
        self.decode, self.table, self.pictures, self.rows = decode, table, source.images[table], rows.tolist()
        self.labels = torch.from_numpy(source.labels[table][rows])
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.workers = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        rows = [self.rows[i] for i in indices]
        images = torch.stack([self.decode(self.pictures[row], _name(self.table, row)) for row in rows])
        where = torch.tensor(indices)
        return images, self.labels[where], where


def _name(table: str, row: int) -> str:
    return f"image {row} of the {table} split"


def _as_it_is(batch: Any) -> Any:
    return batch


class Decoder:
    """A PIL image to uint8 (C, H, W) of the model's size, resized and cropped as timm evaluates the model."""

    def __init__(self, form: InputFormat, gray_as_colour: bool) -> None:
        self.form, self.gray_as_colour = form, gray_as_colour
        self.transform = create_transform(
            form.input_size, interpolation=form.interpolation, crop_pct=form.crop_pct, normalize=False
        )

    def __call__(self, image: Image.Image, name: str) -> Tensor:
        channels, height, width = self.form.input_size
        # a palette names colours
        if image.mode == "P" or (image.mode == "L" and channels == 3 and self.gray_as_colour):
            image = image.convert("RGB")
        if len(image.getbands()) != channels:
            raise ValueError(
                f"{name}: got {len(image.getbands())} channels (mode {image.mode}), expected {channels}; "
                f"convert the images, or build the model for them with model.args.in_chans"
            )
        if image.size != (width, height):
            return self.transform(image)
        pixels = np.array(image)
        return torch.from_numpy(pixels).view(height, width, channels).permute(2, 0, 1)


def open_source(config: DataConfig) -> Source:
    """Names, labels and undecoded images of a data set.

    Raises FileNotFoundError where it is neither here nor on the Hub, ValueError where it has no usable labels.
    """
    if config.name == "digits":
        return _digits()
    title = config.title or (Path(config.name).resolve().name if Path(config.name).exists() else config.name)
    found = _load(config)
    test = next((name for name in TEST_SPLITS if name in found), None)
    if "train" not in found:
        raise ValueError(f"data.name: got {config.name} with splits {', '.join(found)}, expected one called train")
    features = found["train"].features
    picture = _image_column(features, config)
    label = _label_column(features, config)
    kept = {"train": found["train"]} | ({"test": found[test]} if test else {})
    labels = {split: np.asarray(data[label], dtype=object) for split, data in kept.items()}
    for split, values in labels.items():
        if not all(isinstance(value, int) and value >= 0 for value in values):
            raise ValueError(f"data.name: got {config.name}, whose {split} split has images without a class number")
    labels = {split: values.astype(np.int64) for split, values in labels.items()}
    names = getattr(features[label], "names", None) or map(str, range(max(v.max() for v in labels.values()) + 1))
    return Source(title, {split: data[picture] for split, data in kept.items()}, labels, tuple(names))


def _digits() -> Source:
    """1,797 handwritten digits of 8x8 pixels (Alpaydin and Kaynak 1998, UCI), gray in 17 steps."""
    pixels, labels = load_digits(return_X_y=True)
    gray = (pixels.reshape(-1, 8, 8) * (255 / 16)).round().astype(np.uint8)
    names = tuple(str(digit) for digit in range(10))
    return Source("digits", {"train": [Image.fromarray(x) for x in gray]}, {"train": labels}, names, True)


def _load(config: DataConfig) -> Mapping[str, Any]:
    # a Hub name is NAME or OWNER/NAME; whatever looks otherwise was meant as a folder
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
    except (OSError, HfHubHTTPError) as error:  # the many ways in which a network is not there
        raise FileNotFoundError(_where_to_put(config.name, error)) from error


def _where_to_put(name: str, error: Exception) -> str:
    return (
        f"data.name: {name} is not cached here and the Hub did not give it ({error}). With network, run once: it fills "
        f"{datasets.config.HF_DATASETS_CACHE}. Without, fetch the parquet files of "
        f"https://huggingface.co/datasets/{name} elsewhere, put them into a folder here as train-*.parquet and "
        f"test-*.parquet, for example data/{name.split('/')[-1]}, and set data.name to that folder"
    )


def _image_column(features: Mapping[str, Any], config: DataConfig) -> str:
    found = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    if len(found) != 1:
        raise ValueError(f"data.name: got {config.name} with columns {', '.join(features)}, expected one of images")
    return found[0]


def _label_column(features: Mapping[str, Any], config: DataConfig) -> str:
    """The column asked for; else the only one of class labels; else the one with a usual name."""
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


def splits_of(source: Source, validation: float, form: InputFormat, device: torch.device) -> Splits:
    """Train, validation and test. What is held out depends on the data alone, so that all models and seeds share it."""
    return Splits(**_splits(source, _rows(source, validation), form, device))


def evaluation_split(source: Source, form: InputFormat, device: torch.device) -> Split:
    """The test split alone, without decoding the others."""
    return _splits(source, {"test": _rows(source, 0)["test"]}, form, device)["test"]


def _rows(source: Source, validation: float) -> dict[str, tuple[str, np.ndarray]]:
    """By split, the split of the source that it is taken from, and which of its rows."""
    train = np.arange(len(source.labels["train"]))
    if "test" in source.labels:
        test = "test", np.arange(len(source.labels["test"]))
    else:
        train, held_out = _hold_out(train, TEST_SHARE)
        test = "train", held_out
    train, held_out = _hold_out(train, validation)
    return {"train": ("train", train), "validation": ("train", held_out), "test": test}


def _hold_out(rows: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    order = permutation(len(rows), HOLD_OUT)
    held = round(share * len(rows))
    return np.sort(rows[order[held:]]), np.sort(rows[order[:held]])


def _splits(
    source: Source, wanted: Mapping[str, tuple[str, np.ndarray]], form: InputFormat, device: torch.device
) -> dict[str, Split]:
    decode = Decoder(form, source.gray_as_colour)
    tables = {table for table, _ in wanted.values()}
    if sum(len(source.labels[table]) for table in tables) * math.prod(form.input_size) > KEPT_BYTES:
        return {name: StreamedSplit(decode, source, table, rows) for name, (table, rows) in wanted.items()}
    # in order and once: random access to an Arrow table costs more than decoding
    kept = {table: _decoded(decode, source, table) for table in tables}
    return {
        name: Split(kept[table][torch.from_numpy(rows)].to(device), source.labels[table][rows])
        for name, (table, rows) in wanted.items()
    }


def _decoded(decode: Decoder, source: Source, table: str) -> Tensor:
    kept = torch.empty((len(source.labels[table]), *decode.form.input_size), dtype=torch.uint8)
    row = -1
    try:
        for row, image in enumerate(source.images[table]):
            kept[row] = decode(image, _name(table, row))
    except UnidentifiedImageError as error:
        raise ValueError(f"{_name(table, row + 1)}: got a file that is no image: {error}") from error
    return kept
