"""deployed.py: what timm.utils.reparameterize_model makes of networks, against the networks and the definition."""

import copy

import pytest
import timm
import torch
from timm.utils import reparameterize_model
from torch import nn

import sa_zoo
from sa_zoo.fast import deployed as module
from sa_zoo.fast.route import only
from sa_zoo.models.attention import Attention
from sa_zoo.models.terms import GeneralizedQuadratic, Quadratic
from sa_zoo.models.variants import VARIANTS

SMALL = {"embed_dim": 10, "hidden_dim": 7, "num_heads": 3, "depth": 2}
STAGES = {"embed_dim": (6, 10, 14), "num_heads": 3}
NAMES = [variant.name for variant in VARIANTS if variant.terms and "tiny" not in variant.name]


def sizes_of(name: str) -> dict[str, object]:
    return STAGES if "plain" in name else SMALL


def small(name, seed=0, **arguments) -> nn.Module:
    """A network of a variant in evaluation mode, in float64, whose norms are away from ones and zeros."""
    torch.manual_seed(seed)
    network = (
        timm.create_model(name, img_size=(24, 40), **sizes_of(name) | arguments).eval().double()
    )
    for path, value in network.state_dict().items():
        if (".bn." in path or "norm" in path) and value.is_floating_point():
            nn.init.uniform_(value, 0.5, 2.0)
    return network


@pytest.mark.parametrize("name", NAMES)
def test_a_deployed_network_is_the_one_it_came_from(name):
    network = small(name)
    x = torch.randn(2, 3, 24, 40, dtype=torch.float64)
    deployed = reparameterize_model(network)
    with torch.no_grad():
        expected = network(x)
        assert (deployed(x) - expected).abs().max() < 1e-12
        modules = deployed.named_modules()
        norms = [path for path, each in modules if isinstance(each, nn.BatchNorm2d)]
        kept = (0, 2, 4) if name == "sa_plain_cifar" else ()  # after max-pooling
        assert norms == [f"blocks.{at}.merge.1.bn" for at in kept]
        again = small(name, seed=1, inference_mode=True)
        again.load_state_dict(deployed.state_dict())
        assert (again(x) - expected).abs().max() < 1e-12
        turned = x.transpose(2, 3)
        for each in (network, again):
            each.set_input_size((40, 24))
        assert (again(turned) - network(turned)).abs().max() < 1e-12
        for parameter in network.parameters():
            parameter.add_(1.0)
        assert (deployed(x) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["sa_plain_cifar", "sa_learned_cifar"])
def test_timm_saves_and_loads_a_deployed_network(name, tmp_path):
    sizes = sizes_of(name) | {"inference_mode": True}
    deployed = reparameterize_model(timm.create_model(name, **sizes_of(name)).eval())
    timm.models.save_for_hf(deployed, tmp_path, model_args=sizes, safe_serialization=True)
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(loaded(x), deployed(x))


@pytest.mark.parametrize("grid", [(7, 5), (23, 19)])
def test_images_of_as_many_pixels_need_not_have_the_constants_grid(grid):
    layer = Attention(3, 2, (Quadratic,), grid, dtype=torch.float64)
    deployed = copy.deepcopy(layer).fuse()
    X, turned = (torch.randn(2, *size, 3, dtype=torch.float64) for size in (grid, grid[::-1]))
    with torch.no_grad():
        for images in (X, turned):
            assert torch.allclose(deployed(images), layer(images), rtol=0, atol=1e-12)


def test_constants_too_large_to_keep_are_computed(monkeypatch):
    layer = Attention(3, 2, (GeneralizedQuadratic,), (7, 5), dtype=torch.float64)
    monkeypatch.setattr(module, "KEPT", 35**2)
    deployed, X = copy.deepcopy(layer).fuse(), torch.randn(2, 7, 5, 3, dtype=torch.float64)
    assert deployed.P is None and not any(p.requires_grad for p in deployed.parameters())
    X.requires_grad_()
    wanted, got = (torch.autograd.grad(each(X).square().sum(), X) for each in (layer, deployed))
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    ("name", "hard"),
    [("sa_quadratic_cifar", False), ("sa_quadratic_cifar", True), ("sa_plain_cifar", True)],
)
def test_graphs_of_deployed_networks_compute_no_probabilities(name, hard):
    """Those of hard networks only gather and convolve."""
    network = small(name)
    if hard:
        sa_zoo.harden(network)
    x = torch.randn(2, 3, 24, 40, dtype=torch.float64)
    program = torch.export.export(reparameterize_model(network), (x,))
    called = {str(node.target) for node in program.graph.nodes}
    others = ("softmax", "autocast", *(("matmul", "bmm", "exp.") if hard else ()))
    assert not any(word in each for each in called for word in others)
    with torch.no_grad(), only("definition"):
        assert (program.module()(x) - network(x)).abs().max() < 1e-12


@pytest.mark.parametrize("kind", ["converted", "local_vit"])
def test_other_networks_keep_their_function(kind):
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 12, "depth": 2, "num_heads": 3}
    network = timm.create_model("local_vit", **sizes).eval()
    if kind == "converted":
        resnet = timm.create_model("resnet_tiny_cifar").eval()
        network = sa_zoo.convert(resnet, layers="*", alpha=4.0)[0].eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(reparameterize_model(network).eval()(x), network(x))


def test_hardening_a_deployed_network_is_hardening_the_network():
    network, x = small("sa_quadratic_cifar"), torch.randn(2, 3, 24, 40, dtype=torch.float64)
    deployed = reparameterize_model(network)
    taps = sa_zoo.harden(network)
    expected = network(x)
    for made_of_taps in (network, deployed, deployed, reparameterize_model(network)):
        assert sa_zoo.harden(made_of_taps) == taps
        assert (made_of_taps(x) - expected).abs().max() < 1e-12
