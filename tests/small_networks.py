"""Small networks of every type."""

import timm
import torch
from torch import nn

import sa_zoo  # noqa: F401  registers the names
from sa_zoo.models.timm_network import TimmNetwork
from sa_zoo.models.variants import TYPES

ONE_STAGE = {"embed_dim": 7, "depth": 3, "num_heads": 2, "hidden_dim": 13, "patch_size": 4}
PLAIN = {"embed_dim": (7, 5, 11), "depth": (2, 1, 3), "num_heads": 2}
NETWORKS = dict.fromkeys(TYPES, ONE_STAGE | {"img_size": (12, 20)})
NETWORKS["plain"] = PLAIN | {"img_size": (24, 40)}
# 7 x 5 tokens, five heads
SMALL = {"img_size": (28, 20), "patch_size": 4, "embed_dim": 11, "depth": 3}
SMALL |= {"hidden_dim": 13, "num_heads": 5, "num_classes": 7}


def small(name: str, **changes) -> TimmNetwork:
    """A network of the table, with statistics of batch norms away from zero and one."""
    torch.manual_seed(0)
    arguments = NETWORKS.get(name, {}) | {"num_classes": 11} | changes
    network = timm.create_model(f"sa_{name}_cifar", **arguments).eval()
    for norm in network.modules():
        if isinstance(norm, nn.BatchNorm2d):
            for values in (norm.weight, norm.bias, norm.running_mean):
                nn.init.normal_(values)
            nn.init.uniform_(norm.running_var, 0.5, 2.0)
    return network


def images(name: str, batch: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 3, *NETWORKS[name]["img_size"], generator=generator)


def small_network(variant: str = "quadratic", **changes) -> TimmNetwork:
    return small(variant, **SMALL | changes)


def pictures(count: int = 2, size: tuple[int, int] = (28, 20), channels: int = 3) -> torch.Tensor:
    return torch.rand(count, channels, *size, generator=torch.Generator().manual_seed(1))
