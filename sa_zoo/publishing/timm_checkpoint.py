"""Reads pickles of tensors from timm's trainer, timm's `save_for_hf` and the paper's code, without running code."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import resolve_data_config
from timm.models import clean_state_dict
from torch import Tensor, nn

from sa_zoo.folders.check import PARAMETERS, Arguments, at_most, check_name
from sa_zoo.folders.write import write_file, write_tensors
from sa_zoo.publishing.paper_checkpoint import state_from_paper

PICKLED = "pytorch_model.bin"  # weights in a timm folder without safetensors


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The content of a torch.save file: tensors and, as in timm's trainer, argparse.Namespace.

    Raises ValueError if it is damaged or holds anything else.
    """
    try:
        with torch.serialization.safe_globals([Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises any type of error for other files
        raise ValueError(
            f"checkpoint: got {path}, expected a complete file that torch.save wrote, with tensors only"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"checkpoint: got a {type(content).__name__} in {path}, expected a dict")
    return content


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
            network = timm.create_model(name, **arguments)
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
    return clean_state_dict(content.get("state_dict_ema") or content["state_dict"])


def with_safetensors(source: Path, folder: Path) -> Path:
    """A folder of timm's `save_for_hf` with its weights as safetensors: `source`, or a copy in the empty `folder`."""
    if not (source / PICKLED).is_file() or (source / "model.safetensors").is_file():
        return source
    weights = clean_state_dict(read_checkpoint(source / PICKLED))
    write_tensors(folder / "model.safetensors", weights)
    write_file(folder / "config.json", (source / "config.json").read_bytes())
    return folder
