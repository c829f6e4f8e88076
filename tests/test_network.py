"""The network as users meet it: sizes, stages, maps, starts, checks of its input."""

import itertools
import math

import numpy as np
import numpy_sanet as oracle
import pytest
import torch
import torch.nn.functional as F
from small_networks import NETWORKS, ONE_STAGE, PLAIN, images, small
from timm.utils import reparameterize_model
from torchvision.ops import StochasticDepth

from sa_zoo.models.attention import Attention
from sa_zoo.models.blocks import DropPath, PostNormBlock
from sa_zoo.models.content import Absolute, Content, ContentKernel, Relative
from sa_zoo.models.layout import Level
from sa_zoo.models.network import SANet, attention_in
from sa_zoo.models.plain import PlainNet
from sa_zoo.models.terms import GeneralizedQuadratic, Learned, Quadratic, QuadraticKernel
from sa_zoo.models.variants import TYPES

FIXED = [name for name in NETWORKS if small(name).fixed_img_size]


NUMPY = {  # term, its reference, network and sizes
    "quadratic": (Quadratic, oracle.quadratic, SANet, ONE_STAGE),
    "generalized": (GeneralizedQuadratic, oracle.generalized, SANet, ONE_STAGE),
    "learned": (Learned, oracle.learned, SANet, ONE_STAGE),
    "content": (Content, oracle.content, SANet, ONE_STAGE),
    "eq8": (Relative, oracle.eq8, SANet, ONE_STAGE),
    "absolute": (Absolute, oracle.absolute, SANet, ONE_STAGE),
    "plain": (QuadraticKernel, oracle.quadratic, PlainNet, PLAIN),
    "plain, content": (Content, oracle.content, PlainNet, PLAIN),
}


@pytest.mark.parametrize("case", NUMPY)
def test_a_network_is_that_of_the_numpy_loop(case):
    term, reference, network, sizes = NUMPY[case]
    torch.manual_seed(3)
    plain = network is PlainNet
    width = 16 if plain else 8
    arguments = sizes | {"img_size": (24, width), "in_chans": 2, "dtype": torch.float64}
    model = network(((term,),), **arguments).eval()
    for name, value in model.state_dict().items():  # away from ones and zeros
        if ("norm" in name or ".bn." in name) and value.is_floating_point():
            torch.nn.init.uniform_(value, 0.5, 2.0)
    x = torch.randn(2, 2, 24, width, dtype=torch.float64)
    arrays = {name: value.numpy() for name, value in model.state_dict().items()}
    pooled_in = (0, 2, 3) if plain else ()
    patch = model.sizes["patch_size"]
    expected = oracle.network(arrays, x.numpy(), reference, patch, pooled_in if plain else None)
    assert np.abs(model(x).detach().numpy() - expected).max() < 1e-10
    simpler = reparameterize_model(reparameterize_model(model))
    modules = simpler.named_modules()
    norms = [path for path, module in modules if isinstance(module, torch.nn.BatchNorm2d)]
    kept = [f"blocks.{at}.merge.1.bn" for at in pooled_in]
    assert norms == kept  # the others are folded
    assert not any(layer.W_out.state_dict() for layer in attention_in(simpler.blocks).values())
    assert np.abs(simpler(x).detach().numpy() - expected).max() < 1e-10


def convolution(layer: Attention, X: torch.Tensor) -> torch.Tensor:
    """That of the layer's value matrices, whose heads are in row-major order, far from the border."""
    side = int((layer.W_val.in_features / X.shape[3]) ** 0.5)
    kernel = layer.W_val.weight.unflatten(1, [side, side, -1]).permute(0, 3, 1, 2)
    return F.conv2d(X.permute(0, 3, 1, 2), kernel, layer.W_val.bias).permute(0, 2, 3, 1)


@pytest.mark.parametrize("term", [QuadraticKernel, ContentKernel])
@pytest.mark.parametrize("heads", [2, 3, 7, 10])
def test_each_head_of_a_kernel_starts_at_its_pixel(term, heads):
    layer = Attention(23, heads, (term,), (7, 9))
    P = layer.probabilities(torch.randn(1, 7, 9, 23)).unflatten(-1, (7, 9))
    middle = P.reshape(heads, 7, 9, 7, 9)[:, 3, 4]
    around = sorted(itertools.product((-2, -1, 0, 1, 2), repeat=2), key=lambda at: math.hypot(*at))
    pixels = sorted(around[:heads])
    for share, (row, column) in zip(middle, pixels, strict=True):
        assert share[3 + row, 4 + column] > 0.8


