"""What is checked in a model folder before timm or transformers read it: it may come from anybody.

A folder that passes holds safetensors weights without NaN, names an architecture of timm, and takes neither weights nor
code from anywhere else. While it is loaded, the size of what is built is bounded.
"""

import difflib
import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import timm
from huggingface_hub import snapshot_download
from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator
from safetensors import SafetensorError, safe_open
from timm.models import parse_model_name
from torch import nn
from torch.nn.modules import module as registration

LARGEST = 2**20  # of any number in config.json
PARAMETERS = (
    2**26
)  # of all networks that are built while a folder is loaded; 8 times its weights, if that is more
SMALLEST = (
    2**13
)  # parameters that a tensor counts at least, so that a million tiny layers are too many, too
FILES = ["config.json", "model.safetensors"]


def _known(name: str) -> str:
    if not timm.is_model(name):
        raise ValueError("expected a name that timm lists")
    return name


Architecture = Annotated[str, AfterValidator(_known)]
Channels = Annotated[int, Field(ge=1, le=4)]
Side = Annotated[int, Field(ge=1, le=1024)]
Nothing = Literal[None, False, ""]  # for a key by which timm would take something from elsewhere


class Arguments(BaseModel):
    """`model_args`: the network's own arguments, and none of those of timm's factory."""

    cnn: Architecture | None = None
    pretrained: Nothing = None
    pretrained_cfg: Nothing = None
    pretrained_cfg_overlay: Nothing = None
    checkpoint_path: Nothing = None
    cache_dir: Nothing = None
    features_only: Nothing = None
    device: Nothing = None
    dtype: Nothing = None


class Pretrained(BaseModel):
    """`pretrained_cfg`: what timm does to images, and no other place to load weights from."""

    input_size: tuple[Channels, Side, Side] = (3, 224, 224)
    crop_pct: float = Field(1.0, ge=0.25, le=1)
    mean: list[float] = Field([0.0], min_length=1)
    std: list[Annotated[float, Field(gt=0)]] = Field([1.0], min_length=1)
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"] = (
        "bicubic"
    )
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


class FolderConfig(Pretrained):  # an older config.json has the keys of pretrained_cfg at the top
    architecture: Architecture
    model_args: Arguments = Arguments()
    pretrained_cfg: Pretrained = Pretrained()


@contextmanager
def checked(source: str) -> Iterator[str]:
    """Check "local-dir:FOLDER" or "hf-hub:OWNER/NAME", and bound what is built in the block; other names are timm's.

    Yields the name to load: of a repository, the revision that was checked. Raises ValueError for what is refused, with
    the file and the key, FileNotFoundError if a file is not there.
    """
    kind, name = parse_model_name(source)
    if not kind:
        yield source
        return
    folder = Path(name)
    if kind == "hf-hub":
        repo_id, _, revision = name.partition("@")
        try:
            folder = Path(
                snapshot_download(repo_id, revision=revision or None, allow_patterns=FILES)
            )
            source = f"hf-hub:{repo_id}@{folder.name}"
        except OSError as error:
            raise FileNotFoundError(f"weights: got none from {source}: {error}") from error
    if missing := [file for file in FILES if not (folder / file).is_file()]:
        raise FileNotFoundError(
            f"weights: got none from {source}, which lacks {', '.join(missing)}"
        )
    check_config(folder / "config.json")
    try:
        with at_most(max(PARAMETERS, 8 * check_weights(folder / "model.safetensors"))):
            yield source
    except (ValueError, OSError):
        raise
    except Exception as error:  # what else a file of somebody can lead to has no bounds
        raise ValueError(
            f"model: got {source}, which cannot be used: {type(error).__name__}: {error}"
        ) from error


def check_config(path: Path) -> None:
    """Raise ValueError for a config.json that names something foreign, or has numbers that no network needs."""

    def number(text: str) -> float:
        value = float(text)
        if not abs(value) <= LARGEST:
            raise ValueError(f"got the number {text[:20]}, expected at most {LARGEST:,}")
        return value if set(text) & set(".eEnN") else int(text)

    try:
        config = json.loads(
            path.read_bytes(), parse_int=number, parse_float=number, parse_constant=number
        )
        FolderConfig.model_validate(config)
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, each['loc']))}: got {each['input']!r}: {each['msg']}"
            for each in error.errors()
        ]
        raise ValueError(f"{path}: {'; '.join(lines)}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: got what is not the configuration of a model: {error}"
        ) from error


def check_weights(path: Path) -> int:
    """Elements in a file of weights as `at_most` counts. Raises ValueError if it is damaged, or has NaN or infinity."""
    elements = 0
    try:
        with safe_open(path, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  not a dictionary
                tensor = tensors.get_tensor(name)
                elements += max(tensor.numel(), SMALLEST)
                if tensor.is_complex() or not tensor.float().isfinite().all():
                    raise ValueError(
                        f"weights: got NaN, infinity or complex numbers in {name} of {path}"
                    )
    except SafetensorError as error:
        raise ValueError(f"weights: got a truncated or damaged file in {path}: {error}") from error
    return elements


@contextmanager
def at_most(limit: int) -> Iterator[None]:
    """Raise ValueError as soon as the networks that are built in the block have more than `limit` parameters."""
    elements = 0

    def count(module: nn.Module, name: str, tensor: Any) -> None:
        nonlocal elements
        elements += 0 if tensor is None else max(tensor.numel(), SMALLEST)
        if elements > limit:
            raise ValueError(
                f"got a network of more than {limit:,} parameters, not those of its weights"
            )

    with ExitStack() as hooks:
        hooks.enter_context(registration.register_module_parameter_registration_hook(count))
        hooks.enter_context(registration.register_module_buffer_registration_hook(count))
        yield


def check_name(name: str, expected: str = "a timm name") -> None:
    """Raise ValueError for a name that timm does not know."""
    if not timm.is_model(name):
        raise ValueError(
            f"model.name: got {name}, expected {expected}{did_you_mean(name, timm.list_models())}"
        )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the nearest known name, if one is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""
