"""Heads of timm's vision transformers as convolutions: against loops, planted heads and their own bound."""

import copy

import pytest
import timm
import torch
from numpy_convolution import nearest_convolution
from small_vits import H, W, by_hand, images, noisy, seen_by_layers, vit
from torch import nn
from torch.nn.functional import linear

import sa_zoo
from sa_zoo.vit.convolve import local_heads, most_local, replace_heads

PREFIXES = [
    {"class_token": False, "global_pool": "avg"},
    {},
    {"reg_tokens": 3, "no_embed_class": True, "qk_norm": True},
]


def small(**arguments):
    return noisy(vit(**{"embed_dim": 22, "num_heads": 2} | arguments))


def convolved():
    network = small()
    return replace_heads(network, local_heads(network, images()), [[0], []])


def by_loops(layer, X, prefix, K, replaced):
    """The layer with heads replaced, the heads' distances and bounds: from the definitions, in float64."""
    P, v = by_hand(layer, X, prefix)
    mean = P.mean(0)[:, prefix:]  # queries are pixels
    _, C = nearest_convolution(mean[..., prefix:].numpy(), (H, W), K)
    m = mean[:, :, :prefix].mean(1, keepdim=True).expand(-1, H * W, -1)
    nearest = torch.cat([m, torch.from_numpy(C)], dim=-1)
    distance = (P[:, :, prefix:] - nearest).abs().sum(-1)
    for head in replaced:
        P[:, head, prefix:] = nearest[head]
    weight, bias = layer.proj.weight.double(), layer.proj.bias.double()
    of_heads = weight.unflatten(1, [layer.num_heads, -1]).unbind(1)
    largest = [linear(v[:, h], each).abs().amax((1, 2)) for h, each in enumerate(of_heads)]
    bound = (distance.amax(2) * torch.stack(largest, dim=1)).amax(0)
    out = linear((P @ v).transpose(1, 2).flatten(2), weight, bias)
    return out, distance.mean((0, 2)), bound


@pytest.mark.parametrize("positions", [False, True], ids=["content", "positions"])
@pytest.mark.parametrize("arguments", PREFIXES, ids=["no tokens", "class", "registers"])
@pytest.mark.parametrize("K", [1, 3])
def test_replaced_heads_are_those_of_plain_loops(arguments, K, positions):
    network, x = small(**arguments), images()
    if positions:
        drawn = torch.Generator().manual_seed(2)
        sa_zoo.add_positions(network, alpha=0.3, generator=drawn)
        for block in network.blocks:
            nn.init.uniform_(block.attn.alpha, 0.1, 0.7, generator=drawn)
    prefix = network.num_prefix_tokens
    before = seen_by_layers(network, x)
    local = local_heads(network, x, K)
    changed = replace_heads(copy.deepcopy(network), local, [[0], [0, 1]])
    for index, replaced in enumerate(([0], [0, 1])):
        layer, (X, Y) = network.blocks[index].attn, before[index]
        with torch.no_grad():
            expected, distance, bound = by_loops(layer, X, prefix, K, replaced)
            got = changed.blocks[index].attn(X)
        assert torch.allclose(local[index].distance.double(), distance, atol=1e-5)
        assert torch.allclose(got.double(), expected, atol=1e-4)
        assert torch.allclose(local[index].bound.double(), bound, rtol=1e-4)
        assert (got - Y).abs().max() <= bound[replaced].sum()


def test_the_grid_follows_the_input_size():
    network = convolved()
    network.set_input_size((28, 20))
    twin, x = small(img_size=(28, 20)), images().mT
    replace_heads(twin, local_heads(twin, x), [[0], []]).load_state_dict(network.state_dict())
    assert torch.equal(network(x), twin(x))


def test_a_network_of_convolutions_keeps_its_function():
    x = images()
    network = vit(embed_dim=66, num_heads=3, **PREFIXES[0])
    sa_zoo.start_as_convolution(network, alpha=30.0, clip=float("inf"), images=x)
    with torch.no_grad():
        network.pos_embed *= 100  # content disturbs nothing
        expected = network(x)
        heads = sa_zoo.convolve_heads(network, x, below=0.01)
        assert heads == [[0, 1, 2], [0, 1, 2]]
        assert torch.allclose(network(x), expected, atol=1e-3 * float(expected.abs().max()))


def test_the_most_local_heads_of_all_layers_are_chosen():
    local = local_heads(small(), images())
    ranked = torch.cat([heads.distance for heads in local]).sort()
    for most in range(5):
        numbers = [
            2 * layer + head for layer, some in enumerate(most_local(local, most)) for head in some
        ]
        assert numbers == sorted(ranked.indices[:most].tolist())
    assert most_local(local, below=float(ranked.values[2])) == most_local(local, 2)
    assert most_local(local) == [[0, 1], [0, 1]]
    for most in (-1, 5):
        with pytest.raises(ValueError, match=f"most: got {most}, expected a number from 0 to 4"):
            most_local(local, most)


@pytest.mark.parametrize(
    ("network", "K", "said"),
    [
        (lambda: small(scale_attn_norm=True), 3, "vit: got scale_attn_norm=True, expected False"),
        (convolved, 3, "vit: got ConvolvedAttention in block 0, expected timm's Attention"),
        (small, 4, "window: got 4, expected an odd number up to 5"),
        (lambda: timm.create_model("resnet18"), 3, "vit: got ResNet, expected a VisionTransformer"),
        (lambda: small(img_size=(28, 20)), 3, r"images: got .*, expected \(B, 3, 28, 20\)"),
    ],
)
def test_what_cannot_be_replaced_is_refused(network, K, said):
    with pytest.raises(ValueError, match=said):
        sa_zoo.convolve_heads(network(), images(), K)
