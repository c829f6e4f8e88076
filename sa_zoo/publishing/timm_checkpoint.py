"""Reads what timm's scripts, transformers and the paper's code save, without running code."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_file
from timm.data import resolve_data_config
from timm.models import clean_state_dict
from torch import Tensor, nn

from sa_zoo.folders.check import (
    PARAMETERS,
    Arguments,
    at_most,
    check_config,
    check_name,
    refusing,
)
from sa_zoo.folders.write import check_inside, read_json, write_json, write_tensors
from sa_zoo.publishing.paper_checkpoint import state_from_paper

PICKLED = "pytorch_model.bin"  # weights in a timm folder without safetensors
PROCESSOR = "preprocessor_config.json"


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The content of a torch.save file (tensors and, as in timm's trainer, argparse.Namespace) or safetensors file.

    Raises ValueError if it is damaged or holds anything else.
    """
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with torch.serialization.safe_globals([Namespace]):
            content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            return content
    except Exception as error:  # torch raises any type of error for other files
        raise ValueError(
            f"checkpoint: got {path}, expected a complete file that torch.save wrote, with tensors only"
        ) from error


def network_from_checkpoint(path: Path, model: str) -> tuple[nn.Module, dict[str, Any]]:
    """The network in a checkpoint of timm's trainer or of the paper's code, and its preprocessing.

    Takes the averaged weights if there are any. `model` is the timm name, or empty if the checkpoint has it.
    Raises ValueError for a checkpoint of another network, and the errors of `read_checkpoint`.
    """
    content = read_checkpoint(path)
    name = model or str(content.get("arch"))
    check_name(name, f"the timm name of the network in {path}, as --model")
    try:
        with at_most(PARAMETERS):
            settings = vars(content.get("args", Namespace()))
            state = _state_dict(content)
            classifier = timm.models.get_pretrained_cfg(name).classifier  # type: ignore[union-attr]
            arguments = {
                "num_classes": settings.get("num_classes") or len(state[f"{classifier}.weight"]),
                "in_chans": settings.get("in_chans"),
                "global_pool": settings.get("gp"),
                **(settings.get("model_kwargs") or {}),
            }
            Arguments.model_validate(arguments)
            network: Any = timm.create_model(name, **arguments)
            network.pretrained_cfg.pop("license", None)  # that of timm's own weights
            network.load_state_dict(state)
    except Exception as error:  # foreign checkpoints raise any type of error
        raise ValueError(
            f"checkpoint: got {path}, expected one of {name}: {type(error).__name__}: {error}"
        ) from error
    return network.eval(), resolve_data_config(settings, model=network)


def _state_dict(content: dict[str, Any]) -> dict[str, Tensor]:
    """The weights in a checkpoint, under timm's names."""
    if "model_state_dict" in content:
        return state_from_paper(content["model_state_dict"])
    if "state_dict" not in content:  # of timm's avg_checkpoints.py and clean_checkpoint.py
        return clean_state_dict(content)
    return clean_state_dict(content.get("state_dict_ema") or content["state_dict"])


def copy_model(source: Path, folder: Path) -> None:
    """Copy config, weights and image processor of a model folder, with the weights in one safetensors file.

    Without label_names of another number of classes, which transformers leaves when it changes the head. Raises
    ValueError for a folder of another kind.
    """
    check_config(source / "config.json")
    config = read_json(source / "config.json")
    # transformers refuses num_classes there; timm reads the outer one
    config.get("model_args", {}).pop("num_classes", None)
    if len(config.get("label_names") or ()) != config.get("num_classes"):
        config["label_names"] = None
    if (source / PROCESSOR).is_file():
        write_json(folder / PROCESSOR, read_json(source / PROCESSOR))
    write_json(folder / "config.json", config)
    with refusing(str(source)):
        write_tensors(folder / "model.safetensors", _weights(source))


def _weights(source: Path) -> dict[str, Tensor]:
    """The weights in a folder of transformers, in one file or several, or of timm's `save_for_hf`."""
    files = sorted(source.glob("model*.safetensors"))  # of several, the one with all is the last
    if not files:
        return clean_state_dict(read_checkpoint(source / PICKLED))
    weights: dict[str, Tensor] = {}
    for file in files:
        check_inside(source, file.name)
        weights |= load_file(file)
    return weights
