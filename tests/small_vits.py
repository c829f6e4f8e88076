"""Small vision transformers of timm, and what their attention is by hand."""

import timm
import torch
from torch import nn
from torch.nn.functional import linear

H, W = 5, 7  # patches of 4 x 4 pixels
NAME = "vit_tiny_patch16_224"
SIZES = {"img_size": (20, 28), "patch_size": 4, "depth": 2}


def vit(name=NAME, **arguments):
    """A network for images of 20 x 28 pixels."""
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=11, **SIZES | arguments).eval()


def noisy(network):
    """The network with weights that are large enough for attention to look at content."""
    for parameter in network.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    return network


def images(count=2):
    return torch.randn(count, 3, 20, 28, generator=torch.Generator().manual_seed(1))


def seen_by_layers(network, x):
    """The input and the output of each layer of attention."""
    seen = []
    hooks = [
        block.attn.register_forward_hook(lambda layer, given, out: seen.append((given[0], out)))
        for block in network.blocks
    ]
    with torch.no_grad():
        network(x)
    for hook in hooks:
        hook.remove()
    return seen


def by_hand(layer, X, prefix):
    """Probabilities and values from the weights, in float64: (B, N_h, N, N) and (B, N_h, N, d)"""
    X, weights = X.double(), {name: each.double() for name, each in layer.state_dict().items()}
    qkv = linear(X, weights["qkv.weight"], weights["qkv.bias"])
    q, k, v = qkv.unflatten(-1, [3, layer.num_heads, -1]).permute(2, 0, 3, 1, 4)
    if "q_norm.weight" in weights:
        sizes = [layer.head_dim]
        q = nn.functional.layer_norm(
            q, sizes, weights["q_norm.weight"], weights["q_norm.bias"], 1e-6
        )
        k = nn.functional.layer_norm(
            k, sizes, weights["k_norm.weight"], weights["k_norm.bias"], 1e-6
        )
    scores = q @ k.mT / layer.head_dim**0.5
    if "alpha" in weights:
        pixels = [(y, x) for y in range(H) for x in range(W)]
        for i, (y, x) in enumerate(pixels):
            for j, key in enumerate(pixels):
                away = torch.tensor(key) - torch.tensor([y, x]) - weights["Delta"].view(-1, 2)
                scores[:, :, prefix + i, prefix + j] -= weights["alpha"] * away.square().sum(1)
    return scores.softmax(-1), v
