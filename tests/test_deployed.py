"""deployed.py: what timm.utils.reparameterize_model makes of networks, against the networks and the definition."""

import copy

import pytest
import timm
import torch
from timm.utils import reparameterize_model
from torch import nn

import sa_zoo
from sa_zoo.fast import portions
from sa_zoo.fast.choose import only
from sa_zoo.fast.deployed import Deployed
from sa_zoo.models.attention import Attention
from sa_zoo.models.network import attention_in
from sa_zoo.models.terms import GeneralizedQuadratic, Learned, Quadratic
from sa_zoo.models.variants import VARIANTS

B, D, HEADS = 5, 7, 3
GRIDS = {"by pixel": (7, 5), "by axis": (17, 11)}
SMALL = {"embed_dim": 10, "hidden_dim": 7, "num_heads": 3, "depth": 2}
STAGES = {"embed_dim": (6, 10, 14), "num_heads": 3}


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


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("terms", [(Quadratic,), (GeneralizedQuadratic,), (Learned, Quadratic)])
@pytest.mark.parametrize("images", [0, 1, B])
def test_a_deployed_layer_is_the_definition(terms, grid, images, monkeypatch):
    layer = Attention(D, HEADS, terms, grid, dim_out=11, dtype=torch.float64)
    X = torch.randn(images, *grid, D, dtype=torch.float64)
    monkeypatch.setattr(portions, "CONVOLVED_FROM", 0)
    with torch.no_grad(), only("definition"):
        expected = layer(X)
        # all heads of all images, of one image or one head at a time, and with P built for each batch
        for numbers, kept in ((10**9, 10**9), (0, 10**9), (0, 0)):
            monkeypatch.setattr(portions, "DIVIDED_FROM", numbers)
            monkeypatch.setattr(portions, "PORTION", 1)
            monkeypatch.setattr(portions, "LEAST", 1)
            monkeypatch.setattr("sa_zoo.fast.deployed.KEPT", kept)
            deployed = copy.deepcopy(layer).fuse()
            assert torch.allclose(deployed(X), expected, rtol=0, atol=1e-12)
            half = deployed.float()(X.float())
            assert torch.allclose(half, expected.float(), rtol=0, atol=1e-5)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert torch.allclose(deployed(X.float()).double(), expected, rtol=0, atol=0.1)
    deployed = copy.deepcopy(layer).fuse()
    assert not any(parameter.requires_grad for parameter in deployed.parameters())
    x = X.clone().requires_grad_()
    (dx,) = torch.autograd.grad(deployed(x).square().sum(), x)
    (wanted,) = torch.autograd.grad(layer.W_out(layer.definition(x)).square().sum(), x)
    assert torch.allclose(dx, wanted, rtol=0, atol=1e-10)


NETWORKS = [variant.name for variant in VARIANTS if variant.terms]


@pytest.mark.parametrize("name", [name for name in NETWORKS if "tiny" not in name])
def test_a_deployed_network_is_the_one_it_came_from(name, tmp_path):
    network = small(name)
    x = torch.randn(2, 3, 24, 40, dtype=torch.float64)
    deployed = reparameterize_model(network)
    with torch.no_grad():
        expected = network(x)
        assert (deployed(x) - expected).abs().max() < 1e-12
        modules = deployed.named_modules()
        norms = [path for path, each in modules if isinstance(each, nn.BatchNorm2d)]
        # after max-pooling, they stay
        kept = (0, 2, 4) if name == "sa_plain_cifar" else ()
        assert norms == [f"blocks.{at}.merge.1.bn" for at in kept]
        again = small(name, seed=1, inference_mode=True)
        again.load_state_dict(deployed.state_dict())
        assert (again(x) - expected).abs().max() < 1e-12
        for parameter in network.parameters():
            parameter.add_(1.0)
        assert (deployed(x) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("side", [1, -1])
@pytest.mark.parametrize("grid", [(7, 5), (1, 2)])
def test_a_kernel_beside_its_query_is_a_convolution(side, grid):
    layer = Attention(D, 6, (Quadratic,), grid, dtype=torch.float64).eval()
    offsets = side * torch.cartesian_prod(torch.arange(1, 3), torch.arange(-3, 0))
    X = torch.randn(B, *grid, D, dtype=torch.float64)
    with torch.no_grad():
        layer.terms[0].Delta.copy_(offsets if side > 0 else offsets.flip(0))
        layer.terms[0].spread.fill_(64.0)
        expected = layer.W_out(layer.definition(X))
        assert torch.allclose(layer(X), expected, rtol=0, atol=1e-12)
        assert torch.allclose(layer.fuse()(X), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["sa_plain_cifar", "sa_learned_cifar"])
def test_timm_saves_and_loads_a_deployed_network(name, tmp_path):
    arguments = sizes_of(name)
    network = timm.create_model(name, **arguments).eval()
    sizes = arguments | {"inference_mode": True}
    deployed = reparameterize_model(network)
    timm.models.save_for_hf(deployed, tmp_path, model_args=sizes, safe_serialization=True)
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(loaded(x), deployed(x))
        assert (loaded(x) - network(x)).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["sa_quadratic_cifar", "sa_learned_cifar", "sa_plain_cifar"])
