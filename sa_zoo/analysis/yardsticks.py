"""What a network of attention is measured beside: its other evaluations, and 3x3 convolutions in attention's place."""

import copy

from timm.utils import reparameterize_model
from torch import Tensor, nn

from sa_zoo.models.network import SANet


class Convolution(nn.Conv2d):
    """A 3x3 convolution of tokens."""

    def forward(self, X: Tensor) -> Tensor:
        """(B, H, W, D) -> (B, H, W, D)"""
        return super().forward(X.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def with_convolutions(network: SANet) -> SANet:
    """A copy with the same channels and feed-forward layers, whose blocks mix pixels by 3x3 convolutions."""
    twin, dim, like = copy.deepcopy(network), network.embed_dim, network.patch_embed.weight
    for block in twin.blocks:
        block.attn = Convolution(dim, dim, 3, padding=1, device=like.device, dtype=like.dtype)
    return twin


def evaluations(network: SANet) -> dict[str, SANet]:
    """A network of attention, and the same weights by the definition."""
    return {"as built": network, "explicit": network.explicit()}


def beside(network: nn.Module) -> dict[str, nn.Module]:
    """A network, and where it is one of attention what its speed is compared with, and itself with W_out folded."""
    if not isinstance(network, SANet):
        return {"as built": network}
    folded = reparameterize_model(network)
    return evaluations(network) | {"folded": folded, "3x3 convolutions": with_convolutions(network)}
