"""heads.safetensors: the positional parameters of a run, epoch by epoch, from which figures show how heads move."""

import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import nn

from sa_zoo.model_folder import write_file

HEADS = "heads.safetensors"
# Parameters of score terms that depend on positions alone, by their names in state dicts.
POSITIONAL = re.compile(r"(^|\.)(Delta|spread|alpha|terms\.\d+\.(row|col|w|v|P))$")


def record_heads(folder: Path, model: nn.Module, epoch: int) -> None:
    """Write row `epoch` of every positional parameter; row 0 is the initialization.

    Each tensor of the file is (epochs + 1, *shape of the parameter). Later rows are dropped: a resumed run writes them
    again. Nothing is written for a model without such parameters.
    """
    rows = {name: value.detach().cpu() for name, value in model.named_parameters() if POSITIONAL.search(name)}
    if not rows:
        return
    earlier = load_file(folder / HEADS) if epoch else {}
    stacked = {name: torch.stack([*earlier.get(name, ())[:epoch], row]) for name, row in rows.items()}
    write_file(folder / HEADS, save(stacked, {"format": "pt"}))
