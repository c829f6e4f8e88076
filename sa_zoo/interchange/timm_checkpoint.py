"""Reads what timm's trainer and timm's `save_for_hf` leave: pickles of tensors, read without running code in them."""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save
from timm.data import resolve_data_config
from timm.models import clean_state_dict
from torch import nn

from sa_zoo.folders.check import PARAMETERS, Arguments, at_most, check_name
from sa_zoo.folders.write import write_file

PICKLED = "pytorch_model.bin"  # the weights in a folder that timm wrote without safetensors


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What torch.save wrote; of other classes than tensors, it may hold argparse.Namespace, as timm's trainer writes.

    Raises FileNotFoundError if there is no file, ValueError if it is damaged or holds anything else.
    """
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint: got {path}, expected a file")
    try:
        with torch.serialization.safe_globals([Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises errors of any kind for files that are not its own
        expected = "a complete file that torch.save wrote, with tensors only"
        raise ValueError(f"checkpoint: got {path}, expected {expected}") from error
    if not isinstance(content, dict):
        raise ValueError(f"checkpoint: got a {type(content).__name__} in {path}, expected a dict")
    return content


@contextmanager
def checkpoint_of(path: Path, model: str) -> Iterator[None]:
    """Bound the size of the network `model` that the block builds; its errors become ValueError, with the path."""
    try:
        with at_most(PARAMETERS):
            yield
    except Exception as error:  # a checkpoint of something else leads to errors of any kind
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"checkpoint: got {path}, expected one of {model}: {reason}") from error


def network_from_checkpoint(path: Path, model: str = "") -> tuple[nn.Module, dict[str, Any]]:
    """The network in a checkpoint of timm's trainer, such as model_best.pth.tar, and what it expects of images.

    Takes the averaged weights if there are any. `model` is the timm name, if the checkpoint does not have it.
    Raises ValueError for a checkpoint of another network, and what `read_checkpoint` raises.
    """
    content = read_checkpoint(path)
    name = model or str(content.get("arch"))
    check_name(name, f"the timm name of the network in {path}, as --model")
    with checkpoint_of(path, name):
        settings = vars(content.get("args", Namespace()))
        state = clean_state_dict(content.get("state_dict_ema") or content["state_dict"])
        classifier = timm.models.get_pretrained_cfg(name).classifier  # type: ignore[union-attr]
        arguments = {
            "num_classes": settings.get("num_classes") or len(state[f"{classifier}.weight"]),
            "in_chans": settings.get("in_chans"),
            "global_pool": settings.get("gp"),
            **(settings.get("model_kwargs") or {}),
        }
        arguments = {key: value for key, value in arguments.items() if value is not None}
        Arguments.model_validate(arguments)
        network = timm.create_model(name, **arguments)
        network.load_state_dict(state)
    return network.eval(), resolve_data_config(settings, model=network)


def write_safely(source: Path, folder: Path) -> None:
    """Write the folder of timm's `save_for_hf` whose weights are in PICKLED as one with safetensors, into `folder`."""
    weights = clean_state_dict(read_checkpoint(source / PICKLED))
    write_file(folder / "model.safetensors", save(weights, {"format": "pt"}))
    write_file(folder / "config.json", (source / "config.json").read_bytes())
