"""Counted costs against formulas written by hand."""

import pytest
import timm
import torch
from torch import nn

from sa_zoo import attention_from_conv, convert, harden
from sa_zoo.cost import cost_of, cost_of_softness, training_macs
from sa_zoo.models.attention import Attention
from sa_zoo.models.terms import Quadratic


class Network(nn.Module):
    """Convolutions in both directions, a Gram matrix, a linear layer and fused attention."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, (2, 3))
        self.up = nn.ConvTranspose2d(5, 7, 3, stride=2)
        self.norm = nn.BatchNorm2d(5, affine=False)
        self.linear = nn.Linear(5, 17)

    def forward(self, x):
        x = self.norm(self.conv(x))
        up = self.up(x).sum()
        x = x.flatten(2)  # (B, 5, 12 * 11)
        x = self.linear(x @ x.transpose(1, 2))  # (B, 5, 17)
        return nn.functional.scaled_dot_product_attention(x, x, x) + up


def test_counts_are_the_formulas_and_leave_the_model_alone():
    network = Network()
    network.conv.eval()
    cost = cost_of(network, (3, 13, 13))
    pixels = 12 * 11
    convolutions, linear = (5 * 3 * 2 * 3 + 5 * 7 * 3 * 3) * pixels, 5 * 5 * 17
    assert cost.parameters == 5 * 3 * 2 * 3 + 5 + 5 * 7 * 3 * 3 + 7 + 5 * 17 + 17
    assert cost.linear_macs == convolutions + linear
    assert cost.macs == convolutions + 5 * 5 * pixels + linear + 2 * 5 * 5 * 17
    assert training_macs(network, (3, 13, 13)) == cost.macs
    assert network.training and not network.conv.training
    assert not network.linear._forward_hooks
    assert network.norm.num_batches_tracked == 0
    assert torch.isfinite(network(torch.zeros(1, 3, 13, 13))).all()


# Table 1 of the paper, in billions
PAPER = {"resnet18": 1.1, "sa_quadratic": 6.2, "sa_learned": 6.2, "sa_content": 15.0}


@pytest.mark.parametrize("name", PAPER)
def test_flops_as_the_paper_counts_are_those_of_its_table(name):
    cost = cost_of(timm.create_model(f"{name}_cifar"), (3, 32, 32))
    assert round(2e-9 * cost.linear_macs, 1) == PAPER[name]
    assert (cost.macs > cost.linear_macs) == name.startswith("sa_")


def test_attention_counts_as_the_convolution_it_was_made_of():
    conv = nn.Conv2d(6, 4, (3, 5), stride=2, padding=1, groups=2, bias=False)
    for layer in (conv, attention_from_conv(conv, alpha=46.0)):
        assert cost_of(layer, (6, 13, 17)).linear_macs == 4 * 3 * 15 * 7 * 8


def test_attention_counts_as_the_definition_and_trains_by_axes():
    network, T = nn.Sequential(Attention(7, 3, (Quadratic,), (13, 11))), 13 * 11
    others = T * 3 * 7 * 7 + T * 7 * 7
    image = 13, 11, 7
    assert training_macs(network, image) == 3 * T * (13 + 11) * 7 + others
    for _ in range(2):
        assert cost_of(network, image).macs == 3 * T * T * 7 + others
        harden(network)


def test_training_says_what_soft_layers_cost():
    """One head of alpha 1 in each of two dimensions, composed into a kernel that is larger than 1 x 1."""
    network = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(5, 7, 1))
    hard, _ = convert(network, "0", example=torch.zeros(1, 3, 97, 89))
    assert not cost_of_softness(hard, (3, 97, 89))
    soft, _ = convert(hard, "1", alpha=1.0, example=torch.zeros(1, 3, 97, 89))
    said = cost_of_softness(soft, (3, 97, 89))
    assert said.startswith("1 layers of soft attention: 0.0")
    pixels = 97 * 89
    as_convolutions = f"{pixels * (5 * 27 + 7 * 5) / 1e9:.3g}"
    assert said.endswith(f", {as_convolutions} as convolutions")
    assert float(said.split()[5]) > float(as_convolutions)