@pytest.mark.parametrize("term", [QuadraticKernel, ContentKernel])
def test_heads_started_as_a_kernel_are_a_convolution_of_values(term):
    layer, X = Attention(23, 9, (term,), (11, 13)), torch.randn(5, 11, 13, 23)
    inside = (slice(None), slice(1, -1), slice(1, -1))
    expected = convolution(layer, X)
    start = layer.definition(X)[inside]
    assert (start - expected).norm() < 0.15 * expected.norm()
    layer.definition(X).square().sum().backward()
    position = layer.terms[0]
    if term is ContentKernel:  # learns to look at content, from nothing
        assert not position.W_key.weight.any() and position.W_key.weight.grad.any()
        position.W_key.reset_parameters()
        position.reset_parameters()
        assert torch.equal(layer.definition(X)[inside], start)
    else:
        position.spread.data.fill_(30.0)
        assert (layer.definition(X)[inside] - expected).norm() < 1e-5 * expected.norm()


def test_only_the_first_half_of_blocks_starts_as_a_kernel():
    usual, kernel = (
        small(name, depth=4, num_heads=7).state_dict() for name in ("quadratic", "quadratic_kernel")
    )
    changed = {key for key, value in kernel.items() if not torch.equal(value, usual[key])}
    assert changed == {
        f"blocks.{block}.attn.terms.0.{name}" for block in (0, 1) for name in ("Delta", "spread")
    }
    nearest = [[-1, -1], [-1, 0], [-1, 1], [0, -1], [0, 0], [0, 1], [1, 0]]  # 7 heads
    assert kernel["blocks.1.attn.terms.0.Delta"].tolist() == nearest


@pytest.mark.parametrize("name", NETWORKS)
def test_attention_maps_are_the_probabilities_on_each_grid(name):
    model, x, seen = small(name), images(name), []
    for layer in attention_in(model.blocks).values():
        layer.register_forward_hook(lambda layer, given, made: seen.append((layer, *given, made)))
    model(x)
    used = iter(list(seen))
    for P in model.attention_maps(x):
        layer, X, made = next(used)
        T = X.shape[1] * X.shape[2]
        positional = all(term.positional for term in layer.terms)
        assert positional != any(hasattr(term, "W_qry") for term in layer.terms)
        assert P.shape == ((2, T, T) if positional else (2, 2, T, T))
        assert torch.allclose(P.sum(-1), torch.ones(()), atol=1e-6)
        assert torch.allclose(made, layer.W_out(layer.values(P, X)), atol=1e-5)
    assert next(used, None) is None


def test_each_stage_has_its_width_and_grid_each_block_its_rate():
    layers = [block.attn for block in small("plain, learned").blocks]
    assert [layer.W_val.out_features for layer in layers] == [7, 7, 5, 11, 11, 11]
    tables = [(len(layer.terms[0].row), len(layer.terms[0].col)) for layer in layers]
    assert tables == [(77, 45), (37, 21), (37, 21), (17, 9), (7, 3), (7, 3)]
    blocks = small("learned", depth=6, drop_path_rate=0.5).blocks
    rates = [block.drop_path.p for block in blocks]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5])


def test_layers_of_plain_networks_start_as_the_identity():
    again = PlainNet(((QuadraticKernel,),), **PLAIN)
    again.init_weights()
    for network in (PlainNet(((QuadraticKernel,),), **PLAIN), again):
        for block in network.blocks:
            slices = block.attn.W_val.weight.unflatten(1, [2, -1])  # (D, N_h, D_in)
            same = min(slices.shape[0], slices.shape[2])
            assert torch.equal(slices[:same, 1, :same], torch.eye(same))
            assert slices[:same].sum() == same


def test_groups_of_terms_divide_the_blocks_equally():
    groups = ((Quadratic,), (Learned, Content), (Relative,))
    blocks = SANet(groups, **ONE_STAGE | {"depth": 7, "img_size": 12}).blocks
    built = [tuple(type(term) for term in block.attn.terms) for block in blocks]
    assert built == [groups[0]] * 3 + [groups[1]] * 2 + [groups[2]] * 2


