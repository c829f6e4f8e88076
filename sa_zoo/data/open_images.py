"""Opens labeled images by name: a folder, a Hub data set, or the digits of scikit-learn. Decodes no pixels."""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from huggingface_hub import repo_exists
from sklearn.datasets import load_digits
from timm.utils import natural_key

from sa_zoo.data.config import DataConfig
from sa_zoo.data.image_folder import LABELS, SPLIT_WORDS, Found, table_of, tables_in
from sa_zoo.data.images import Images, LabeledImages
from sa_zoo.folders.messages import did_you_mean, listed


def open_images(config: DataConfig) -> LabeledImages:
    """The data of a config. Raises FileNotFoundError if there are none, ValueError if they have no usable labels."""
    folder = folder_of(config)
    if folder:
        found, origins, skipped = tables_in(folder, config.label_column)
    else:
        found, origins, skipped = _digits() if config.name == "digits" else _from_hub(config)
    chosen = _chosen(found, config)
    tables = {split: found[name] for split, name in chosen.items()}
    tables.setdefault("train", next(iter(tables.values())).select([]))
    image, label = _columns(tables["train"].features, config)
    names, numbers = _classes(tables, label)
    images, labels = {}, {}
    for split, table in tables.items():
        values = table[label][:]
        wrong = [value for value in values if value not in numbers]
        if wrong:
            raise ValueError(
                f"data.name: got class {wrong[0]} in {config.name}, split {chosen[split]}, expected one of "
                f"{listed(names)} ({len(wrong)} of {len(values)} images; where labels are hidden, choose another "
                f"split as data.{split}_split)"
            )
        labels[split] = np.array([numbers[value] for value in values], np.int64)
        images[split] = Images(table.cast_column(image, datasets.Image()), image, split)
    others = found.keys() - chosen.values()
    return LabeledImages(
        config.title or (folder.name if folder else config.name),
        images,
        labels,
        names,
        {split: origins[name] for split, name in chosen.items()},
        {**skipped, **{f"images of split {name}": len(found[name]) for name in others}},
    )


def _digits() -> Found:
    """1,797 handwritten digits of 8x8 pixels (Alpaydin and Kaynak 1998, UCI), in 17 gray levels."""
    pixels, labels = load_digits(return_X_y=True)
    pixels = (pixels.reshape(-1, 8, 8) * (255 / 16)).round().astype(np.uint8)
    # PGM: the same bytes with any version of Pillow
    images = [{"bytes": b"P5 8 8 255\n" + x.tobytes(), "path": None} for x in pixels]
    table = table_of(images, labels)
    return {"train": table}, {"train": "scikit-learn"}, {}


def folder_of(config: DataConfig) -> Path | None:
    """The resolved folder of a config; None for a data set of the Hub. Raises FileNotFoundError if it is missing."""
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
        labels = [name for name in LABELS if name in features]
    label = config.label_column or [*labels, ""][0]
    single = isinstance(features.get(label), datasets.ClassLabel | datasets.Value)
    if len(images) != 1 or not single:
        raise ValueError(
            f"data.label_column: got {label or 'nothing'}, expected one of {', '.join(features)} with one class per "
            f"image, and one of images, in {config.name}"
        )
    return images[0], label


def _classes(tables: Mapping[str, Any], label: str) -> tuple[tuple[str, ...], dict[Any, int]]:
    """The names of the classes, and the number of each value: those of the data, or the values in all splits."""
    feature = tables["train"].features[label]
    if isinstance(feature, datasets.ClassLabel):
        return tuple(feature.names), {number: number for number in range(len(feature.names))}
    # class_encode_column would sort 1, 10, 2, and look at one split only
    values = {value for table in tables.values() for value in table.unique(label)} - {None, ""}
    if -1 in values:  # hidden
        values.remove(-1)
    order = sorted(sorted(values), key=lambda value: natural_key(str(value)))
    return tuple(map(str, order)), {value: number for number, value in enumerate(order)}
