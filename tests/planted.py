"""Networks whose heads are known, for the tests of what is said about heads."""

import timm
import torch

KERNEL = [
    (row, column) for row in (-1, 0, 1) for column in (-1, 0, 1)
]  # displacements of a 3x3 kernel


def convolutional_network(name="sa_quadratic_tiny_cifar", **arguments):
    """A network with random weights whose nine heads per layer look at one pixel of a 3x3 kernel each."""
    torch.manual_seed(0)
    sizes = {
        "img_size": 16,
        "patch_size": 2,
        "embed_dim": 11,
        "depth": 2,
        "hidden_dim": 13,
        "num_heads": 9,
    }
    network = timm.create_model(name, **sizes | arguments).eval()
    with torch.no_grad():
        for block in network.blocks:
            block.attn.terms[0].Delta.copy_(torch.tensor(KERNEL))
            block.attn.terms[0].spread.fill_(12.0)
    return network
