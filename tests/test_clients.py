"""Other people's libraries: those that the suite has are tried here, and the examples of docs/usage.md are run."""

import ast
import json
import re
from pathlib import Path

import pytest
import timm
import torch
import try_clients
from try_clients import CLIENTS, expected_maps, images, near

import sa_zoo

ROOT = Path(__file__).parents[1]
ROWS = json.loads((ROOT / "docs" / "clients.json").read_text(encoding="utf-8"))
BLOCKS = re.findall(
    r"^```python\n(.*?)^```",
    try_clients.USAGE.read_text(encoding="utf-8"),
    re.DOTALL | re.MULTILINE,
)
HERE = (
    "timm",
    "transformers",
    "accelerate",
    "torch",
    "torchvision",
)  # as the package depends on them
FUNCTIONS = [function for client in HERE for function in CLIENTS[client]]


@pytest.mark.filterwarnings("ignore")  # of other libraries
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_client_works_as_the_table_says(function):
    torch.manual_seed(0)
    results = {row["done"]: row["result"] for row in ROWS}
    assert function() == results[function.__doc__]


def test_the_table_has_every_client():
    functions = [(client, function) for client in CLIENTS for function in CLIENTS[client]]
    assert [(row["client"], row["done"]) for row in ROWS] == [(c, f.__doc__) for c, f in functions]


def defined_by(library: str) -> dict:
    """The functions and classes of the example that uses a library, which need not be installed."""
    (example,) = [block for block in BLOCKS if library in block]
    tree = ast.parse(example)
    tree.body = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    defined = {"torch": torch}
    exec(compile(tree, "usage.md", "exec"), defined)
    return defined


def grad_cam(
    network: torch.nn.Module, layer: torch.nn.Module, transform, x: torch.Tensor
) -> torch.Tensor:
    """Grad-CAM (Selvaraju et al. 2017) before its ReLU, as these libraries compute it: axis 1 is channels. (B, H, W)"""
    kept = []
    handle = layer.register_forward_hook(lambda _, __, output: kept.append(output))
    logits = network(x)
    handle.remove()
    (gradient,) = torch.autograd.grad(logits.amax(1).sum(), kept)
    features, gradient = transform(kept[0]), transform(gradient)
    return torch.einsum("bchw,bc->bhw", features, gradient.mean((2, 3)))


NETWORKS = {
    "sa_quadratic_tiny_cifar": {"depth": 3},
    "sa_content_tiny_cifar": {"depth": 2},
    "mhsa_resnet_tiny_cifar": {},
    "resnet_tiny_cifar": {},
}


@pytest.fixture(params=NETWORKS)
def network(request):
    torch.manual_seed(0)
    return timm.create_model(request.param, num_classes=7, **NETWORKS[request.param]).eval()


def test_reshape_transform_gives_the_class_activation_map(network):
    layer = network.get_submodule(network.feature_info[-1]["module"])
    channels_last = getattr(network, "output_fmt", "NCHW") == "NHWC"
    transform = defined_by("pytorch_grad_cam")["channels_first"] if channels_last else lambda x: x
    maps = grad_cam(network, layer, transform, images(3))
    assert near(maps, expected_maps(network, images(3)), 1e-5)


def test_the_model_for_captum_has_a_layer_with_channels_first(network):
    wrapped = defined_by("captum")["ChannelsFirst"](network)
    assert torch.equal(wrapped(images(3)), network(images(3)))
    maps = grad_cam(wrapped, wrapped.features, lambda x: x, images(3))
    assert near(maps, expected_maps(network, images(3)), 1e-5)


def test_without_it_the_map_of_a_network_of_attention_is_another():
    network = try_clients.attention_network()
    wrong = grad_cam(network, network.blocks[-1], lambda x: x, images(3))
    assert wrong.shape != expected_maps(network, images(3)).shape


def test_part_of_a_detector_becomes_attention():
    (example,) = [block for block in BLOCKS if "DetrConfig" in block]
    defined = {"sa_zoo": sa_zoo}
    exec(example, defined)
    assert {row.name.rpartition("layer4")[1] for row in defined["report"].layers} == {"layer4"}
    assert {row.alpha for row in defined["report"].layers} == {4.0}
