"""harden.py and kernels/taps.py: heads that read one pixel, as attention, as a convolution, and back."""

import copy

import numpy as np
import pytest
import timm
import torch
from timm.utils import reparameterize_model
from tiny_runs import tiny_config
from torch import nn
from torch.nn.utils import parametrizations
from transformers import AutoModelForImageClassification
from typer.testing import CliRunner

import sa_zoo
from sa_zoo.cli import app
from sa_zoo.convolution.certificate import certificate
from sa_zoo.convolution.layer_conversion import (
    attention_from_conv,
    conv_and_distance,
    conv_from_attention,
)
from sa_zoo.convolution.theorem import head_shifts
from sa_zoo.folders.opened import open_folder
from sa_zoo.kernels.choose import choose, only
from sa_zoo.models.attention import Attention
from sa_zoo.models.network import terms_in
from sa_zoo.models.terms import GeneralizedQuadratic, Quadratic, Taps
from sa_zoo.training.config import dump_config, load_config
from sa_zoo.verbs.fit import fit
from sa_zoo.verbs.harden import config_of

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
OFFSETS = {"kernel": sorted(KERNEL), "not in order": KERNEL, "scattered": SCATTERED}
every_offset = pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS)


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
@every_offset
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


@pytest.mark.parametrize(
    ("spread", "changed", "value"),
    [
        (64.0, "Delta", 0.5),  # half-way between two pixels
        (64.0, "spread", 2.0),
        (8.8, "Delta", 0.0),  # an alpha of 38.7
    ],
)
def test_other_heads_do_not_take_that_route(spread, changed, value):
    X = torch.randn(B, H, W, D, dtype=torch.float64)
    layer = layer_with(KERNEL, spread)
    getattr(layer.terms[0], changed)[2] = value
    with only("definition"):
        expected = layer(X)
    assert choose(layer, X)[0].name != "taps"
    assert (layer(X) - expected).abs().max() < 1e-12


def test_sharp_heads_that_move_tilt_or_drop_do_not_take_it_either():
    X = torch.randn(B, H, W, D, dtype=torch.float64)
    assert layer_with(KERNEL, spread=9.0).terms[0].taps() == KERNEL  # an alpha of 40.5
    assert layer_with(KERNEL, spread=300.0).half().terms[0].taps() == KERNEL  # beyond float16
    free = layer_with(KERNEL).requires_grad_(True)
    tilted = layer_with(KERNEL, terms=(GeneralizedQuadratic,))
    tilted.terms[0].spread[1, 0, 1] = 40.0  # reads another pixel of the border
    dropping = Attention(D, HEADS, (Quadratic,), (H, W), attn_drop=0.1, dtype=torch.float64)
    dropping.terms = layer_with(KERNEL[:HEADS]).terms
    assert all(choose(layer, X)[0].name != "taps" for layer in (free, tilted, dropping))


def mixing(Delta: np.ndarray, S: np.ndarray, taps: list[list[int]]) -> np.ndarray:
    """M_hg by loops over all displacements of the image."""
    M = np.zeros((len(Delta), len(taps)))
    offsets = np.array([(y, x) for y in range(1 - H, H) for x in range(1 - W, W)])
    for head in range(len(Delta)):
        shares = np.exp(-0.5 * (((offsets - Delta[head]) @ S[head]) ** 2).sum(-1))
        for offset, share in zip(offsets, shares / shares.sum(), strict=True):
            distance = ((offset - taps) ** 2).sum(-1)
            near = distance == distance.min()
            M[head, near] += share / near.sum()
    return M


@pytest.mark.parametrize("name", ["sa_quadratic_tiny_cifar", "sa_quadratic_gen_tiny_cifar"])
def test_hardening_moves_attention_to_the_nearest_tap(name):
    before = network(name)
    term = before.blocks[0].attn.terms[0]
    term.Delta.data[1] = term.Delta.data[0]  # two heads on one pixel
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


