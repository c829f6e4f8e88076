"""yardsticks.py and SANet.explicit: the twins that speed is measured by are what they say they are."""

import pytest
import timm
import torch
from sa_zoo.kernels.products import Linear
from torch import nn

from sa_zoo.analysis.yardsticks import beside, evaluations, with_convolutions
from sa_zoo.models.attention import Attention, ExplicitAttention
from sa_zoo.models.network import ExplicitBlock

SMALL = {"embed_dim": 7, "depth": 3, "num_heads": 2, "hidden_dim": 13, "img_size": (16, 20), "num_classes": 11}


def small(name: str) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, **SMALL).eval()


@pytest.mark.parametrize("name", ["sa_quadratic_cifar", "sa_quadratic_gen_cifar", "sa_content_cifar", "sa_eq8_cifar"])
def test_the_explicit_twin_has_the_same_logits_and_nothing_but_torchs_own_products(name):
    network, x = small(name), torch.randn(5, 3, 16, 20)
    twin = network.explicit()
    kinds = {type(module) for module in twin.modules()}
    assert {ExplicitAttention, ExplicitBlock, nn.Linear} <= kinds and not {Attention, Linear} & kinds
    assert any(type(module) is Attention for module in network.modules())
    assert torch.allclose(twin(x), network(x), atol=1e-5)
    network.double(), twin.double()
    assert (twin(x.double()) - network(x.double())).abs().max() < 1e-10


def test_the_convolutional_twin_differs_in_attention_alone():
    network = small("sa_quadratic_cifar")
    twin, x = with_convolutions(network), torch.randn(5, 3, 16, 20)
    assert twin.forward_features(x).shape == network.forward_features(x).shape
    mixing = [block.attn for block in twin.blocks]
    assert all(isinstance(layer, nn.Conv2d) and layer.kernel_size == (3, 3) for layer in mixing)
    others = {name: p for name, p in twin.state_dict().items() if ".attn." not in name}
    assert all(torch.equal(p, network.state_dict()[name]) for name, p in others.items())
    first, last = torch.randn(1, 5, 3, 7), nn.functional.conv2d
    expected = last(first.permute(0, 3, 1, 2), mixing[0].weight, mixing[0].bias, padding=1).permute(0, 2, 3, 1)
    assert torch.allclose(mixing[0](first), expected, atol=1e-6)


def test_other_networks_stand_alone():
    cnn = timm.create_model("resnet_tiny_cifar")
    assert list(beside(cnn)) == ["as built"]
    assert list(evaluations(small("sa_quadratic_cifar"))) == ["as built", "explicit"]
    assert list(beside(small("sa_quadratic_cifar"))) == ["as built", "explicit", "folded", "3x3 convolutions"]
