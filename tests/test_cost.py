"""Counted costs against formulas written by hand."""

import pytest
import timm
import torch
from torch import nn

from sa_zoo import attention_from_conv
from sa_zoo.folders.cost import cost_of, training_macs


class Network(nn.Module):
    """A convolution, a Gram matrix and a linear layer, of sizes that are distinct primes."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, (2, 3))
        self.linear = nn.Linear(5, 17)

    def forward(self, x):
        x = self.conv(x).flatten(2)  # (B, 5, 12 * 11)
        return self.linear(x @ x.transpose(1, 2))  # (B, 5, 17)


def test_counts_are_those_of_the_formulas():
    cost = cost_of(Network(), (3, 13, 13))
    pixels = 12 * 11
    convolution, linear = 5 * 3 * 2 * 3 * pixels, 5 * 5 * 17
    assert cost.parameters == 5 * 3 * 2 * 3 + 5 + 5 * 17 + 17
    assert cost.linear_macs == convolution + linear
    assert cost.macs == convolution + 5 * 5 * pixels + linear
    assert cost.activations == 5 * pixels + 5 * 5 + 5 * 17


def test_transposed_convolutions_meet_every_pixel_of_their_input():
    down, up = nn.Conv2d(3, 5, 2, stride=2), nn.ConvTranspose2d(5, 7, 3, stride=2)
    cost = cost_of(nn.Sequential(down, up), (3, 22, 26))
    assert cost.macs == cost.linear_macs == (5 * 3 * 2 * 2 + 5 * 7 * 3 * 3) * 11 * 13


# Table 1 of the paper, in billions: ResNet18, SA quadratic, SA learned, SA learned + content.
PAPER = {
    "resnet18_cifar": 1.1,
    "sa_quadratic_cifar": 6.2,
    "sa_learned_cifar": 6.2,
    "sa_content_cifar": 15.0,
}


@pytest.mark.parametrize("name", PAPER)
def test_flops_as_the_paper_counts_are_those_of_its_table(name):
    cost = cost_of(timm.create_model(name), (3, 32, 32))
    assert round(2e-9 * cost.linear_macs, 1) == PAPER[name]
    assert (cost.macs > cost.linear_macs) == name.startswith("sa_")


def test_attention_made_of_a_convolution_counts_as_that_convolution():
    conv = nn.Conv2d(6, 4, (3, 5), stride=2, padding=1, groups=2, bias=False)
    counts = {
        cost_of(layer, (6, 13, 17)).linear_macs
        for layer in (conv, attention_from_conv(conv, alpha=46.0))
    }
    assert counts == {4 * 3 * 15 * 7 * 8}


def test_the_definition_is_counted_whatever_route_a_network_takes():
    network = timm.create_model("sa_quadratic_tiny_cifar", img_size=64)
    tokens, dim, hidden = 16 * 16, 96, 192
    layer = 9 * tokens * tokens * dim + tokens * (9 * dim * dim + dim * dim + 2 * dim * hidden)
    cost = cost_of(network, (3, 64, 64))
    assert cost.macs == 6 * layer + tokens * 48 * dim + dim * 10
    assert cost.linear_macs == cost.macs - 6 * 9 * tokens * tokens * dim


def test_fused_attention_counts_both_products_and_one_output():
    class Fused(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x)

    cost = cost_of(Fused(), (7, 11, 13))
    assert (cost.macs, cost.activations) == (2 * 7 * 11 * 11 * 13, 7 * 11 * 13)


def test_training_counts_one_forward_pass_and_leaves_the_model_alone():
    model = nn.Sequential(
        nn.Conv2d(3, 5, 2), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(5 * 12 * 10, 7)
    ).eval()
    assert training_macs(model, (3, 13, 11)) == 5 * 3 * 2 * 2 * 12 * 10 + 5 * 12 * 10 * 7
    assert not model.training and model[1].num_batches_tracked == 0


def test_training_counts_what_is_executed():
    executed = timm.create_model("sa_quadratic_tiny_cifar", depth=1, img_size=68)  # 17x17 tokens
    by_definition = cost_of(executed, (3, 68, 68)).macs
    assert training_macs(executed, (3, 68, 68)) < by_definition  # factors by axes
    with_dropout = timm.create_model(
        "sa_quadratic_tiny_cifar", depth=1, img_size=68, attn_drop_rate=0.1
    )
    assert training_macs(with_dropout, (3, 68, 68)) == by_definition


def test_the_model_keeps_no_trace_of_being_counted():
    network = Network()
    network.conv.eval()
    cost_of(network, (3, 13, 13))
    assert network.training and not network.conv.training
    assert not network.linear._forward_hooks
    assert torch.isfinite(network(torch.zeros(1, 3, 13, 13))).all()
