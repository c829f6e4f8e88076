"""harden.py and kernels/taps.py: heads that read one pixel, as attention, as a convolution, and back."""

import copy

import numpy as np
import pytest
import timm
import torch
from timm.utils import reparameterize_model
from tiny_runs import tiny_config
from torch import nn
from torch.nn.utils import parametrizations, prune
from transformers import AutoModelForImageClassification
from typer.testing import CliRunner

import sa_zoo
from sa_zoo.cli import app
from sa_zoo.convolution.certificate import certificate
from sa_zoo.convolution.convolutional import HardAttention
from sa_zoo.convolution.layer_conversion import (
    attention_from_conv,
    conv_and_distance,
    conv_from_attention,
)
from sa_zoo.convolution.theorem import head_shifts, missed_attention
from sa_zoo.folders.opened import open_folder
from sa_zoo.kernels.choose import choose, only
from sa_zoo.models.attention import Attention
from sa_zoo.models.terms import GeneralizedQuadratic, Quadratic, Taps
from sa_zoo.training.config import dump_config, load_config
from sa_zoo.verbs.harden import config_of
from sa_zoo.verbs.train import train_and_finish

H, W, D, HEADS, B = 7, 5, 3, 5, 2
SMALL = {"patch_size": 4, "img_size": (28, 20), "embed_dim": D, "depth": 3, "num_heads": HEADS}
KERNEL = [
    [2, 0],
    [-2, -1],
    [0, -1],
    [2, -1],
    [0, 0],
    [-2, 0],
]  # dilated, not centered, not in order
SCATTERED = [[1, -1], [0, 3], [-9, 0], [0, 0], [2, 2], [0, 3]]  # one beyond all borders, one twice


def network(name: str = "sa_quadratic_tiny_cifar", **more) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, **SMALL | more).double().eval()


def layer_with(offsets: list[list[int]], spread: float = 64.0, terms=(Quadratic,)) -> Attention:
    torch.manual_seed(1)
    layer = Attention(D, len(offsets), terms, (H, W), dtype=torch.float64)
    term = layer.terms[0]
    term.Delta.data.copy_(torch.tensor(offsets))
    eye = torch.eye(2) if terms == (GeneralizedQuadratic,) else 1.0
    term.spread.data.copy_(spread * torch.as_tensor(eye))
    return layer.requires_grad_(False)


def read_by_loops(layer: Attention, offsets: list[list[int]], X: torch.Tensor) -> np.ndarray:
    """b + sum_h X[q + Delta_h, moved into the image] W_h, pixel by pixel, then W_out."""
    x, W_val = X.detach().numpy(), layer.W_val.weight.detach().numpy()
    out = np.zeros(x.shape) + layer.W_val.bias.detach().numpy()
    for y in range(x.shape[1]):
        for column in range(x.shape[2]):
            for head, (down, across) in enumerate(offsets):
                row = min(max(y + down, 0), x.shape[1] - 1)
                place = min(max(column + across, 0), x.shape[2] - 1)
                out[:, y, column] += x[:, row, place] @ W_val[:, head * D : (head + 1) * D].T
    return out @ layer.W_out.weight.detach().numpy().T + layer.W_out.bias.detach().numpy()


@pytest.mark.parametrize("terms", [(Quadratic,), (GeneralizedQuadratic,)])
@pytest.mark.parametrize(
    "offsets", [sorted(KERNEL), KERNEL, SCATTERED], ids=["kernel", "not in order", "scattered"]
)
@pytest.mark.parametrize("trains", [True, False])
def test_taps_are_one_pixel_each_on_every_way_to_evaluate_them(terms, offsets, trains):
    layer = layer_with(offsets, terms=terms)
    layer.W_val.requires_grad_(trains)
    X = torch.randn(B, H, W, D, dtype=torch.float64, requires_grad=trains)
    expected = read_by_loops(layer, offsets, X)
    assert choose(layer, X)[0].name == "taps"
    fused = copy.deepcopy(layer)
    fused.terms[0] = layer.terms[0].fuse()
    with only("definition"):
        definition = layer(X)
        of_fused = fused(X)
    assert isinstance(fused.terms[0], Taps) and not list(fused.terms.parameters())
    for y in (layer(X), definition, fused(X), of_fused):
        assert np.abs(y.detach().numpy() - expected).max() < 1e-12
    if trains:
        direction = torch.randn_like(definition)
        wanted = torch.autograd.grad(definition, [X, layer.W_val.weight], direction)
        got = torch.autograd.grad(layer(X), [X, layer.W_val.weight], direction)
        for mine, theirs in zip(got, wanted, strict=True):
            assert (mine - theirs).abs().max() < 1e-12


