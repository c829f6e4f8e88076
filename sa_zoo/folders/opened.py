"""A model opened: checked and built once, and passed on to everything that a command does with it."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import timm
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from sa_zoo.folders.check import check_name, checked
from sa_zoo.folders.metrics import Metrics, read_metrics
from sa_zoo.folders.write import check_sums, read_json


@dataclass(frozen=True)
class Opened:
    """A trained model, and what its folder says of it."""

    source: str  # what timm loads: "local-dir:FOLDER", "hf-hub:OWNER/NAME@REVISION" or a timm name
    folder: Path | None  # of the model; None for what is not a folder on this machine
    network: nn.Module  # on the CPU, in evaluation mode
    config: dict[str, Any]  # config.json; empty without a folder
    metrics: Metrics  # metrics.json; empty without one

    @property
    def local_folder(self) -> Path:
        """`folder`. Raises ValueError for a model that is not in a folder on this machine."""
        if self.folder is None:
            raise ValueError(f"model: got {self.source}, expected a folder on this machine")
        return self.folder

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of a file in the folder; none without one. Raises ValueError if the file is damaged."""
        if self.folder is None or not (self.folder / name).is_file():
            return {}
        try:
            return load_file(self.folder / name)
        except SafetensorError as error:
            message = f"{self.folder / name}: got a truncated or damaged file: {error}"
            raise ValueError(message) from error

    def moved(self, folder: Path) -> "Opened":
        """The same in another folder, to which it was moved."""
        return replace(self, source=f"local-dir:{folder}", folder=folder)


def open_model(source: str) -> Opened:
    """Open a model folder, "local-dir:FOLDER", "hf-hub:OWNER/NAME" or a timm name with weights.

    Raises FileNotFoundError if there is no such model or it has no weights, ValueError for a folder that is damaged,
    names something foreign or holds another model's weights.
    """
    folder = folder_of(source)
    if folder:
        return open_folder(folder)
    if ":" not in source:
        check_name(source, "a model folder or a timm name")
    source, network = _loaded(source)
    return Opened(source, None, network, {}, Metrics())


def folder_of(source: str) -> Path | None:
    """The folder that a source names; None for other sources. Raises FileNotFoundError if it is not there."""
    kind, _, name = source.rpartition(":")
    folder = Path(name)
    if kind not in ("", "local-dir") or (not kind and os.sep not in name and not folder.is_dir()):
        return None
    if not folder.is_dir():
        raise FileNotFoundError(f"model: got {folder}, which is not there; expected a model folder")
    return folder


def open_folder(folder: Path) -> Opened:
    """Open a model folder on this machine; raises as `open_model` does."""
    folder_of(f"local-dir:{folder}")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"model: got {folder}, expected a model folder, with config.json")
    check_sums(folder)
    source, network = _loaded(f"local-dir:{folder}")
    config = read_json(folder / "config.json")
    return Opened(source, folder, network, config, read_metrics(folder))


def _loaded(source: str) -> tuple[str, nn.Module]:
    """What was checked, with the revision if it is on a Hub, and its network."""
    with checked(source) as exact:
        return exact, build_model(exact, pretrained=True, model_name=exact).eval()


def build_model(source: str, pretrained: bool, **arguments: Any) -> nn.Module:
    """`timm.create_model`. Raises FileNotFoundError if `source` has no weights.

    Raises ValueError if the weights or the arguments do not fit, or the weights have NaN or infinity.
    """
    try:
        network = timm.create_model(**arguments, pretrained=pretrained)
    except SafetensorError as error:
        message = f"weights: got a truncated or damaged file in {source}: {error}"
        raise ValueError(message) from error
    except ValueError:
        raise
    except (OSError, RuntimeError) as error:
        message = " ".join(str(error).split())
        of_another = "state_dict" in message or "inconsistent" in message
        if isinstance(error, RuntimeError) and of_another:
            message = f"weights: got those of another model in {source}: {message}"
            raise ValueError(message) from error
        raise FileNotFoundError(f"weights: got none from {source}: {message}") from error
    except Exception as error:  # networks raise errors of any kind for numbers that make no sense
        message = f"{type(error).__name__}: {error}"
        message = f"model.args: got arguments that {source} cannot be built with: {message}"
        raise ValueError(message) from error
    for name, tensor in network.state_dict().items():
        if pretrained and not tensor.isfinite().all():
            raise ValueError(f"weights: got NaN or infinity in {name} of {source}")
    return network
