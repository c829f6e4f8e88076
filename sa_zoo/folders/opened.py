"""A model opened: checked and built once, and passed on to everything that a command does with it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
from safetensors import SafetensorError
from torch import nn

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


def open_model(source: str) -> Opened:
    """Open a model folder, "local-dir:FOLDER", "hf-hub:OWNER/NAME" or a timm name with weights.

    Raises FileNotFoundError if there is no such model or it has no weights, ValueError for a folder that is damaged,
    names something foreign or holds another model's weights.
    """
    if Path(source).is_dir():
        source = f"local-dir:{source}"
    kind, colon, name = source.partition(":")
    folder = Path(name) if kind == "local-dir" else None
    if not colon:
        check_name(source, "a model folder or a timm name")
    elif folder and not (folder / "config.json").is_file():
        raise FileNotFoundError(f"model: got {source}, expected a model folder, with config.json")
    if folder:
        check_sums(folder)
    with checked(source) as source:
        network = build_model(source, pretrained=True, model_name=source).eval()
    config = read_json(folder / "config.json") if folder else {}
    return Opened(source, folder, network, config, read_metrics(folder) if folder else Metrics())


def load_model(source: str) -> nn.Module:
    """The network of `open_model`."""
    return open_model(source).network


def build_model(source: str, pretrained: bool, **arguments: Any) -> nn.Module:
    """`timm.create_model`; FileNotFoundError if `source` has no weights, ValueError if they or arguments do not fit."""
    try:
        return timm.create_model(**arguments, pretrained=pretrained)
    except SafetensorError as error:
        raise ValueError(
            f"weights: got a truncated or damaged file in {source}: {error}"
        ) from error
    except ValueError:
        raise
    except (OSError, RuntimeError) as error:
        message = " ".join(str(error).split())
        if isinstance(error, RuntimeError) and (
            "state_dict" in message or "inconsistent" in message
        ):
            raise ValueError(
                f"weights: got those of another model in {source}: {message}"
            ) from error
        raise FileNotFoundError(f"weights: got none from {source}: {message}") from error
    except Exception as error:  # whatever a network says to numbers that make no sense
        message = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"model.args: got what {source} cannot be built with: {message}"
        ) from error
