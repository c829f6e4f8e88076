"""Small vision transformers of timm, and what their attention is by hand."""

import copy

import timm
import torch
from torch import nn

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
    layer = copy.deepcopy(layer).double().requires_grad_(False)
    qkv = layer.qkv(X.double()).unflatten(-1, [3, layer.num_heads, -1])
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    scores = layer.q_norm(q) @ layer.k_norm(k).mT / layer.head_dim**0.5
    if hasattr(layer, "alpha"):
        pixels = [torch.tensor((y, x)) for y in range(H) for x in range(W)]
        for i, query in enumerate(pixels):
            for j, key in enumerate(pixels):
                away = key - query - layer.Delta.view(-1, 2)
                scores[:, :, prefix + i, prefix + j] -= layer.alpha * away.square().sum(1)
    return scores.softmax(-1), v
