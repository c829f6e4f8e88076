"""convolution/scale.py: networks for images of another size."""

import numpy as np
import pytest
import timm
import torch
from timm.utils import reparameterize_model

import sa_zoo
from sa_zoo.fast.choose import only
from sa_zoo.models.configuration_sa import SAConfig
from sa_zoo.models.modeling_sa import SAForImageClassification
from sa_zoo.models.network import terms_in

H, W = 24, 40
SIZES = {"img_size": (H, W), "num_classes": 3}
NETWORKS = {
    "sa_quadratic_tiny_cifar": {"embed_dim": 7, "hidden_dim": 13, "depth": 2},
    "sa_quadratic_gen_tiny_cifar": {"embed_dim": 7, "hidden_dim": 13, "depth": 1},
    "sa_plain_tiny_cifar": {"embed_dim": 5, "depth": 1},
}
every_network = pytest.mark.parametrize("name", NETWORKS)


def network(name, **more):
    torch.manual_seed(0)
    return timm.create_model(name, **SIZES | NETWORKS.get(name, {}) | more).double().eval()


def images(r=1):
    """Images of which each pixel is a square of r x r pixels."""
    x = torch.randn(2, 3, H, W, generator=torch.Generator().manual_seed(1)).double()
    return x.repeat_interleave(r, 2).repeat_interleave(r, 3)


@every_network
@pytest.mark.parametrize("r", [2, 3])
@pytest.mark.parametrize("as_taps", [False, True])
@pytest.mark.parametrize("deployed", [False, True])
def test_a_large_image_is_its_small_ones(name, r, as_taps, deployed):
    small = network(name)
    if as_taps:
        sa_zoo.harden(small)
    large = sa_zoo.scale(reparameterize_model(small) if deployed else small, r)
    with torch.no_grad():
        expected, found = small.forward_features(images()), large.forward_features(images(r))
    assert torch.allclose(found[:, ::r, ::r], expected, rtol=0, atol=1e-12)
    assert found.shape[1] > expected.shape[1]


def hardened(model):
    sa_zoo.harden(model)
    return model


def sharpened(model):
    """Heads on whole pixels, also on those between the pixels that a query of a scaled network sees."""
    for term in terms_in(model).values():
        term.Delta.data.round_()
        term.spread.data.mul_(100.0)
    return model


def doubled(model):
    return sa_zoo.scale(model, 2.0)


@pytest.mark.parametrize("name", ["sa_quadratic_tiny_cifar", "sa_quadratic_gen_tiny_cifar"])
@pytest.mark.parametrize(("first", "second"), [(hardened, doubled), (doubled, sharpened)])
def test_scaled_taps_are_those_of_their_definition(name, first, second):
    large = second(first(network(name)))
    x = torch.randn(2, 3, 2 * H, 2 * W, dtype=torch.float64)  # squares of different pixels
    with torch.no_grad():
        found = large(x)
        with only("definition"):
            assert torch.allclose(large(x), found, rtol=0, atol=1e-12)


def test_a_scaled_network_is_hardened():
    large = doubled(network("sa_quadratic_tiny_cifar"))
    pixels = sa_zoo.harden(large)
    assert [term.taps() for term in terms_in(large).values()] == list(pixels.values())


def test_constants_of_deployed_layers_are_renewed():
    small = network("sa_quadratic_tiny_cifar")
    large = sa_zoo.scale(reparameterize_model(small), 2.0)
    x = torch.randn(2, 3, 28, 44, dtype=torch.float64)  # as many tokens as the small images have
    assert torch.allclose(large(x), sa_zoo.scale(small, 2.0)(x), rtol=0, atol=1e-12)


@every_network
def test_scaling_back_gives_the_network_back(name):
    before = network(name)
    weights = {key: value.clone() for key, value in before.state_dict().items()}
    assert torch.equal(sa_zoo.scale(before, 1.0)(images()), before(images()))
    for r in (2.0, 1.5):
        again = sa_zoo.scale(sa_zoo.scale(before, r), 1 / r)
        assert torch.allclose(again(images()), before(images()), rtol=0, atol=1e-12)
        for key, value in again.state_dict().items():
            assert torch.allclose(value, weights[key], rtol=0, atol=1e-12)
    assert all(torch.equal(value, weights[key]) for key, value in before.state_dict().items())


