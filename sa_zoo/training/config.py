"""A training run as a TOML file, with the sections of `Config`: read, overridden, validated, written.

Every mistake is a ValueError with one line per key: the dotted key, the value, the expected one, the nearest name.
"""

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from sa_zoo.data.config import DataConfig, Fraction, Section, Text
from sa_zoo.folders.check import Arguments
from sa_zoo.folders.messages import did_you_mean

# setup.py installs configs/ of the repository as sa_zoo/recipes. A checkout has no such folder.
INSTALLED_RECIPES = Path(__file__).parents[1] / "recipes"
RECIPES = INSTALLED_RECIPES if INSTALLED_RECIPES.is_dir() else Path(__file__).parents[2] / "configs"
# Arguments of timm's factory, not of a network
DECIDED = {"num_classes", "model_name", "pretrained", "source"} | Arguments.model_fields.keys() - {
    "cnn",
    "vit",
    "img_size",
}


# Keys of `augment` that need `scale`, and those that exclude it
RESIZED_CROPS = ("ratio", "hflip", "color_jitter", "auto_augment", "re_prob", "interpolation")
SHIFTS = ("crop_padding", "crop_fill", "flip", "alternate_flips")


class ModelConfig(Section):
    name: Text  # any timm name
    args: dict[str, Any] = Field(default_factory=dict)  # passed to timm.create_model
    # initial weights: "pretrained" (timm's for `name`), a folder, hf-hub:OWNER/NAME or a timm name; for an mhsa_*, its
    # CNN's, too; empty: random
    init: str = ""
    whiten: bool = False  # start the first convolution as a whitening transform of its patches
    kernels: NonNegativeInt = 0  # first blocks whose heads start as the pixels of a kernel
    harden: bool = False  # turn the heads of the initial weights into taps, with fixed positions
    freeze: str = ""  # regular expression; parameters with a matching name are not trained


class AugmentConfig(Section):
    # Random resized crops of photographs by timm's create_transform, under its names. `scale`: range of the share of
    # the area; empty: none of these
    scale: list[float] = Field(default_factory=list)
    ratio: list[float] = Field(default_factory=lambda: [3 / 4, 4 / 3])  # range of width to height
    hflip: Fraction = 0.0
    color_jitter: NonNegativeFloat = 0.0
    auto_augment: str = ""  # a policy of timm, such as rand-m9-mstd0.5
    re_prob: Fraction = 0.0
    interpolation: Literal["random", "bilinear", "bicubic"] = "random"
    # Shifts of small images that stay in memory
    crop_padding: NonNegativeInt = 0  # pixels
    crop_fill: Literal["black", "reflect"] = "black"  # pixels outside of the image
    flip: bool = False  # left-right, with probability 1/2
    alternate_flips: bool = False  # left-right in every other epoch, beginning at random
    # With either
    small_epochs: NonNegativeInt = 0  # first epochs, with images shrunk to three quarters of a side
    half_epochs: NonNegativeInt = 0  # the first of these, with images of half a side
    mixup: NonNegativeFloat = 0.0  # alpha of the beta distribution
    cutmix: NonNegativeFloat = 0.0
    label_smoothing: Fraction = 0.0


class OptimConfig(Section):
    name: str = "sgd"  # any timm optimizer
    lr: float = Field(0.1, gt=0, le=1e30)  # maximum of the schedule
    momentum: Fraction = 0.9
    weight_decay: NonNegativeFloat = (
        0.0  # except on biases, norms and the model's no_weight_decay()
    )
    layer_decay: float = Field(1.0, gt=0, le=1)  # rate of a layer relative to the one above it
    warmup: Fraction = 0.05  # of the run, linear
    schedule: Literal["cosine", "linear"] = "cosine"  # after it, to zero
    clip: NonNegativeFloat = 0.0  # gradient norm; 0: none
    args: dict[str, Any] = Field(default_factory=dict)  # further arguments of timm's optimizer


class TrainConfig(Section):
    epochs: PositiveInt
    head_epochs: NonNegativeInt = 0  # first epochs, in which only the classifier is trained
    keep: Literal["last", "best"] = "last"  # epoch to publish; best: on the validation images
    batch_size: PositiveInt = 100  # images per optimizer step, over all processes and accumulation
    accumulation: PositiveInt = 1  # micro-batches per step of each process
    # auto: bf16 if the device has instructions for it, otherwise no; empty: as `accelerate launch` says, or no
    precision: Literal["", "no", "bf16", "fp16", "auto"] = ""
    seed: int = Field(0, ge=0, lt=2**63)
    checkpoint_steps: NonNegativeInt = 0  # between two checkpoints; 0: the steps of an epoch
    tracker: str = ""  # any tracker of accelerate: tensorboard, trackio, wandb, ...; empty: none


class Config(Section):
    model: ModelConfig
    data: DataConfig = DataConfig()
    augment: AugmentConfig = AugmentConfig()  # of training images
    optim: OptimConfig = OptimConfig()
    train: TrainConfig

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        model = self.model
        for key in sorted(DECIDED & model.args.keys()):
            raise ValueError(
                f"model.args.{key}: got {model.args[key]!r}, expected nothing: the data set and the "
                "other keys of this file decide it"
            )
        try:
            re.compile(model.freeze)
        except re.error as error:
            raise ValueError(
                f"model.freeze: got {model.freeze!r}, expected a regular expression: {error}"
            ) from error
        if model.init and (model.whiten or model.kernels):
            raise ValueError(
                f"model.whiten, model.kernels: got a start with model.init = {model.init!r}, expected one of the two"
            )
        limits = {
            "augment.half_epochs": "augment.small_epochs",
            "augment.small_epochs": "train.epochs",
            "train.head_epochs": "train.epochs",
        }
        for key, limit in limits.items():
            got, most = attrgetter(key, limit)(self)
            if got > most:
                raise ValueError(f"{key}: got {got}, expected at most {limit} = {most}")
        _check_crops(self.augment)
        return self


