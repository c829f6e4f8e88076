"""harden.py and fast/taps.py: heads that read one pixel, as attention, as a convolution, and back."""

import copy
from itertools import product
from operator import attrgetter

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from small_networks import small_network
from tiny_runs import MUON, tiny_config
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import sa_zoo
from sa_zoo.convolution.certificate import certificate
from sa_zoo.convolution.layer_conversion import (
    attention_from_conv,
    conv_and_distance,
    conv_from_attention,
)
from sa_zoo.convolution.theorem import head_shifts
from sa_zoo.fast.route import form_of
from sa_zoo.models.attention import Attention
from sa_zoo.models.network import terms_in
from sa_zoo.models.terms import GeneralizedQuadratic, Quadratic
from sa_zoo.training.train import train

H, W, D, HEADS, B = 7, 5, 3, 5, 2
# dilated, not centered, not in order
KERNEL = [[2, 0], [-2, -1], [0, -1], [2, -1], [0, 0], [-2, 0]]
SCATTERED = [[1, -1], [0, 3], [-9, 0], [0, 0], [2, 2], [0, 3]]  # one beyond all borders, one twice
close = {"rtol": 0, "atol": 1e-12}


def network(name="quadratic", **more):
    return small_network(name, embed_dim=D, dtype=torch.float64, **more)


def layer_with(offsets, spread=64.0, term=Quadratic):
    torch.manual_seed(1)
    layer = Attention(D, len(offsets), (term,), (H, W), dtype=torch.float64).requires_grad_(False)
    layer.terms[0].Delta.copy_(torch.tensor(offsets))
    layer.terms[0].spread.copy_(
        spread * torch.eye(2) if term is GeneralizedQuadratic else spread * torch.ones(())
    )
    return layer


def pixels():
    return torch.randn(B, H, W, D, dtype=torch.float64)


def read_by_loops(layer, offsets, X):
    """b + sum_h X[q + Delta_h, moved into the image] W_h, pixel by pixel, then W_out."""
    x, W_val = X.detach().numpy(), layer.W_val.weight.detach().numpy()
    out = np.zeros(x.shape) + layer.W_val.bias.detach().numpy()
    for y, column in np.ndindex(H, W):
        for head, (down, across) in enumerate(offsets):
            row = min(max(y + down, 0), H - 1)
            place = min(max(column + across, 0), W - 1)
            out[:, y, column] += x[:, row, place] @ W_val[:, head * D : (head + 1) * D].T
    return out @ layer.W_out.weight.detach().numpy().T + layer.W_out.bias.detach().numpy()


