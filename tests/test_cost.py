"""Counted costs against formulas written by hand."""

import timm
import torch
from torch import nn

import sa_zoo  # noqa: F401  registers the names
from sa_zoo.cost import cost_of, training_macs


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
    assert cost.parameters == 5 * 3 * 2 * 3 + 5 + 5 * 17 + 17
    assert cost.linear_macs == 5 * 5 * 17
    assert cost.macs == 5 * 3 * 2 * 3 * pixels + 5 * 5 * pixels + 5 * 5 * 17
    assert cost.activations == 5 * pixels + 5 * 5 + 5 * 17


def test_the_papers_count_of_its_quadratic_model_is_6_2_gflops():
    cost = cost_of(timm.create_model("sa_quadratic_cifar"), (3, 32, 32))
    assert round(2 * cost.linear_macs / 1e9, 1) == 6.2
    assert cost.macs > cost.linear_macs


def test_fused_attention_counts_both_products_and_one_output():
    class Fused(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x)

    cost = cost_of(Fused(), (7, 11, 13))
    assert (cost.macs, cost.activations) == (2 * 7 * 11 * 11 * 13, 7 * 11 * 13)


def test_training_counts_one_forward_pass_and_leaves_the_model_alone():
    model = nn.Sequential(nn.Conv2d(3, 5, 2), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(5 * 12 * 10, 7)).eval()
    assert training_macs(model, (3, 13, 11)) == 5 * 3 * 2 * 2 * 12 * 10 + 5 * 12 * 10 * 7
    assert not model.training and model[1].num_batches_tracked == 0


def test_training_counts_what_is_executed():
    executed = timm.create_model("sa_quadratic_cifar", depth=1)
    by_definition = cost_of(executed, (3, 32, 32)).macs
    assert training_macs(executed, (3, 32, 32)) < by_definition  # factors by axes
    with_dropout = timm.create_model("sa_quadratic_cifar", depth=1, attn_drop_rate=0.1)
    assert training_macs(with_dropout, (3, 32, 32)) == by_definition


def test_the_model_keeps_no_trace_of_being_counted():
    network = Network()
    cost_of(network, (3, 13, 13))
    assert not network.linear._forward_hooks
    assert torch.isfinite(network(torch.zeros(1, 3, 13, 13))).all()