def test_as_many_heads_as_displacements_read_all_of_them():
    for offsets in sa_zoo.harden(network(img_size=(4, 12))).values():
        assert offsets == [[0, across] for across in range(-2, 3)]


@every_offset
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


def of_conv(**changed: torch.Tensor) -> nn.Module:
    """A converted convolution with other numbers."""
    layer = attention_from_conv(nn.Conv2d(3, 5, 3), 3.0)
    for name, value in changed.items():
        getattr(layer, name).data[4] = value
    return nn.Sequential(layer)


def with_weight_norm(model: nn.Module, path: str, name: str) -> nn.Module:
    parametrizations.weight_norm(model.get_submodule(path), name)
    return model


def infinite() -> nn.Module:
    model = network()
    model.blocks[1].attn.terms[0].Delta.data[2, 0] = torch.inf
    return model


def adapted() -> nn.Module:
    model = network()
    model.blocks[2].attn.W_val = nn.Sequential(model.blocks[2].attn.W_val)
    return model


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda: network("sa_learned_tiny_cifar"), "learned tables"),
        (lambda: network("sa_mixed_tiny_cifar"), "depend on content"),
        (lambda: network(img_size=4), "its 1x1 pixels have 1 displacements for 5 heads"),
        (lambda: nn.Sequential(network().blocks[0]), "the size of its images is not known"),
        (lambda: attention_from_conv(nn.Conv2d(3, 5, 3), 3.0, content=True), "looks at content"),
        (lambda: attention_from_conv(nn.Conv2d(3, 5, 3)), "expected one with quadratic heads"),
        (lambda: of_conv(alpha=0.0), "sees without end"),
        (lambda: with_weight_norm(of_conv(), "0.W_val", "weight"), "are computed"),
        (lambda: with_weight_norm(network(), "blocks.2.attn.terms.0", "Delta"), "are computed"),
        (infinite, "not finite"),
        (adapted, "merge adapters"),
    ],
)
def test_heads_that_cannot_be_taps_are_refused(made, reason):
    model = made()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=f"model: got .*{reason}"):
        sa_zoo.harden(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


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
    for graph in (program.module(), torch.jit.trace(deployed, x), torch.jit.script(deployed)):
        assert (graph(x) - expected).abs().max() < 1e-5


def test_the_verb_continues_a_run_in_the_same_architecture(tmp_path):
    args = {
        "img_size": 8,
        "patch_size": 2,
        "embed_dim": 6,
        "depth": 2,
        "num_heads": 3,
        "hidden_dim": 7,
    }
    config = tiny_config(model={"name": "sa_quadratic_tiny_cifar", "args": args, "whiten": True})
    folders = tmp_path / "run", tmp_path / "hard"
    fit(config, folders[0])
    arguments = ["harden", folders[0], "--out", folders[1], "--set", "train.epochs=1"]
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    run, hard = map(open_folder, folders)
    expected = copy.deepcopy(run.network)
    taps = sa_zoo.harden(expected)
    assert run.config["architecture"] == hard.config["architecture"]
    assert run.config["model_args"] == hard.config["model_args"]
    read = {name: term.taps() for name, term in terms_in(hard.network).items()}
    assert list(read.values()) == list(taps.values())
    assert not torch.equal(hard.network.head.weight, run.network.head.weight)  # trained on
    recipe = load_config(folders[1] / "train.toml")
    assert recipe.model.harden and not recipe.model.whiten and recipe.train.epochs == 1
    assert recipe.optim.lr == pytest.approx(config.optim.lr / 3)
    x = torch.randn(B, 3, 8, 8)
    loaded = AutoModelForImageClassification.from_pretrained(folders[1])
    assert (loaded(x).logits - hard.network(x)).abs().max() < 1e-5
    (folders[0] / "train.toml").write_text(
        dump_config(load_config("tiny", ["augment.small_epochs=14"]))
    )
    longer = config_of(folders[0])
    assert (longer.train.epochs, longer.augment.small_epochs) == (8, 4)
