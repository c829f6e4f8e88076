"""Starts of timm's vision transformers as convolutions: what heads attend to, and that timm loads the result."""

import copy

import numpy as np
import pytest
import small_vits
import torch
from small_vits import H, W, by_hand, seen_by_layers

import sa_zoo
from sa_zoo.folders.opened import open_folder
from sa_zoo.training.config import parse_config
from sa_zoo.training.train import train
from sa_zoo.vit.layers import kernel_pixels, probabilities

SIZES = small_vits.SIZES | {"embed_dim": 65, "num_heads": 5, "depth": 3}
# a network of timm, what differs from SIZES, and its class and register tokens
NETWORKS = [
    ("vit_tiny_patch16_224", {}, 1),
    ("vit_tiny_patch16_224", {"class_token": False, "global_pool": "avg", "num_heads": 13}, 0),
    ("deit_tiny_distilled_patch16_224", {}, 2),
    ("vit_medium_patch16_reg4_gap_256", {}, 4),
    ("vit_base_patch16_clip_224", {}, 1),  # with a norm before the blocks
    ("vit_tiny_patch16_224", {"num_heads": 65 // 5, "embed_dim": 39}, 1),  # heads of 3 channels
]


def seeded(number=0):
    return torch.Generator().manual_seed(number)


def vit(name=small_vits.NAME, **arguments):
    return small_vits.vit(name, **SIZES | arguments)


def shares(network, images, prefix):
    """Attention of each head on q + Delta_h where that lies in the image, by hand from the weights: (depth, N_h)"""
    at = torch.tensor(list(np.ndindex(H, W)))
    Delta = kernel_pixels((H, W), network.blocks[0].attn.num_heads)
    target = (at[None] - at[:, None] == Delta[:, None, None]).all(-1)
    found = []
    for block, (X, _) in zip(network.blocks, seen_by_layers(network.eval(), images), strict=True):
        P = by_hand(block.attn, X, prefix)[0][:, :, prefix:, prefix:].mean(0)
        found.append([of_head[each].mean() for of_head, each in zip(P, target, strict=True)])
    return found


@pytest.mark.parametrize(("name", "arguments", "prefix"), NETWORKS)
def test_quadratic_heads_attend_to_their_pixels(name, arguments, prefix):
    network, images = vit(name, **arguments).train(), torch.randn(3, 3, 20, 28, generator=seeded())
    before = network.pos_embed.detach().clone()
    for block in network.blocks:
        torch.nn.init.ones_(block.attn.qkv.bias)
    share = sa_zoo.start_as_convolution(network, images=images, generator=seeded())
    assert network.training
    assert share.numpy() == pytest.approx(np.array(shares(network, images, prefix)), abs=1e-5)
    wide = network.blocks[0].attn.head_dim > 5
    assert share.min() > (0.6 if wide else 2 / (H * W))  # of 35 pixels
    plain = vit(name, **arguments)
    assert type(network) is type(plain) and network.state_dict().keys() == plain.state_dict().keys()
    for block, old in zip(network.blocks, plain.blocks, strict=True):
        values = [each.attn.qkv.weight.chunk(3)[2] for each in (block, old)]
        assert torch.equal(*values) and torch.equal(block.attn.proj.weight, old.attn.proj.weight)
        assert [part.unique().tolist() for part in block.attn.qkv.bias.chunk(3)] == [[0], [0], [1]]
    P = network.pos_embed[0, -H * W :].detach()
    assert torch.allclose(P.norm(dim=-1), P.norm(dim=-1).mean())
    assert P.sum(dim=-1).abs().max() < 1e-4  # nothing for the mean of LayerNorm to remove
    assert torch.equal(network.pos_embed[:, : -H * W], before[:, : -H * W])


def test_scores_are_the_parabola_that_was_asked_for():
    alpha, clip = 0.3, 6.0
    network = vit(embed_dim=130, class_token=False, global_pool="avg")
    images = 1e-3 * torch.randn(2, 3, 20, 28, generator=seeded())
    sa_zoo.start_as_convolution(network, alpha=alpha, clip=clip, images=images)
    positions, norm = network.pos_embed.detach(), network.blocks[0].norm1
    unit = torch.nn.functional.normalize(positions, dim=-1)
    with torch.no_grad():
        # Content disturbs nothing, and positions are as long as LayerNorm makes them.
        X = norm(1e3 * positions)
        P = probabilities(network.blocks[0].attn, X)[0]
        along = (norm(network.patch_embed(images) + positions) * unit).sum(-1).mean()
    sharper = float(((X * unit).sum(-1).mean() / along) ** 2)
    at = np.array(list(np.ndindex(H, W)))
    for h, Delta in enumerate(kernel_pixels((H, W), 5).numpy()):
        away = np.minimum((at[None] - at[:, None] - Delta) ** 2, clip).sum(-1)
        expected = np.exp(-alpha * sharper * away)
        expected /= expected.sum(-1, keepdims=True)
        assert P[h].numpy() == pytest.approx(expected, abs=1e-4)


def test_a_generator_decides_the_numbers_of_chosen_blocks():
    networks = [vit() for _ in range(4)]
    for network, seed in zip(networks, (3, 3, 4), strict=False):
        share = sa_zoo.start_as_convolution(network, blocks=[2, 0], generator=seeded(seed))
    assert share.shape == (2, 5)
    for index in range(3):
        first, same, other, plain = (network.blocks[index].attn.qkv.weight for network in networks)
        assert torch.equal(first, same)
        assert torch.equal(first, other) == torch.equal(first, plain) == (index == 1)


def test_kernel_pixels_are_the_nearest_first_and_lie_in_the_grid():
    assert sorted(map(tuple, kernel_pixels((5, 7), 9).tolist())) == [
        (y, x) for y in (-1, 0, 1) for x in (-1, 0, 1)
    ]
    assert kernel_pixels((5, 7), 5).abs().sum(1).tolist() == [0, 1, 1, 1, 1]
    small = kernel_pixels((1, 2), 7).tolist()
    assert small[0] == small[3] == [0, 0] and all(row == 0 and abs(x) < 2 for row, x in small)


@pytest.mark.parametrize(
    ("given", "arguments", "said"),
    [
        ({"pos_embed": "none"}, {}, "vit: got pos_embed=None, expected a learned position"),
        ({"qk_norm": True}, {}, "vit: got qk_norm=True, expected False"),
        ({"dynamic_img_size": True}, {}, "vit: got dynamic_img_size=True, expected"),
        ({"embed_dim": 10}, {}, "vit: got embed_dim=10, expected more than 12"),
        ({"attn_layer": "diff"}, {}, "vit: got DiffAttention in block 0, expected timm's"),
        ({}, {"blocks": [0, 3]}, r"blocks: got \[0, 3\], expected numbers from 0 to 2"),
        ({}, {"blocks": []}, r"blocks: got \[\], expected numbers from 0 to 2"),
        ({}, {"alpha": float("inf")}, "alpha: got inf, expected a positive number"),
        ({}, {"clip": 0.0}, "clip: got 0.0, expected a positive number or infinity"),
        ({}, {"images": torch.zeros(2, 3, 28, 20)}, r"images: got .*, expected \(B, 3, 20, 28\)"),
        ({"name": "vit_relpos_small_patch16_224"}, {}, "vit: got VisionTransformerRelPos"),
    ],
)
def test_networks_that_do_not_fit_are_refused(given, arguments, said):
    network = vit(**given)
    before = copy.deepcopy(network.state_dict())
    with pytest.raises(ValueError, match=said):
        sa_zoo.start_as_convolution(network, **arguments)
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())


def test_a_recipe_starts_its_network(tmp_path):
    args = SIZES | {"img_size": 16, "depth": 1, "embed_dim": 40, "weight_init": "jax"}
    table = {
        "model": {"name": small_vits.NAME, "args": args, "start": "quadratic"},
        "data": {"name": "digits", "image_size": 16},
        "optim": {"lr": 1e-9},
        "train": {"epochs": 1},
    }
    train(parse_config(table), tmp_path)
    lengths = open_folder(tmp_path).network.pos_embed[0, 1:].norm(dim=-1)
    assert lengths.shape == (16,) and torch.allclose(lengths, lengths.mean(), rtol=1e-4)
    table["model"] = {"name": "a", "start": "quadratic", "init": "local-dir:x"}
    with pytest.raises(ValueError, match=r"model.start: got quadratic with model.init"):
        parse_config(table)