def test_images_of_another_size_have_constants_of_their_own(name):
    network = small(name)
    deployed = reparameterize_model(network)
    x = torch.randn(2, 3, 40, 16, dtype=torch.float64)
    with torch.no_grad():
        if not network.fixed_img_size:
            assert (deployed(x) - network(x)).abs().max() < 1e-12
        network.set_input_size((40, 16))
        deployed.set_input_size((40, 16))
        assert (deployed(x) - network(x)).abs().max() < 1e-12
        layers = attention_in(deployed.blocks).values()
        assert all(layer.grid == (20, 8) or "plain" in name for layer in layers)


@pytest.mark.filterwarnings("ignore")  # of torch, for which tracing and scripting are legacy
@pytest.mark.parametrize("name", ["sa_quadratic_cifar", "sa_plain_cifar"])
def test_compilers_take_a_deployed_network(name):
    network = small(name).float()
    deployed = reparameterize_model(network)
    x = torch.randn(3, 3, 24, 40)
    batch = torch.export.Dim("batch")
    with torch.no_grad():
        expected = network(x)
        program = torch.export.export(deployed, (x,), dynamic_shapes=({0: batch},))
        compiled = torch.compile(deployed, backend="eager", fullgraph=True)
        for graph in (program.module(), compiled, torch.jit.trace(deployed, x)):
            assert (graph(x) - expected).abs().max() < 1e-5
        assert (torch.jit.script(deployed)(x) - expected).abs().max() < 1e-5
        assert (program.module()(x[:2]) - expected[:2]).abs().max() < 1e-5
    assert not any("softmax" in str(node.target) for node in program.graph.nodes)


def test_other_networks_keep_their_function():
    x = torch.randn(2, 3, 32, 32)
    resnet = timm.create_model("resnet_tiny_cifar").eval()
    for network in (
        resnet,
        sa_zoo.convert(resnet, layers="*", alpha=4.0)[0],
        timm.create_model(
            "local_vit", img_size=32, patch_size=8, embed_dim=12, depth=2, num_heads=3
        ),
    ):
        with torch.no_grad():
            assert torch.equal(reparameterize_model(network).eval()(x), network.eval()(x))


def test_hardening_a_deployed_network_is_hardening_the_network():
    network = small("sa_quadratic_cifar")
    deployed = reparameterize_model(network)
    assert sa_zoo.harden(deployed) == sa_zoo.harden(network)
    x = torch.randn(2, 3, 24, 40, dtype=torch.float64)
    with torch.no_grad():
        assert (deployed(x) - network(x)).abs().max() < 1e-12


def test_batch_norms_that_train_see_all_images_at_once(monkeypatch):
    network = small("sa_plain_cifar").train()
    whole = copy.deepcopy(network)
    x = torch.randn(B, 3, 24, 40, dtype=torch.float64)
    with torch.no_grad():
        expected = whole(x)
        monkeypatch.setattr(portions, "PORTION", 1)
        assert (network(x) - expected).abs().max() < 1e-10


@pytest.mark.parametrize("hard", [False, True])
def test_an_adapter_on_a_deployed_layer_counts(hard, monkeypatch):
    monkeypatch.setattr(portions, "DIVIDED_FROM", 0)
    network = small("sa_quadratic_kernel_cifar", num_heads=9)
    if hard:
        sa_zoo.harden(network)
    deployed = reparameterize_model(network)
    layer = next(iter(attention_in(deployed.blocks).values()))
    assert isinstance(layer, Deployed)
    X = torch.randn(B, *layer.grid, 10, dtype=torch.float64)
    with torch.no_grad():
        before = layer(X)
        layer.W_val.register_forward_hook(lambda module, given, made: 3.0 * made)
        assert (layer(X) - 3.0 * before).abs().max() < 1e-10
