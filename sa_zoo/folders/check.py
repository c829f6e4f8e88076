"""Checks of an untrusted model folder, before timm or transformers read it.

A checked folder holds safetensors weights, names an architecture of timm, and loads neither weights nor code from
elsewhere. While it is loaded, the size of its networks is bounded.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import timm
from huggingface_hub import snapshot_download
from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator
from safetensors import safe_open
from timm.models import parse_model_name
from torch import nn
from torch.nn.modules import module as registration

from sa_zoo.folders.messages import did_you_mean, mistakes

LARGEST = 2**20  # of any number in config.json
# Limit over all networks built while a folder is loaded; 8 times its weights if larger.
PARAMETERS = 2**26
# Each tensor counts as at least this many parameters, so a million tiny layers are refused too.
SMALLEST = 2**13
TIMM_FILES = ["config.json", "model.safetensors"]


def _known(name: str) -> str:
    if not timm.is_model(name):
        raise ValueError("expected a name that timm lists")
    return name


Architecture = Annotated[str, AfterValidator(_known)]
Channels = Annotated[int, Field(ge=1, le=4)]
Side = Annotated[int, Field(ge=1, le=1024)]
Nothing = Literal[None, False, ""]  # for keys that make timm load from elsewhere


class Arguments(BaseModel):
    """`model_args`: arguments of the network, none of timm's factory."""

    cnn: Architecture | None = None
    vit: Architecture | None = None
    img_size: Side | tuple[Side, Side] | None = None
    pretrained: Nothing = None
    pretrained_cfg: Nothing = None
    pretrained_cfg_overlay: Nothing = None
    checkpoint_path: Nothing = None
    cache_dir: Nothing = None
    features_only: Nothing = None
    device: Nothing = None
    dtype: Nothing = None


class Pretrained(BaseModel):
    """`pretrained_cfg`: the preprocessing of images, and no other source of weights."""

    input_size: tuple[Channels, Side, Side] = (3, 224, 224)
    crop_pct: float = Field(1.0, ge=0.25, le=1)
    crop_mode: Literal["center", "squash", "border"] = "center"
    interpolation: Literal["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"] = (
        "bicubic"
    )
    mean: list[float] = Field([0.0], min_length=1)
    std: list[Annotated[float, Field(gt=0)]] = Field([1.0], min_length=1)
    url: Nothing = None
    file: Nothing = None
    state_dict: Nothing = None
    hf_hub_filename: Nothing = None
    custom_load: Nothing = None

    @model_validator(mode="after")
    def _fitting(self) -> "Pretrained":
        if any(self.input_size[0] % len(values) for values in (self.mean, self.std)):
            raise ValueError("expected one value of mean and std per channel of input_size")
        return self


class FolderConfig(BaseModel):
    architecture: Architecture
    model_args: Arguments = Arguments()
    label_names: list[str] | None = None
    pretrained_cfg: Pretrained


@contextmanager
def checked(source: str) -> Iterator[str]:
    """Check "local-dir:FOLDER" or "hf-hub:OWNER/NAME", and bound networks built in the block; other names pass.

    Yields the name to load, for a repository with the checked revision. Raises ValueError with the file and the key for
    a refused folder, FileNotFoundError if a file is missing.
    """
    kind, name = parse_model_name(source)
    if not kind:
        yield source
        return
    folder = Path(name)
    if kind == "hf-hub":
        repo_id, _, revision = name.partition("@")
        try:
            snapshot = snapshot_download(
                repo_id, revision=revision or None, allow_patterns=TIMM_FILES
            )
        except OSError as error:
            raise FileNotFoundError(f"weights: got none from {source}: {error}") from error
        folder = Path(snapshot)
        source = f"hf-hub:{repo_id}@{folder.name}"
    missing = [file for file in TIMM_FILES if not (folder / file).is_file()]
    if missing:
        raise FileNotFoundError(
            f"weights: got none from {source}, which lacks {', '.join(missing)}"
        )
    check_config(folder / "config.json")
    limit = max(PARAMETERS, 8 * count_elements(folder / "model.safetensors"))
    with refusing(source), at_most(limit):
        yield source


@contextmanager
def refusing(source: str) -> Iterator[None]:
    """Turn errors in the block into ValueError: untrusted files raise errors of any type."""
    try:
        yield
    except (ValueError, OSError):
        raise
    except Exception as error:
        raise ValueError(
            f"model: got {source}, which cannot be used: {type(error).__name__}: {error}"
        ) from error


def check_config(path: Path) -> None:
    """Raise ValueError for a config.json with foreign names or implausible numbers."""

    def number(text: str) -> float:
        value = float(text)
        if not abs(value) <= LARGEST:
            raise ValueError(f"got the number {text[:20]}, expected at most {LARGEST:,}")
        return value

    def whole(text: str) -> int:
        return int(number(text))

    try:
        config = json.loads(
            path.read_bytes(), parse_int=whole, parse_float=number, parse_constant=number
        )
        FolderConfig.model_validate(config)
    except ValidationError as error:
        raise ValueError(f"{path}: {mistakes(error)}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: got a file that is not the configuration of a model: {error}"
        ) from error


def count_elements(path: Path) -> int:
    """Elements in a file of weights, from its header. Raises ValueError if the file is damaged."""
    with refusing(str(path)), safe_open(path, "pt") as tensors:
        names = tensors.keys()
        return sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)


@contextmanager
def at_most(limit: int) -> Iterator[None]:
    """Raise ValueError as soon as the networks built in the block have more than `limit` parameters."""
    elements = 0

    def count(module: nn.Module, name: str, tensor: Any) -> None:
        nonlocal elements
        if tensor is not None:
            elements += max(tensor.numel(), SMALLEST)
        if elements > limit:
            raise ValueError(
                f"got a network of more than {limit:,} parameters, not those of its weights"
            )

    with (
        registration.register_module_parameter_registration_hook(count),
        registration.register_module_buffer_registration_hook(count),
    ):
        yield


def check_name(name: str, expected: str = "a timm name") -> None:
    """Raise ValueError for a name unknown to timm."""
    if not timm.is_model(name):
        raise ValueError(
            f"model.name: got {name}, expected {expected}{did_you_mean(name, timm.list_models())}"
        )
