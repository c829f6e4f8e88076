"""The network as users meet it: sizes, stages, maps, starts, checks of its input."""

import itertools
import math

import numpy as np
import numpy_sanet as oracle
import pytest
import torch
from small_networks import NETWORKS, ONE_STAGE, PLAIN, images, small

from sa_zoo.models.attention import Attention
from sa_zoo.models.blocks import PostNormBlock
from sa_zoo.models.content import Content, Relative
from sa_zoo.models.network import SANet, attention_in
from sa_zoo.models.plain import PlainNet
from sa_zoo.models.terms import Learned, Quadratic

FIXED = [name for name in NETWORKS if small(name).pretrained_cfg["fixed_input_size"]]
NETS = {"paper": lambda **more: SANet((Relative,), **ONE_STAGE | more)}
NETS["plain"] = lambda **more: PlainNet(**PLAIN | more)


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_network_is_that_of_the_numpy_loop(kind):
    size = 24, 16 if kind == "plain" else 8
    model = small(kind, img_size=size, in_chans=2, dtype=torch.float64)
    for name, value in model.state_dict().items():
        if "norm" in name:
            torch.nn.init.uniform_(value, 0.5, 2.0)
    x = torch.randn(2, 2, *size, dtype=torch.float64)
    arrays = {name: value.numpy() for name, value in model.state_dict().items()}
    pooled_in = (0, 2, 3) if kind == "plain" else ()
    term = getattr(oracle, "quadratic" if kind == "plain" else kind)
    expected = oracle.network(arrays, x.numpy(), term, model.sizes["patch_size"], pooled_in)
    assert np.abs(model(x).detach().numpy() - expected).max() < 1e-10


@pytest.mark.parametrize("term", [Quadratic, Learned, Content])
@pytest.mark.parametrize("heads", [2, 3, 7, 10])
def test_each_head_of_a_kernel_starts_at_its_pixel(term, heads):
    torch.manual_seed(0)
    network = SANet((term,), (14, 18), embed_dim=23, num_heads=heads, depth=3, hidden_dim=5)
    for block in network.blocks[:2]:
        block.attn.terms[0].start_as_kernel()
    around = sorted(itertools.product((-2, -1, 0, 1, 2), repeat=2), key=lambda at: math.hypot(*at))
    row, column = torch.tensor(sorted(around[:heads])).T
    starts = []
    for P in network.attention_maps(torch.randn(1, 3, 14, 18)):
        middle = P.reshape(heads, 7, 9, 7, 9)[:, 3, 4]
        starts.append(middle[range(heads), 3 + row, 4 + column].min() > 0.8)
    assert starts == [True, True, False]
    network(torch.randn(1, 3, 14, 18)).square().sum().backward()
    # all of it learns: content from keys of zero, and columns of tables that no head's start reads
    for name, parameter in network.blocks[0].attn.terms[0].named_parameters():
        learns = parameter.grad.flatten(1).any(0) if parameter.dim() > 1 else parameter.grad
        assert learns.any() if name.startswith("W_") else learns.all(), name


@pytest.mark.parametrize("name", NETWORKS)
def test_attention_maps_are_the_probabilities_on_each_grid(name):
    model, x, seen = small(name), images(name), []
    for layer in attention_in(model.blocks).values():
        layer.register_forward_hook(lambda layer, given, made: seen.append((layer, *given, made)))
    model(x)
    for P, (layer, X, made) in zip(model.attention_maps(x), list(seen), strict=False):
        T = X.shape[1] * X.shape[2]
        positional = not any(hasattr(term, "W_qry") for term in layer.terms)
        assert P.shape == ((2, T, T) if positional else (2, 2, T, T))
        assert torch.allclose(P.sum(-1), torch.ones(()), atol=1e-6)
        assert torch.allclose(made, layer.W_out(layer.values(P, X)), atol=1e-5)


def test_layers_of_plain_networks_start_as_the_identity():
    for again in (False, True):
        network = PlainNet(**PLAIN)
        if again:
            network.init_weights()
        for block in network.blocks:
            slices = block.attn.W_val.weight.unflatten(1, [2, -1])  # (D, N_h, D_in)
            same = min(slices.shape[0], slices.shape[2])
            assert torch.equal(slices[:same, 1, :same], torch.eye(same))
            assert slices[:same].sum() == same


@pytest.mark.parametrize("term", [Learned, Content, Relative])
def test_relative_encodings_serve_smaller_images(term):
    torch.manual_seed(0)
    layer, X = term(11, 3, (7, 5)), torch.randn(2, 7, 5, 11)
    of_pixels = layer(X).unflatten(-1, (7, 5)).unflatten(-3, (7, 5))  # [.., y, x, y', x']
    expected = of_pixels[..., :3, :2, :3, :2].flatten(-2).flatten(-3, -2)
    torch.testing.assert_close(layer(X[:, :3, :2]), expected)


@pytest.mark.parametrize("name", FIXED)
def test_learned_encodings_refuse_another_size_until_it_is_set(name):
    model, x = small(name), torch.randn(2, 3, 16, 56)
    with pytest.raises(AssertionError, match="set_input_size"):
        model(x)
    model.set_input_size((16, 56))
    assert model(x).shape == (2, 11)


REFUSED = [
    ("plain", {"img_size": (20, 40)}),
    ("plain", {"img_size": (8, 40)}),  # less than the last tokens need
    ("plain", {"num_heads": 2.0}),
    ("plain", {"embed_dim": (7, 5)}),
    ("plain", {"depth": (2, 0, 3)}),
    ("plain", {"global_pool": "max"}),
    ("paper", {"depth": (2, 1)}),
    ("paper", {"img_size": 22}),
]


@pytest.mark.parametrize(("kind", "changes"), REFUSED)
def test_arguments_that_make_no_network_are_refused(kind, changes):
    with pytest.raises(ValueError, match=r"got .*expected"):
        NETS[kind](**changes)


@pytest.mark.parametrize("shape", [(3, 24, 40), (1, 3, 20, 40), (1, 3, 24, 36), (1, 5, 24, 40)])
def test_images_that_do_not_fit_are_refused(shape):
    with pytest.raises((AssertionError, RuntimeError), match="expected"):
        small("plain")(torch.randn(*shape))


def test_heads_start_with_the_centers_and_the_sharpness_of_the_paper():
    term = Attention(5, 997, (Quadratic,), (3, 7)).terms[0]
    assert term.Delta.std().item() == pytest.approx(2, rel=0.1)
    assert term.spread.mean().item() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("rate", ["proj_drop", "drop_path"])
def test_dropout_spares_residual_connections(rate):
    x = torch.randn(17, 5, 3, 7)
    block = PostNormBlock(7, 3, 11, (Quadratic,), (5, 3), **{rate: 1.0})
    assert torch.equal(block(x), block.norm2(block.norm1(x)))


def test_the_rate_of_drop_path_grows_with_depth_and_drops_images():
    blocks = small("learned", depth=6, drop_path_rate=0.5).blocks
    assert [block.drop_path.p for block in blocks] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5])
    x = torch.ones(53, 5, 3, 7)
    kept = blocks[-1].drop_path.train()(x)
    assert set(kept.mean(dim=(1, 2, 3)).tolist()) == {0.0, 2.0}
