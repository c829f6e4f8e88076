"""python scripts/study_sizes.py NETWORK... --data DATA [--sizes 24,32,40,48]

Measures what networks make of test images of other sizes than they were trained with, without training: CNNs as they
are, and attention also with its heads scaled with the image. Networks are folders. Writes docs/sizes.json.
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
    parser.add_argument("networks", type=Path, nargs="+")
    parser.add_argument("--data", required=True)
    parser.add_argument("--sizes", default="24,32,40,48")
    arguments = parser.parse_args()
    networks = {folder.name: open_folder(folder).network.eval() for folder in arguments.networks}
    data = data_of(str(arguments.networks[0])).model_copy(update={"name": arguments.data})
    first = next(iter(networks.values()))
    test = TestImages(first, data)
    trained = resolve_model_data_config(first)["input_size"][-1]
    rows = []
    for size in map(int, arguments.sizes.split(",")):
        accuracy = {}
        for name, network in networks.items():
            found = {"as trained": test.accuracy(Resized(network, size))}
            if isinstance(network, SANet):
                larger = scaled(network, size / trained)
                found["with scaled heads"] = test.accuracy(Resized(larger, size))
            accuracy[name] = found
        rows.append({"size": size, "accuracy": accuracy})
        print(rows[-1], flush=True)
    write_json(RESULTS, {"images": len(test.split), "trained": trained, "rows": rows})


if __name__ == "__main__":
    main()
