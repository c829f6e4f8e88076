"""A training run as a TOML file: read, overridden from the command line, validated, written back.

    [model]   which timm model, with which arguments and initial weights
    [data]    which images, and how much of them is held out
    [augment] what is done to training images
    [optim]   timm optimiser and learning-rate curve
    [train]   length, batch, precision, seed

Every problem is a ValueError with one line per key: the dotted key, what was got, what is expected, the nearest name.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator


class Section(BaseModel):
    """Types are strict: TOML has its own, and a number in quotes is a mistake."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelConfig(Section):
    name: str = Field(min_length=1)  # any timm name
    args: dict[str, Any] = {}  # passed to timm.create_model
    init: str = ""  # "local-dir:FOLDER", "hf-hub:OWNER/NAME" or a timm name; empty: random
    whiten: bool = False  # start the first convolution as the whitening transform of its patches
    freeze: str = ""  # regular expression; parameters whose name it finds are not trained

    @field_validator("args")
    @classmethod
    def _leaves_classes_to_the_data(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "num_classes" in value:
            raise ValueError(f"model.args.num_classes: got {value['num_classes']}, expected nothing: the data decide")
        return value

    @field_validator("freeze")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"model.freeze: got {value!r}, expected a regular expression: {error}") from error
        return value


class DataConfig(Section):
    name: str = Field("uoft-cs/cifar10", min_length=1)  # Hub data set, folder, or "digits"
    revision: str = ""  # of a Hub data set; empty: the newest
    title: str = ""  # what results call the data; empty: its name
    label_column: str = ""  # empty: the one ClassLabel column, or the usual name
    image_size: int = Field(0, ge=0)  # side in pixels; 0: the model's own
    validation: float = Field(0.1, ge=0, lt=1)  # share of the training images held out for choosing


class AugmentConfig(Section):
    crop_padding: int = Field(0, ge=0)  # pixels
    flip: bool = False  # left-right, half of the time
    alternate_flips: bool = False  # flip an image in every second epoch instead of independently in each
    small_epochs: int = Field(0, ge=0)  # first epochs, whose images are shrunk to small_size
    small_size: int = Field(24, ge=1)  # side in pixels
    small_crop: bool = False  # crop instead
    random_erasing: float = Field(0.0, ge=0, le=1)  # probability
    mixup: float = Field(0.0, ge=0)  # alpha of the beta distribution
    cutmix: float = Field(0.0, ge=0)
    label_smoothing: float = Field(0.0, ge=0, lt=1)


class OptimConfig(Section):
    name: str = "sgd"  # any timm optimiser
    lr: float = Field(0.1, gt=0)  # at the top of the curve
    momentum: float = Field(0.9, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)  # never on biases, norms and the model's no_weight_decay()
    layer_decay: float = Field(1.0, gt=0, le=1)  # rate of a layer relative to the one above it
    warmup: float = Field(0.05, ge=0, lt=1)  # share of the run, linear
    clip: float = Field(0.0, ge=0)  # gradient norm; 0: none
    args: dict[str, Any] = {}  # further arguments of timm's optimizer


class TrainConfig(Section):
    epochs: int = Field(ge=1)
    batch_size: int = Field(100, ge=1)  # images per optimiser step, over all processes and accumulation
    accumulation: int = Field(1, ge=1)  # parts a process cuts its share of a batch into
    precision: Literal["no", "bf16", "fp16"] = "no"
    seed: int = Field(0, ge=0)
    ema: float = Field(0.0, ge=0, lt=1)  # decay of the weight average, which then is what is published; 0: none
    checkpoint_steps: int = Field(0, ge=0)  # also save every so many steps; 0: at epoch ends only
    tracker: Literal["", "tensorboard"] = ""


class Config(Section):
    model: ModelConfig
    data: DataConfig = DataConfig()
    augment: AugmentConfig = AugmentConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig

    @model_validator(mode="after")
    def _batch_divides(self) -> "Config":
        if self.train.batch_size % self.train.accumulation:
            raise ValueError(
                f"train.accumulation: got {self.train.accumulation}, "
                f"expected a divisor of train.batch_size = {self.train.batch_size}"
            )
        return self


def load_config(path: Path, overrides: Iterable[str] = ()) -> Config:
    """The validated config of a TOML file, `overrides` ("section.key=value") applied in order."""
    path = Path(path)
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.toml")], n=1)
        raise FileNotFoundError(f"config: got {path}, expected a TOML file{_nearest(near)}")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"config: got {path}, expected TOML: {error}") from error
    for override in overrides:
        _set(table, override)
    return parse_config(table)


def parse_config(table: Mapping[str, Any]) -> Config:
    try:
        return Config.model_validate(table)
    except ValidationError as error:
        raise ValueError("\n".join(_describe(e) for e in error.errors())) from error


def _set(table: dict[str, Any], override: str) -> None:
    """Puts one `section.key=value` into the table; the value is TOML, and text where it is not."""
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise ValueError(f"--set: got {override!r}, expected key=value such as train.epochs=3")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    for depth, name in enumerate(names[:-1], start=1):
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ValueError(f"--set: got {override!r}, but {'.'.join(names[:depth])} is no table")
    table[names[-1]] = value


def _describe(error: Mapping[str, Any]) -> str:
    key, value = ".".join(map(str, error["loc"])), error["input"]
    match error["type"]:
        case "value_error":  # a check of ours, whose message names its keys
            return str(error["ctx"]["error"])
        case "missing":
            return f"{key}: got nothing, expected a value"
        case "extra_forbidden":
            names = _names_beside(error["loc"])
            near = difflib.get_close_matches(str(error["loc"][-1]), names, n=1)
            return f"{key}: got an unknown key, expected one of {', '.join(names)}{_nearest(near)}"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"{key}: got {value!r}, expected a table"
        case "literal_error":
            choices = error["ctx"]["expected"]
            near = difflib.get_close_matches(str(value), re.findall("'(.+?)'", choices), n=1)
            return f"{key}: got {value!r}, expected {choices}{_nearest(near)}"
        case _:
            return f"{key}: got {value!r}, expected {error['msg'].removeprefix('Input should be ')}"


def _names_beside(location: tuple[Any, ...]) -> list[str]:
    section = Config
    for name in location[:-1]:
        section = section.model_fields[name].annotation
    return list(section.model_fields)


def _nearest(near: list[str]) -> str:
    return f" (did you mean {near[0]}?)" if near else ""


def dump_config(config: Config) -> str:
    """The effective config as TOML; reading it back gives an equal one."""
    return "\n".join(_table(name, section) for name, section in config.model_dump().items())


def _table(name: str, table: Mapping[str, Any]) -> str:
    lines = [f"{_key(key)} = {_value(value)}" for key, value in table.items()]
    return "\n".join([f"[{name}]", *lines, ""])


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else _text(key)


def _value(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return _text(value)
        case dict():
            return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(_value, value)) + "]"
        case _:  # TOML writes numbers, dates and times as Python does
            return str(value)


def _text(value: str) -> str:
    """JSON's quoting is TOML's but for the one control character that JSON leaves as it is."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
