"""Model folders opened: checked, and built by timm."""

from pathlib import Path
from typing import Any

import timm
from safetensors import SafetensorError
from torch import nn

from sa_zoo.folders.check import check_name, checked
from sa_zoo.folders.write import check_sums


def load_model(source: str) -> nn.Module:
    """A trained model: a folder, "local-dir:FOLDER", "hf-hub:OWNER/NAME" or a timm name. Raises as `build_model`."""
    if Path(source).is_dir():
        check_sums(Path(source))
        source = f"local-dir:{source}"
    kind, colon, name = source.partition(":")
    if not colon:
        check_name(source, "a model folder or a timm name")
    elif kind == "local-dir" and not (Path(name) / "config.json").is_file():
        raise FileNotFoundError(
            f"model: got {source}, expected a model folder, with config.json in it"
        )
    with checked(source) as source:
        return build_model(source, pretrained=True, model_name=source)


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