def test_only_heads_that_read_one_pixel_everywhere_take_that_route():
    X = torch.randn(B, H, W, D, dtype=torch.float64)
    assert layer_with(KERNEL, spread=9.0).terms[0].taps() == KERNEL  # alpha 40.5
    assert layer_with(KERNEL, spread=8.8).terms[0].taps() == []  # 38.7
    assert layer_with(KERNEL, spread=300.0).half().terms[0].taps() == KERNEL  # alpha beyond float16
    half_way = layer_with(KERNEL)
    half_way.terms[0].Delta[2, 0] += 0.5
    free = layer_with(KERNEL)
    free.terms[0].Delta.requires_grad_(True)
    one_dull = layer_with(KERNEL)
    one_dull.terms[0].spread[3] = 2.0
    tilted = layer_with(KERNEL, terms=(GeneralizedQuadratic,))
    tilted.terms[0].spread[1, 0, 1] = 40.0  # reads another pixel of the border
    for layer in (half_way, free, one_dull, tilted):
        with only("definition"):
            expected = layer(X)
        assert choose(layer, X)[0].name != "taps"
        assert (layer(X) - expected).abs().max() < 1e-12
    dropping = Attention(D, HEADS, (Quadratic,), (H, W), attn_drop=0.1, dtype=torch.float64)
    dropping.terms = layer_with(KERNEL[:HEADS]).terms
    assert choose(dropping, X)[0].name != "taps"


def mixing(Delta: np.ndarray, S: np.ndarray, taps: list[list[int]]) -> np.ndarray:
    """M_hg by loops over all displacements of the image."""
    M = np.zeros((len(Delta), len(taps)))
    for head in range(len(Delta)):
        shares = {}
        for y in range(1 - H, H):
            for x in range(1 - W, W):
                away = S[head].T @ (np.array([y, x]) - Delta[head])
                shares[y, x] = np.exp(-0.5 * away @ away)
        for (y, x), share in shares.items():
            distance = [(y - row) ** 2 + (x - column) ** 2 for row, column in taps]
            near = [g for g, each in enumerate(distance) if each == min(distance)]
            for g in near:
                M[head, g] += share / sum(shares.values()) / len(near)
    return M


@pytest.mark.parametrize("name", ["sa_quadratic_tiny_cifar", "sa_quadratic_gen_tiny_cifar"])
def test_hardening_moves_attention_to_the_nearest_tap(name):
    before = network(name)
    model = copy.deepcopy(before)
    taps = sa_zoo.harden(model)
    assert list(taps) == ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]
    for index, offsets in enumerate(taps.values()):
        old, new = before.blocks[index].attn, model.blocks[index].attn
        assert len({tuple(offset) for offset in offsets}) == HEADS
        assert new.terms[0].taps() == offsets == new.terms[0].Delta.tolist()
        assert not any(parameter.requires_grad for parameter in new.terms.parameters())
        assert new.W_val.weight.requires_grad and new.W_out.weight.requires_grad
        spread = old.terms[0].spread.detach()
        S = spread if spread.ndim == 3 else spread[:, None, None] * torch.eye(2)
        M = mixing(old.terms[0].Delta.detach().numpy(), S.double().numpy(), offsets)
        slices = old.W_val.weight.detach().numpy().reshape(D, HEADS, D)
        expected = np.einsum("ohi,hg->ogi", slices, M).reshape(D, -1)
        assert np.abs(new.W_val.weight.detach().numpy() - expected).max() < 1e-12
        sharpest = int(torch.linalg.det(S.float()).abs().argmax())
        assert old.terms[0].Delta[sharpest].round().tolist() in offsets == sorted(offsets)
    color = torch.randn(1, 3, 1, 1, dtype=torch.float64).expand(1, 3, 28, 20)
    assert (model(color) - before(color)).abs().max() < 1e-12
    assert missed_attention(torch.zeros(HEADS, 2), torch.full([HEADS], 0.5 * 64.0**2)).max() == 0.0


