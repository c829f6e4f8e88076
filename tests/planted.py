"""Small networks for the tests, and ones whose heads are known."""

import timm
import torch

import sa_zoo  # noqa: F401  registers the names

# 7 x 5 tokens
SMALL = {"img_size": (28, 20), "patch_size": 4, "embed_dim": 11, "depth": 3}
SMALL |= {"hidden_dim": 13, "num_heads": 5, "num_classes": 7}
KERNEL = [
    (row, column) for row in (-1, 0, 1) for column in (-1, 0, 1)
]  # displacements of a 3x3 kernel


def small_network(variant="quadratic", **arguments):
    """A network with random weights, of sizes that are distinct primes."""
    torch.manual_seed(0)
    return timm.create_model(f"sa_{variant}_cifar", **SMALL | arguments).eval()


def images(count=2, size=(28, 20), channels=3):
    return torch.rand(count, channels, *size, generator=torch.Generator().manual_seed(1))


def convolutional_network(name="sa_quadratic_tiny_cifar", **arguments):
    """A network with random weights whose nine heads per layer look at one pixel of a 3x3 kernel each."""
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 2, "depth": 2, "num_heads": 9, "num_classes": 10}
    network = timm.create_model(name, **SMALL | sizes | arguments).eval()
    with torch.no_grad():
        for block in network.blocks:
            block.attn.terms[0].Delta.copy_(torch.tensor(KERNEL))
            block.attn.terms[0].spread.fill_(12.0)
    return network