def test_heads_see_the_same_part_of_the_image():
    heads = network("sa_quadratic_tiny_cifar").blocks[1].attn.terms[0]
    scaled = sa_zoo.scale(network("sa_quadratic_tiny_cifar"), 1.7).blocks[1].attn.terms[0]
    delta = torch.tensor([3.0, -2.0], dtype=torch.float64)
    scores = [
        -0.5 * term.spread**2 * (at - term.Delta).square().sum(1)
        for term, at in ((heads, delta), (scaled, 1.7 * delta))
    ]
    assert torch.allclose(*scores, rtol=1e-12)


@pytest.mark.parametrize("r", [2, 3])
def test_a_converted_cnn_sees_means_of_squares(r):
    cnn = timm.create_model("resnet_tiny_cifar", channels=(5, 7, 11, 13), num_classes=3)
    attention, _ = sa_zoo.convert(cnn.double().eval(), alpha=30.0)
    first = sa_zoo.scale(attention, r).conv1
    noise = torch.randn(2, 3, r * H, r * W, dtype=torch.float64)
    with torch.no_grad():
        means = torch.nn.functional.avg_pool2d(noise, r)
        expected, found = cnn.conv1(means), first(noise)[:, :, ::r, ::r]
    inside = np.s_[:, :, 2:-2, 2:-2]
    # a Gaussian is not a square: on noise, its worst case, the two differ
    assert (found - expected)[inside].norm() < 0.5 * expected[inside].norm()
    again = sa_zoo.scale(sa_zoo.scale(attention, r), 1 / r)
    assert torch.allclose(again(images()), attention(images()), rtol=0, atol=1e-12)


def test_pooling_of_a_cnn_reads_pixels_farther_apart():
    cnn = timm.create_model("resnet18").eval()
    attention, _ = sa_zoo.convert(cnn, alpha=30.0, example=torch.randn(1, 3, 64, 64))
    assert sa_zoo.scale(attention, 2.0).maxpool.dilation == 2
    partly, _ = sa_zoo.convert(cnn, "layer4.*", alpha=30.0, example=torch.randn(1, 3, 64, 64))
    with pytest.raises(ValueError, match="got the layer layer1"):
        sa_zoo.scale(partly, 2.0)


@pytest.mark.parametrize(
    ("name", "r", "said"),
    [
        ("sa_plain_tiny_cifar", 0.0, "r: got 0.0, expected a positive number"),
        ("sa_plain_tiny_cifar", float("nan"), "r: got nan, expected a positive number"),
        ("sa_learned_tiny_cifar", 2.0, "model: got the layer blocks.0.attn, expected a net"),
        ("vit_tiny_patch16_224", 2.0, "model: got VisionTransformer, expected a network of timm w"),
    ],
)
def test_what_does_not_scale_is_refused(name, r, said):
    with pytest.raises(ValueError, match=said):
        sa_zoo.scale(network(name), r)


def test_models_of_transformers_are_refused():
    config = SAConfig(attention_type="quadratic", image_size=8, hidden_size=7, num_hidden_layers=1)
    with pytest.raises(ValueError, match="model: got SAForImageClassification, expected a net"):
        sa_zoo.scale(SAForImageClassification(config), 2.0)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # TorchScript is deprecated
def test_scaled_networks_are_scripted_and_compiled():
    large = sa_zoo.scale(network("sa_plain_tiny_cifar", embed_dim=(5, 7, 11), depth=(1, 1, 1)), 2.0)
    with torch.no_grad():
        expected = large(images(2))
        # sizes are constants, as symbols take half a minute
        compiled = torch.compile(large, backend="aot_eager", dynamic=False)
        for same in (torch.jit.script(large), compiled):
            assert torch.allclose(same(images(2)), expected, rtol=0, atol=1e-12)