def hard_network() -> nn.Module:
    model = network()
    sa_zoo.harden(model)
    return model


def one_hot_layer() -> nn.Module:
    layer = attention_from_conv(nn.Conv2d(3, 5, 3, padding=1).double(), 20.0)
    layer.alpha.data.fill_(torch.inf)
    return nn.Sequential(layer)


TAPS = {
    "a network": hard_network,
    "a folded network": lambda: reparameterize_model(hard_network()),
    "a converted layer of infinite alpha": one_hot_layer,
}


@pytest.mark.parametrize("made", TAPS.values(), ids=TAPS)
def test_what_is_made_of_taps_keeps_its_function(made):
    model, x = made(), torch.randn(B, 3, 28, 20, dtype=torch.float64)
    expected = model(x)
    taps = sa_zoo.harden(model)
    assert sa_zoo.harden(model) == taps
    assert (model(x) - expected).abs().max() < 1e-12
    kinds = sa_zoo.explore(model, x).html.count('"kind":"quadratic"')
    assert kinds == len(taps)


def test_as_many_heads_as_displacements_read_all_of_them():
    for offsets in sa_zoo.harden(network(img_size=(4, 12))).values():
        assert offsets == [[0, across] for across in range(-2, 3)]


@pytest.mark.parametrize("offsets", [KERNEL, SCATTERED], ids=["kernel", "scattered"])
def test_a_network_layer_of_taps_is_a_convolution(offsets):
    layer = layer_with(offsets)
    conv, distance = conv_and_distance(layer)
    assert distance == 0.0 and conv.padding_mode == "replicate"
    x = torch.randn(B, D, H, W, dtype=torch.float64)
    expected = read_by_loops(layer, offsets, x.permute(0, 2, 3, 1))
    assert np.abs(conv(x).detach().permute(0, 2, 3, 1).numpy() - expected).max() < 1e-12
    layer.terms[0].spread.fill_(2.0)
    with pytest.raises(ValueError, match="attention: got heads that are not all taps"):
        conv_from_attention(layer)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_trained_convolutions_become_convolutions_again(axes):
    torch.manual_seed(axes)
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
    conv = kind(4, 6, 3, stride=2, padding=2, dilation=2, groups=2).double()
    layer = attention_from_conv(conv, 3.0)
    with torch.no_grad():
        layer.Delta += 0.4 * torch.randn_like(layer.Delta)
    color = torch.ones(1, 4, *[13] * axes, dtype=torch.float64)
    middle = (0, slice(None), *[3] * axes)  # a query that sees no border
    before = layer(color)[middle]
    (taps,) = sa_zoo.harden(nn.Sequential(layer)).values()
    assert taps == head_shifts([3] * axes, [2] * axes, [2] * axes).tolist()
    again, distance = conv_and_distance(layer)
    assert distance == 0.0 and repr(again) == repr(conv)
    x = torch.randn(B, 4, *[13] * axes, dtype=torch.float64)
    assert (layer(x) - again(x)).abs().max() < 1e-12
    assert (layer.definition(x) - again(x)).abs().max() < 1e-12
    assert certificate(layer, [13] * axes).attention.max() == 0.0
    assert (layer(color)[middle] - before).abs().max() < 1e-9


