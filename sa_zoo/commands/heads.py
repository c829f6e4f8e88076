"""`sa-zoo heads`: measures of the heads of a model. docs/heads.md has the definitions."""

from typing import Any

import torch

from sa_zoo.analysis.heads import heads_table, measure
from sa_zoo.analysis.maps import attention_layers
from sa_zoo.commands.evaluate import data_for
from sa_zoo.opened import open_model
from sa_zoo.training.device import open_accelerator, process_as_found
from sa_zoo.training.evaluate import open_test_split

MEASURED_IMAGES = 32  # test images to average content-dependent maps over


def measure_heads(model: str, data: str) -> str:
    """The output of the command, as Markdown. Arguments as on the command line; without data, those of the run.

    Raises ValueError for a network without attention, and the errors of `open_model`.
    """
    opened = open_model(model)
    network: Any = opened.network
    layers = attention_layers(network, torch.zeros(1, *network.pretrained_cfg["input_size"]))
    if not all(layer.positional for layer in layers):
        with process_as_found():
            _, split = open_test_split(opened, data_for(model, data), open_accelerator())
        layers = attention_layers(network, split.first(MEASURED_IMAGES).cpu())
    return heads_table([measure(layer) for layer in layers])