@pytest.mark.parametrize("term", [Quadratic, GeneralizedQuadratic])
@pytest.mark.parametrize("offsets", [sorted(KERNEL), KERNEL, SCATTERED])
def test_taps_are_one_pixel_each_on_every_way_to_evaluate_them(term, offsets):
    """As attention, deployed, and as a convolution; test_routes.py has their gradients."""
    layer, X = layer_with(offsets, term=term), pixels()
    assert form_of(layer, X) == "taps"
    expected = read_by_loops(layer, offsets, X)
    conv, distance = conv_and_distance(layer)
    assert distance == 0.0
    convolved = conv(X.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    deployed = copy.deepcopy(layer).fuse()(X)
    for y in (layer(X), layer.W_out(layer.definition(X)), deployed, convolved):
        assert_allclose(y.detach().numpy(), expected, **close)


def other_heads():
    """Layers, and a change by which some head does not read one pixel for good."""
    half_way, wide, dull = layer_with(KERNEL), layer_with(KERNEL), layer_with(KERNEL, 8.8)
    half_way.terms[0].Delta[2] = 0.5
    wide.terms[0].spread[2] = 2.0
    free = layer_with(KERNEL).requires_grad_(True)
    tilted = layer_with(KERNEL, term=GeneralizedQuadratic)
    tilted.terms[0].spread[1, 0, 1] = 40.0  # reads another pixel of the border
    dropping = layer_with(KERNEL)
    dropping.attn_drop.p = 0.1
    return half_way, wide, dull, free, tilted, dropping


def test_other_heads_do_not_take_that_route():
    assert all(form_of(layer, pixels()) != "taps" for layer in other_heads())
    with pytest.raises(ValueError, match="attention: got heads that are not all taps"):
        conv_from_attention(other_heads()[0])
    assert layer_with(KERNEL, spread=9.0).terms[0].taps() == KERNEL  # an alpha of 40.5
    assert layer_with(KERNEL, spread=300.0).half().terms[0].taps() == KERNEL  # beyond float16


def mixing(Delta, S, taps, sizes=(H, W)):
    """M_hg by loops over all displacements of the image."""
    M = np.zeros((len(Delta), len(taps)))
    offsets = np.array(list(product(*(range(1 - size, size) for size in sizes))))
    for head in range(len(Delta)):
        shares = np.exp(-0.5 * (((offsets - Delta[head]) @ S[head]) ** 2).sum(-1))
        for offset, share in zip(offsets, shares / shares.sum(), strict=True):
            distance = ((offset - taps) ** 2).sum(-1)
            near = distance == distance.min()
            M[head, near] += share / near.sum()
    return M


@pytest.mark.parametrize("name", ["quadratic", "quadratic_gen"])
def test_hardening_moves_attention_to_the_nearest_tap(name):
    before = network(name)
    Delta = before.blocks[0].attn.terms[0].Delta.data
    Delta[1] = Delta[0]  # two heads on one pixel
    model = copy.deepcopy(before)
    for path, offsets in sa_zoo.harden(model).items():
        old, new = before.get_submodule(path), model.get_submodule(path)
        assert len({tuple(offset) for offset in offsets}) == HEADS
        assert new.terms[0].taps() == offsets == new.terms[0].Delta.tolist()
        trained = {name for name, value in new.named_parameters() if value.requires_grad}
        assert trained == {"W_val.weight", "W_val.bias", "W_out.weight", "W_out.bias"}
        spread = old.terms[0].spread.detach()
        S = spread if spread.ndim == 3 else spread[:, None, None] * torch.eye(2)
        M = mixing(old.terms[0].Delta.detach().numpy(), S.numpy(), offsets)
        slices = old.W_val.weight.detach().numpy().reshape(D, HEADS, D)
        expected = np.einsum("ohi,hg->ogi", slices, M).reshape(D, -1)
        assert_allclose(new.W_val.weight.detach().numpy(), expected, **close)
    color = torch.randn(1, 3, 1, 1, dtype=torch.float64).expand(1, 3, 28, 20)
    torch.testing.assert_close(model(color), before(color), **close)


@pytest.mark.parametrize(
    ("Delta", "tap"), [((-1.5, 0.0), [-1, 0]), ((1.5, 0.0), [1, 0]), ((0.0, -2.5), [0, -2])]
)
def test_a_head_between_two_pixels_reads_the_one_nearer_to_the_query(Delta, tap):
    layer = Attention(D, 1, (Quadratic,), (H, W))
    layer.terms[0].Delta.data.copy_(torch.tensor([Delta]))
    layer.terms[0].spread.data.fill_(2.0)
    assert sa_zoo.harden(layer) == {"": [tap]}


def test_as_many_heads_as_displacements_read_all_of_them():
    for offsets in sa_zoo.harden(network(img_size=(4, 12))).values():
        assert offsets == [[0, across] for across in range(-2, 3)]


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_trained_convolutions_become_convolutions_again(kind):
    conv = kind(4, 6, 3, stride=2, padding=2, dilation=2, groups=2).double()
    axes = conv.weight.ndim - 2
    layer = attention_from_conv(conv, 6.0)
    layer.Delta.data += 0.4 * torch.randn(
        layer.Delta.shape, generator=torch.Generator().manual_seed(0)
    )
    color = torch.ones(1, 4, *[9] * axes, dtype=torch.float64)
    middle = (0, slice(None), *[2] * axes)  # a query that sees no border
    before = layer(color)[middle]
    values = layer.weight.detach().flatten(2).numpy().copy()
    S = (2 * layer.alpha.detach()).sqrt().numpy()[:, None, None] * np.eye(axes)
    Delta = layer.Delta.detach().numpy().copy()
    (taps,) = sa_zoo.harden(nn.Sequential(layer)).values()
    assert taps == head_shifts([3] * axes, [2] * axes, [2] * axes).tolist()
    assert (layer(color)[middle] - before).abs().max() < 1e-9
    moved = values @ mixing(Delta, S, taps, [9] * axes)
    assert_allclose(layer.weight.detach().flatten(2).numpy(), moved, **close)
    assert certificate(layer, [9] * axes).attention.max() == 0.0
    again, distance = conv_and_distance(layer)
    assert distance == 0.0 and repr(again) == repr(conv)
    x = torch.randn_like(color)
    for y in (layer(x), layer.definition(x)):
        torch.testing.assert_close(y, again(x), **close)


def changed(path, function, *arguments):
    """A network, after a function of one of its modules or parameters."""
    model = network()
    function(attrgetter(path)(model), *arguments)
    return model


REFUSED = [
    ("more than a center", lambda: network("learned")),
    ("more than a center", lambda: network("content")),
    ("its 1x1 pixels have 1 displacements for 5 heads", lambda: network(img_size=4)),
    ("expected one with quadratic heads", lambda: attention_from_conv(nn.Conv2d(3, 5, 3))),
    ("weights are computed", lambda: changed("blocks.2.attn.W_val", weight_norm)),
    ("not finite", lambda: changed("blocks.1.attn.terms.0.Delta.data", torch.fill_, torch.inf)),
]


@pytest.mark.parametrize(("reason", "made"), REFUSED)
def test_heads_that_cannot_be_taps_are_refused(reason, made):
    model = made()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=f"model: got .*{reason}"):
        sa_zoo.harden(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_recipe_trains_a_run_on_with_its_heads_as_taps(tmp_path):
    model = MUON["model"] | {"whiten": True}
    run = train(tiny_config(model=model, train={"epochs": 1}), tmp_path / "run")
    start = MUON["model"] | {"init": str(tmp_path / "run"), "harden": True}
    hard = train(tiny_config(model=start, train={"epochs": 1}), tmp_path / "hard")
    assert run.config["model_args"] == hard.config["model_args"]
    taps = list(sa_zoo.harden(run.network).values())
    assert [term.taps() for term in terms_in(hard.network).values()] == taps
    assert not torch.equal(hard.network.head.weight, run.network.head.weight)  # trained on
