"""Models by timm name or by folder: built, initialised, frozen, loaded. Nothing here knows what is inside one."""

import difflib
import re
from pathlib import Path

import timm
from safetensors import SafetensorError
from timm.data import resolve_input_data_config
from timm.models import resolve_model_input_args
from torch import nn

from sa_zoo.training.config import ModelConfig
from sa_zoo.training.data import InputFormat


def create_model(config: ModelConfig, classes: int, image_size: int = 0) -> nn.Module:
    """The model of a config, with its initial weights and its frozen parameters.

    Raises ValueError for a name, an argument or a regular expression that fits nothing, and what `_built` raises.
    """
    _check_name(config.name)
    source = config.init or config.name
    try:
        resolved = resolve_model_input_args(
            source, {"img_size": image_size or None}, **config.args, num_classes=classes
        )
    except (OSError, RuntimeError) as error:
        raise FileNotFoundError(f"model.init: got {source}, expected weights: {error}") from error
    if resolved["model_name"] != config.name.partition(".")[0]:
        raise ValueError(f"model.init: got weights of {resolved['model_name']} in {source}, expected {config.name}")
    model = _built(source, pretrained=bool(config.init), **resolved)
    if config.freeze:
        _freeze(model, config.freeze)
    return model


def load_model(source: str) -> nn.Module:
    """A trained model: a run folder, "local-dir:...", "hf-hub:..." or a timm name."""
    if Path(source).is_dir():
        source = f"local-dir:{source}"
    if ":" not in source:
        _check_name(source, "a run folder or a timm name")
    elif source.startswith("local-dir:") and not (folder := Path(source.partition(":")[2]) / "config.json").is_file():
        raise FileNotFoundError(f"model: got {source}, expected a folder of a finished run, with {folder.name} in it")
    return _built(source, pretrained=True, model_name=source)


def input_format(model: nn.Module, image_size: int = 0) -> InputFormat:
    """What images the model takes; `image_size` counts where the model leaves the size open."""
    given = image_size or getattr(model, "_traits", {}).get("img_size")
    form = resolve_input_data_config(model, {"img_size": given or None})
    channels = form["input_size"][0]
    mean, std = (tuple(form[key]) * (channels // len(form[key])) for key in ("mean", "std"))
    return InputFormat(form["input_size"], mean, std, form["interpolation"], form["crop_pct"])


def _check_name(name: str, expected: str = "a timm name") -> None:
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"model.name: got {name}, expected {expected}{hint}")


def _built(source: str, pretrained: bool, **arguments) -> nn.Module:
    """timm.create_model, its failures told in words.

    Raises FileNotFoundError where there are no weights, ValueError where they are damaged or of another model.
    """
    try:
        return timm.create_model(**arguments, pretrained=pretrained)
    except SafetensorError as error:
        raise ValueError(f"weights: got a truncated or damaged file in {source}: {error}") from error
    except OSError as error:
        raise FileNotFoundError(f"weights: got none from {source}: {error}") from error
    except TypeError as error:
        raise ValueError(f"model.args: got an argument that {source} does not take: {error}") from error
    except RuntimeError as error:
        if "state_dict" in str(error) or "inconsistent" in str(error):
            differences = " ".join(str(error).split())
            raise ValueError(f"weights: got those of another model in {source}: {differences}") from error
        raise FileNotFoundError(f"weights: got none from {source}: {error}") from error


def _freeze(model: nn.Module, pattern: str) -> None:
    named = dict(model.named_parameters())
    found = [name for name in named if re.search(pattern, name)]
    if len(found) in (0, len(named)):
        raise ValueError(f"model.freeze: got {pattern!r}, which finds {len(found)} of {len(named)} parameters")
    for name in found:
        named[name].requires_grad_(False)