def _check_crops(augment: AugmentConfig) -> None:
    for key in ("scale", "ratio"):
        got = getattr(augment, key)
        if got and not (len(got) == 2 and 0 < got[0] <= got[1]):
            raise ValueError(f"augment.{key}: got {got}, expected two numbers above 0, in order")
    changed = augment.model_dump(exclude_defaults=True)
    for key in SHIFTS if augment.scale else RESIZED_CROPS:
        if key in changed:
            raise ValueError(
                f"augment.{key}: got {changed[key]!r} with augment.scale = {augment.scale}, expected scale with "
                f"{', '.join(RESIZED_CROPS)}, or {', '.join(SHIFTS)} without scale"
            )


def config_path(config: str | Path) -> Path:
    """The TOML file at a path or of a named recipe. Raises FileNotFoundError with all recipes if there is neither."""
    path = Path(config)
    if path.is_file():
        return path
    recipes = {path.stem: path for path in sorted(RECIPES.glob("*.toml"))}
    if str(config) in recipes:
        return recipes[str(config)]
    hint = did_you_mean(path.name, [*(file.name for file in path.parent.glob("*.toml")), *recipes])
    raise FileNotFoundError(
        f"config: got {config}, expected a TOML file or one of the recipes {', '.join(recipes)}{hint}"
    )


def data_of(model: str | Path, overrides: Iterable[str] = ()) -> DataConfig:
    """The training data of the run in a folder, with overrides as in `load_config`. Ignores keys of other versions.

    Raises ValueError if `model` is not a run folder.
    """
    recipe = Path(model) / "train.toml"
    if not recipe.is_file():
        raise ValueError(
            f"--data: got nothing, expected a data set, as {model} is not a run folder"
        )
    section = _read(recipe).get("data", {})
    return _data_section(
        {key: section[key] for key in DataConfig.model_fields.keys() & section}, overrides
    )


def data_config(name: str, overrides: Iterable[str]) -> DataConfig:
    """The section `data` of a recipe with this name only, with overrides as in `load_config`."""
    return _data_section({"name": name}, overrides)


def _data_section(data: dict[str, Any], overrides: Iterable[str]) -> DataConfig:
    table = {"model": {"name": "any"}, "train": {"epochs": 1}, "data": data}
    return parse_config(_overridden(table, overrides)).data


def run_name(config: str | Path, overrides: Iterable[str]) -> str:
    """Name of the run folder: CONFIG, or CONFIG-MODEL if the overrides name a model."""
    model = _overridden({"model": {}}, overrides)["model"].get("name")
    name = config_path(config).stem
    return f"{name}-{model}" if model else name


def load_config(config: str | Path, overrides: Iterable[str] = ()) -> Config:
    """The validated config of a TOML file or recipe, `overrides` ("section.key=value") applied in order."""
    return parse_config(_overridden(_read(config_path(config)), overrides))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, or nested too deeply
        raise ValueError(f"config: got {path}, expected TOML: {error}") from error


def parse_config(table: Mapping[str, Any]) -> Config:
    try:
        return Config.model_validate(table)
    except ValidationError as error:
        raise ValueError("\n".join(_describe(e) for e in error.errors())) from error


def _overridden(whole: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """The table with each `section.key=value` inserted; values other than TOML are text."""
    if isinstance(overrides, str):
        overrides = [overrides]
    for override in overrides:
        if not isinstance(override, str):
            raise ValueError(f"--set: got {override!r}, expected text such as train.epochs=3")
        key, equals, text = override.partition("=")
        *sections, name = key.strip().split(".")
        if not equals or "" in (*sections, name):
            raise ValueError(f"--set: got {override!r}, expected key=value such as train.epochs=3")
        table = whole
        for section in sections:
            if not isinstance(table.get(section), dict):
                table[section] = {}
            table = table[section]
        try:
            table[name] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            table[name] = text
    return whole


def _describe(error: Mapping[str, Any]) -> str:
    path = ".".join(map(str, error["loc"]))
    expected = error["msg"].removeprefix("Input should be ")
    match error["type"]:
        case "value_error":  # from Config._consistent, whose messages name their keys
            return str(error["ctx"]["error"])
        case "missing":
            return f"{path}: got nothing, expected a value"
        case "extra_forbidden":
            return f"{path}: got an unknown key, expected {_known_keys(*error['loc'])}"
        case "model_type" | "dict_type":
            expected = "a table"
        case "literal_error":
            expected += did_you_mean(str(error["input"]), re.findall(r"'(\w+)'", expected))
    return f"{path}: got {error['input']!r}, expected {expected}"


def _known_keys(*path: str) -> str:
    """The keys of the same section, and the nearest key of any section."""
    any_config = Config(model=ModelConfig(name="any"), train=TrainConfig(epochs=1))
    keys = any_config.model_dump()
    near = {key: f"{section}.{key}" for section in keys for key in keys[section]}
    siblings = keys[path[0]] if len(path) > 1 else keys
    near |= {key: ".".join((*path[:-1], key)) for key in siblings}
    found = difflib.get_close_matches(path[-1], near, n=1)
    hint = f" (did you mean {near[found[0]]}?)" if found else ""
    return f"one of {', '.join(siblings)}{hint}"


def dump_config(config: Config) -> str:
    """The effective config as TOML; parsing it gives an equal config."""
    return tomli_w.dumps(config.model_dump())
