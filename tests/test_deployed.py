"""deployed.py: what timm.utils.reparameterize_model makes of networks, against the networks and the definition."""

import copy
import pickle

import pytest
import timm
import torch
from small_networks import NETWORKS, images, small
from timm.utils import reparameterize_model
from torch import nn

import sa_zoo
from sa_zoo.fast import deployed as module
from sa_zoo.fast.route import only
from sa_zoo.models.attention import Attention
from sa_zoo.models.terms import GeneralizedQuadratic, Quadratic


def network_and_images(name, **arguments):
    """In float64, without gradients."""
    network = small(name, dtype=torch.float64, **arguments).requires_grad_(False)
    return network, images(name).double()


def difference(network, x, expected) -> float:
    return float((network(x) - expected).abs().max())


@pytest.mark.parametrize("name", NETWORKS)
def test_a_deployed_network_is_the_one_it_came_from(name):
    network, x = network_and_images(name)
    expected = network(x)
    deployed = reparameterize_model(network)
    assert difference(deployed, x, expected) < 1e-12
    modules = deployed.named_modules()
    norms = [path for path, each in modules if isinstance(each, nn.BatchNorm2d)]
    kept = (0, 2, 3) if name == "plain" else ()  # after max-pooling
    assert norms == [f"blocks.{at}.merge.1.bn" for at in kept]
    again, _ = network_and_images(name, inference_mode=True)
    again.load_state_dict(deployed.state_dict())
    assert difference(again, x, expected) < 1e-12
    for each in (network, again):
        each.set_input_size(x.shape[:1:-1])
    assert difference(again, x.mT, network(x.mT)) < 1e-12
    for parameter in network.parameters():
        parameter.add_(1.0)
    assert difference(deployed, x, expected) < 1e-12


@pytest.mark.parametrize("name", ["plain", "learned"])
def test_timm_saves_and_loads_a_deployed_network(name, tmp_path):
    sizes = NETWORKS[name] | {"num_classes": 11, "inference_mode": True}
    deployed = reparameterize_model(small(name))
    timm.models.save_for_hf(deployed, tmp_path, model_args=sizes, safe_serialization=True)
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    copied = pickle.loads(pickle.dumps(deployed))  # as for another process
    for other in (loaded, copied):
        assert torch.equal(other(images(name)), deployed(images(name)))


@pytest.mark.parametrize("grid", [(7, 5), (23, 19)])
@torch.no_grad()
def test_images_of_as_many_pixels_need_not_have_the_constants_grid(grid):
    layer = Attention(3, 2, (Quadratic,), grid, dtype=torch.float64)
    deployed, X = copy.deepcopy(layer).fuse(), torch.randn(2, *grid, 3, dtype=torch.float64)
    assert (deployed.P_across is None) == (grid == (7, 5))  # the larger one has factors
    for each in (X, X.transpose(1, 2)):
        assert difference(deployed, each, layer(each)) < 1e-12


@torch.no_grad()
def test_constants_too_large_to_keep_are_computed(monkeypatch):
    layer = Attention(3, 2, (GeneralizedQuadratic,), (7, 5), dtype=torch.float64)
    monkeypatch.setattr(module, "KEPT", 35**2)
    deployed, X = copy.deepcopy(layer).fuse(), torch.randn(2, 7, 5, 3, dtype=torch.float64)
    assert deployed.P is None
    assert difference(deployed, X, layer(X)) < 1e-12


@pytest.mark.parametrize(
    ("name", "hard"), [("quadratic", False), ("quadratic", True), ("plain", True)]
)
def test_graphs_of_deployed_networks_compute_no_probabilities(name, hard):
    """Those of hard networks only gather and convolve."""
    network, x = network_and_images(name)
    if hard:
        sa_zoo.harden(network)
    program = torch.export.export(reparameterize_model(network), (x,))
    called = {str(node.target) for node in program.graph.nodes}
    others = ("softmax", "autocast", *(("matmul", "bmm", "exp.") if hard else ()))
    assert not any(word in each for each in called for word in others)
    with only("definition"):
        assert difference(program.module(), x, network(x)) < 1e-12


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
    network, x = network_and_images("quadratic")
    deployed = reparameterize_model(network)
    taps = sa_zoo.harden(network)
    expected = network(x)
    for made_of_taps in (network, deployed, deployed, reparameterize_model(network)):
        assert sa_zoo.harden(made_of_taps) == taps
        assert difference(made_of_taps, x, expected) < 1e-12
