"""Heads of timm's vision transformers as convolutions: against loops, planted heads and their own bound."""

import copy

import pytest
import timm
import torch
from torch import nn
from torch.nn.functional import linear

import sa_zoo
from sa_zoo.vit.convolve import local_heads, most_local, replace_heads

H, W = 5, 7
SIZES = {"img_size": (20, 28), "patch_size": 4, "embed_dim": 22, "num_heads": 2, "depth": 2}
PREFIXES = [
    {"class_token": False, "global_pool": "avg"},
    {},
    {"reg_tokens": 3, "no_embed_class": True, "qk_norm": True},
]


def vit(name="vit_tiny_patch16_224", **arguments):
    torch.manual_seed(0)
    network = timm.create_model(name, num_classes=11, **SIZES | arguments).eval()
    for parameter in network.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    return network


def images(count=3):
    return torch.randn(count, 3, 20, 28, generator=torch.Generator().manual_seed(1))


def convolved():
    network = vit()
    return replace_heads(network, local_heads(network, images()), [[0], []])


def inputs_of(network, x):
    """The inputs and outputs of each attention layer."""
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


def by_loops(layer, X, prefix, K, replaced):
    """The layer with heads replaced, the heads' distances and bounds: from the definitions, in float64."""
    heads, d, reach = layer.num_heads, layer.head_dim, K // 2
    X, weights = X.double(), {name: each.double() for name, each in layer.state_dict().items()}
    qkv = linear(X, weights["qkv.weight"], weights["qkv.bias"]).unflatten(-1, [3, heads, d])
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    if "q_norm.weight" in weights:
        q = nn.functional.layer_norm(q, [d], weights["q_norm.weight"], weights["q_norm.bias"], 1e-6)
        k = nn.functional.layer_norm(k, [d], weights["k_norm.weight"], weights["k_norm.bias"], 1e-6)
    scores = q @ k.mT * d**-0.5
    if "alpha" in weights:
        at = torch.cartesian_prod(torch.arange(H), torch.arange(W)).double()
        t = at + weights["Delta"].unflatten(0, [heads, 1, 2])
        delta = at - t[:, :, None]
        scores[..., prefix:, prefix:] -= weights["alpha"][:, None, None] * delta.square().sum(-1)
    P = scores.softmax(-1)
    mean = P.mean(0)
    out, distance = P @ v, torch.zeros(len(X), heads, H * W, dtype=torch.float64)
    token = lambda y, x: prefix + y * W + x  # noqa: E731
    inner = [(y, x) for y in range(reach, H - reach) for x in range(reach, W - reach)]
    window = [(i, j) for i in range(-reach, reach + 1) for j in range(-reach, reach + 1)]
    for h in range(heads):
        c = {
            (i, j): sum(mean[h, token(y, x), token(y + i, x + j)] for y, x in inner) / len(inner)
            for i, j in window
        }
        m = mean[h, prefix:, :prefix].mean(0)
        for y in range(H):
            for x in range(W):
                row = torch.zeros(X.shape[1], dtype=torch.float64)
                row[:prefix] = m
                for (i, j), value in c.items():
                    row[token(min(max(y + i, 0), H - 1), min(max(x + j, 0), W - 1))] += value
                distance[:, h, y * W + x] = (P[:, h, token(y, x)] - row).abs().sum(-1)
                if h in replaced:
                    out[:, h, token(y, x)] = torch.einsum("k,bkd->bd", row, v[:, h])
    largest = torch.stack(
        [
            linear(v[:, h], weights["proj.weight"][:, h * d : (h + 1) * d]).abs().amax((1, 2))
            for h in range(heads)
        ],
        dim=1,
    )
    bound = (distance.amax(2) * largest).amax(0)
    out = out.transpose(1, 2).flatten(2)
    return linear(out, weights["proj.weight"], weights["proj.bias"]), distance.mean((0, 2)), bound


@pytest.mark.parametrize("positions", [False, True], ids=["content", "positions"])
@pytest.mark.parametrize("arguments", PREFIXES, ids=["no tokens", "class", "registers"])
@pytest.mark.parametrize("K", [1, 3])
def test_replaced_heads_are_those_of_plain_loops(arguments, K, positions):
    network, x = vit(**arguments), images()
    if positions:
        drawn = torch.Generator().manual_seed(2)
        sa_zoo.add_positions(network, alpha=0.3, generator=drawn)
        for block in network.blocks:
            nn.init.uniform_(block.attn.alpha, 0.1, 0.7, generator=drawn)
    prefix = network.num_prefix_tokens
    before = inputs_of(network, x)
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
    twin, x = vit(img_size=(28, 20)), images().mT
    replace_heads(twin, local_heads(twin, x), [[0], []]).load_state_dict(network.state_dict())
    assert torch.equal(network(x), twin(x))


def test_a_network_of_convolutions_keeps_its_function():
    x = images()
    torch.manual_seed(0)
    sizes = SIZES | {"embed_dim": 66, "num_heads": 3} | PREFIXES[0]
    network = timm.create_model("vit_tiny_patch16_224", **sizes)
    sa_zoo.start_as_convolution(network, alpha=30.0, clip=float("inf"), images=x)
    with torch.no_grad():
        network.pos_embed *= 100  # content disturbs nothing
        expected = network(x)
        heads = sa_zoo.convolve_heads(network, x, below=0.01)
        assert heads == [[0, 1, 2], [0, 1, 2]]
        assert torch.allclose(network(x), expected, atol=1e-3 * float(expected.abs().max()))


def test_the_most_local_heads_of_all_layers_are_chosen():
    local = local_heads(vit(), images())
    ranked = torch.stack([heads.distance for heads in local]).flatten().sort()
    for most in range(5):
        some = most_local(local, most)
        assert sorted(2 * layer + head for layer in (0, 1) for head in some[layer]) == sorted(
            ranked.indices[:most].tolist()
        )
    assert most_local(local, below=float(ranked.values[2])) == most_local(local, 2)
    assert most_local(local) == [[0, 1], [0, 1]]
    for most in (-1, 5):
        with pytest.raises(ValueError, match=f"most: got {most}, expected a number from 0 to 4"):
            most_local(local, most)


@pytest.mark.parametrize(
    ("network", "K", "said"),
    [
        (lambda: vit(scale_attn_norm=True), 3, "vit: got scale_attn_norm=True, expected False"),
        (
            convolved,
            3,
            "vit: got ConvolvedAttention in block 0, expected timm's Attention without a gate",
        ),
        (lambda: vit(), 4, "window: got 4, expected an odd number up to 5"),
        (lambda: timm.create_model("resnet18"), 3, "vit: got ResNet, expected a VisionTransformer"),
        (
            lambda: vit(img_size=(28, 20)),
            3,
            r"images: got \(3, 3, 20, 28\), expected \(B, 3, 28, 20\)",
        ),
    ],
)
def test_what_cannot_be_replaced_is_refused(network, K, said):
    with pytest.raises(ValueError, match=said):
        sa_zoo.convolve_heads(network(), images(), K)
