"""python scripts/study_sizes.py NETWORK CNN --data DATA [--sizes 24,32,40,48]

Measures what networks make of test images of other sizes than they were trained with, without training: an attention
network as it is and with its heads scaled with the image, and a CNN. Both are folders. Writes docs/sizes.json.
"""

import argparse
import copy
from pathlib import Path

import torch
from timm.data import resolve_model_data_config
from torch import Tensor, nn
from torch.nn.functional import interpolate

from sa_zoo.folders.opened import open_folder
from sa_zoo.folders.write import write_json
from sa_zoo.models.network import SANet, attention_in
from sa_zoo.training.config import data_of
from sa_zoo.verbs.heads import TestImages

RESULTS = Path(__file__).parents[1] / "docs" / "sizes.json"


class Resized(nn.Module):
    """A network that is given images of another size."""

    def __init__(self, network: nn.Module, size: int) -> None:
        super().__init__()
        self.network = network
        self.size = size

    def forward(self, images: Tensor) -> Tensor:
        resized = interpolate(images, self.size, mode="bicubic", antialias=True)
        return self.network(resized)


@torch.no_grad()
def scaled(network: SANet, ratio: float) -> SANet:
    """A copy for images that are `ratio` times as large: each head covers the same part of the image."""
    copied = copy.deepcopy(network)
    for layer in attention_in(copied.blocks).values():
        for term in layer.terms:
            term.Delta.mul_(ratio)
            term.spread.div_(ratio)
    return copied


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("network", "cnn"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--data", required=True)
    parser.add_argument("--sizes", default="24,32,40,48")
    arguments = parser.parse_args()
    attention = open_folder(arguments.network).network.eval()
    cnn = open_folder(arguments.cnn).network.eval()
    data = data_of(str(arguments.network)).model_copy(update={"name": arguments.data})
    test = TestImages(attention, data)
    trained = resolve_model_data_config(attention)["input_size"][-1]
    rows = []
    for size in map(int, arguments.sizes.split(",")):
        networks = {
            "as trained": attention,
            "scaled": scaled(attention, size / trained),
            "cnn": cnn,
        }
        accuracy = {name: test.accuracy(Resized(net, size)) for name, net in networks.items()}
        rows.append({"size": size, "accuracy": accuracy})
        print(rows[-1], flush=True)
    names = {"network": arguments.network.name, "cnn": arguments.cnn.name}
    write_json(RESULTS, {**names, "images": len(test.split), "trained": trained, "rows": rows})


if __name__ == "__main__":
    main()