def test_a_number_alone_is_that_of_all_stages():
    layout = PlainNet.layout_of(3, 7, [2, 4], [3, 5])
    assert layout == PlainNet.layout_of(3, (7, 7), (2, 4), (3, 5))
    assert layout.levels == [Level(2, 7, 6), Level(6, 7, 12)]
    assert SANet.layout_of(3, 7, 2, 5, 11).levels == [Level(1, 7, 3), Level(2, 7, 3)]


@pytest.mark.parametrize("name", FIXED)
def test_learned_encodings_refuse_another_size_until_it_is_set(name, caplog):
    model, x = small(name), torch.randn(2, 3, 16, 56)
    y = model(images(name))
    model.set_input_size(NETWORKS[name]["img_size"])  # changes nothing
    assert torch.equal(model(images(name)), y)
    with pytest.raises(AssertionError, match="set_input_size"):
        model(x)
    model.set_input_size((16, 56))
    assert f"interpolated from images of {NETWORKS[name]['img_size']} to (16, 56)" in caplog.text
    assert model(x).shape == (2, 11)


@pytest.mark.parametrize(
    "changes",
    [
        {"img_size": (20, 40)},
        {"img_size": (24, 36)},
        {"num_heads": 0},
        {"num_heads": 2.0},
        {"num_heads": "many"},
        {"embed_dim": (7, 5)},
        {"depth": 3},
        {"depth": ()},
        {"depth": [1] * 9, "embed_dim": 7},
        {"depth": (2, 0, 3)},
        {"global_pool": "max"},
        {"in_chans": 0},
        {"img_size": (8, 40)},
        *(
            {"terms": terms}
            for terms in ("quadratic", Quadratic, (Quadratic,), (), ((), (Learned,)))
        ),
        {"terms": (("quadratic",), (Quadratic,))},
    ],
)
def test_arguments_that_make_no_network_are_refused(changes):
    arguments = PLAIN | {"terms": ((Quadratic,),), "img_size": (24, 40)} | changes
    with pytest.raises(ValueError, match=r"got .*expected"):
        PlainNet(**arguments)


@pytest.mark.parametrize("changes", [{"depth": (2, 1)}, {"hidden_dim": 0}, {"img_size": 22}])
def test_sizes_that_make_no_network_of_one_stage_are_refused(changes):
    with pytest.raises(ValueError, match=r"got .*expected"):
        SANet(((Quadratic,),), **ONE_STAGE | changes)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((3, 24, 40), r"expected four dimensions, \(B, C, H, W\)"),
        ((1, 3, 20, 40), r"image height: expected a multiple of model\.reduction"),
        ((1, 3, 24, 36), r"image width: expected a multiple of model\.reduction"),
        ((1, 5, 24, 40), "to have 3 channels, but got 5"),
    ],
)
def test_images_that_do_not_fit_are_refused(shape, said):
    with pytest.raises((AssertionError, RuntimeError), match=said):
        small("plain")(torch.randn(*shape))


def test_init_weights_draws_anew_from_the_same_distributions():
    model = SANet(TYPES["quadratic"].terms, embed_dim=101, depth=1, num_heads=97, hidden_dim=103)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.init_weights()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == ("norm" in name)
        if "norm" not in name:
            assert value.std().item() == pytest.approx(before[name].std().item(), rel=0.5)
    term = model.blocks[0].attn.terms[0]
    assert term.Delta.std().item() == pytest.approx(2, rel=0.2)
    assert term.spread.mean().item() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_drop_path_is_torchvisions_and_dropout_spares_residuals(p):
    x = torch.randn(17, 5, 3, 7)
    results = []
    for module in (DropPath(p), StochasticDepth(p, mode="row")):
        torch.manual_seed(6)
        results.append(module.train()(x))
        assert torch.equal(module.eval()(x), x)
    assert torch.equal(*results)
    block = PostNormBlock(7, 3, 11, (Quadratic,), (5, 3), proj_drop=1.0)
    assert torch.equal(block(x), block.norm2(block.norm1(x)))