def test_heads_that_cannot_be_taps_are_refused_with_the_reason():
    refused = {
        "learned tables": network("sa_learned_tiny_cifar"),
        "depend on content": network("sa_mixed_tiny_cifar"),
        "its 1x1 pixels have 1 displacements for 5 heads": network(img_size=4),
        "the size of its images is not known": nn.Sequential(network().blocks[0]),
        "it looks at content": nn.Sequential(
            attention_from_conv(nn.Conv2d(3, 5, 3), 3.0, content=True)
        ),
        "Sequential, expected one with quadratic heads": nn.Sequential(
            attention_from_conv(nn.Conv2d(3, 5, 3))
        ),
        "VisionTransformer, expected": timm.create_model("test_vit"),
    }
    endless = attention_from_conv(nn.Conv2d(3, 5, 3), 3.0)
    endless.alpha.data[4] = 0.0
    refused["sees without end"] = nn.Sequential(endless)
    adapted = network()
    adapted.blocks[2].attn.W_val = nn.Sequential(adapted.blocks[2].attn.W_val)
    refused["merge adapters"] = adapted
    nowhere = network()
    nowhere.blocks[1].attn.terms[0].Delta.data[2, 0] = torch.inf
    refused["not finite"] = nowhere
    pruned = network()
    prune.random_unstructured(pruned.blocks[0].attn.W_val, "weight", amount=0.5)
    refused["are computed"] = pruned
    parametrized = network()
    parametrizations.weight_norm(parametrized.blocks[2].attn.terms[0], "Delta")
    refused["some of its numbers are computed"] = parametrized
    normed = attention_from_conv(nn.Conv2d(3, 5, 3), 3.0)
    parametrizations.weight_norm(normed.W_val)
    refused["its numbers are computed"] = nn.Sequential(normed)
    for reason, model in refused.items():
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError, match=f"model: got .*{reason}"):
            sa_zoo.harden(model)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert isinstance(attention_from_conv(nn.Conv2d(3, 5, 3)), HardAttention)


@pytest.mark.filterwarnings("ignore")  # of torch, for which tracing and scripting are legacy
def test_graphs_of_a_hardened_network_have_convolutions_and_gathers_only():
    model = network().float()
    sa_zoo.harden(model)
    deployed = reparameterize_model(model)
    x = torch.randn(B, 3, 28, 20)
    program = torch.export.export(deployed, (x,))
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not any(word in name for name in called for word in ("softmax", "matmul", "bmm", "exp"))
    with torch.no_grad(), only("definition"):
        expected = model(x)
    for y in (program.module()(x), torch.jit.trace(deployed, x)(x), deployed(x)):
        assert (y - expected).abs().max() < 1e-5
    assert (torch.jit.script(deployed)(x) - expected).abs().max() < 1e-5


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of two epochs, and its continuation with taps."""
    args = {
        "img_size": 8,
        "patch_size": 2,
        "embed_dim": 6,
        "depth": 2,
        "num_heads": 3,
        "hidden_dim": 7,
    }
    config = tiny_config(model={"name": "sa_quadratic_tiny_cifar", "args": args, "whiten": True})
    folder = tmp_path_factory.mktemp("runs")
    train_and_finish(config, folder / "run")
    result = CliRunner().invoke(
        app,
        ["harden", str(folder / "run"), "--out", str(folder / "hard"), "--set", "train.epochs=1"],
    )
    assert result.exit_code == 0, result.output
    return folder / "run", folder / "hard"


def test_the_verb_continues_a_run_and_leaves_a_folder_of_the_same_architecture(runs):
    run, hard = (open_folder(folder) for folder in runs)
    expected = copy.deepcopy(run.network)
    taps = sa_zoo.harden(expected)
    assert run.config["architecture"] == hard.config["architecture"]
    assert run.config["model_args"] == hard.config["model_args"]
    for name, layer in hard.network.named_modules():
        if isinstance(layer, Attention):
            assert layer.terms[0].taps() == taps[name]
    assert not torch.equal(hard.network.head.weight, run.network.head.weight)  # trained on
    recipe = load_config(runs[1] / "train.toml")
    assert recipe.model.harden and not recipe.model.whiten and recipe.train.epochs == 1
    assert recipe.optim.lr == pytest.approx(load_config(runs[0] / "train.toml").optim.lr / 3)
    x = torch.randn(B, 3, 8, 8)
    soft, of_transformers = map(AutoModelForImageClassification.from_pretrained, runs)
    assert (of_transformers(x).logits - hard.network(x)).abs().max() < 1e-5
    assert sa_zoo.harden(soft) == taps


@pytest.mark.parametrize(("before", "after"), [(14, 4), (2, 2), (0, 0)])
def test_small_images_come_first_where_the_run_had_some(tmp_path, before, after):
    recipe = load_config("tiny", [f"augment.small_epochs={before}"])
    (tmp_path / "train.toml").write_text(dump_config(recipe))
    config = config_of(tmp_path)
    assert (config.train.epochs, config.augment.small_epochs) == (8, after)
