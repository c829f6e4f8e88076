"""network_conversion.py: layers swapped in whole networks, and the report."""

import copy
import pickle

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2
from torch import nn
from torchvision.models import squeezenet1_1

from sa_zoo.convolution.certificate import certificate
from sa_zoo.convolution.convolutional import ConvolutionalAttention, HardAttention
from sa_zoo.convolution.gated import ContentAttention
from sa_zoo.convolution.layer_conversion import attention_from_conv
from sa_zoo.convolution.network_conversion import convert, swap_convolutions
from sa_zoo.convolution.soft import SoftAttention


class Tiny(nn.Module):
    """A network with everything that a walker may stumble over; its output is a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 7, 3, stride=2), nn.BatchNorm2d(7), nn.ReLU())
        self.shared = nn.Conv2d(7, 7, 3, padding=1)
        self.again = self.shared
        self.tied = nn.ModuleList([nn.Conv2d(7, 5, 1), nn.Conv2d(7, 5, 1)])
        self.tied[1].weight = self.tied[0].weight
        self.up = nn.ConvTranspose2d(7, 7, 2, stride=2)
        self.head = nn.Conv2d(5, 2, 3, groups=1)

    def forward(self, x):
        x = self.again(self.shared(self.stem(x)))
        first, second = (layer(x) for layer in self.tied)
        return {"map": self.head(first - second), "up": (self.up(x), None)}


def attentions(network):
    return {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, ConvolutionalAttention)
    }


def test_a_network_is_the_same_function_after_conversion_and_the_original_untouched():
    torch.manual_seed(0)
    network = Tiny()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    x = torch.randn(2, 3, 19, 17)
    converted, report = convert(network, example=x)
    assert network.training and converted.training and not attentions(network)
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    assert (
        list(attentions(converted)) == ["stem.0", "shared", "head"]
        and converted.again is converted.shared
    )
    assert torch.equal(converted.eval()(x)["map"], network.eval()(x)["map"])
    assert report.logits == 0.0
    assert report.skipped == {
        "tied.0": "its weight is another layer's too",
        "tied.1": "its weight is another layer's too",
        "up": "its stride puts queries between keys, and each position in between has its own kernel",
    }


def test_modes_stay_as_they_were_layer_by_layer():
    network = Tiny()
    network.stem.eval()
    converted, _ = convert(network, example=torch.randn(1, 3, 19, 17))
    modes = {name: module.training for name, module in network.named_modules()}
    assert {name: converted.get_submodule(name).training for name in modes} == modes
    assert not converted.stem[0].W_val.training and converted.shared.W_val.training


def test_the_report_says_what_each_layer_became():
    torch.manual_seed(0)
    network, x = Tiny(), torch.randn(2, 3, 19, 17)
    _, report = convert(network, layers="stem.*, head", alpha=4.0, example=x)
    stem, head = report.layers
    assert (stem.name, stem.heads, stem.alpha) == ("stem.0", 9, 4.0)
    assert stem.shifts == [[0, 1, 2], [0, 1, 2]]
    assert stem.parameters == 7 * 3 * 9 + 7 + 9 + 9 * 2
    assert stem.conv_macs == 7 * 3 * 9 * 9 * 8 and head.conv_macs == 2 * 5 * 9 * 7 * 6
    assert stem.macs > stem.conv_macs
    assert all(0 < row.measured < row.bound for row in report.layers)
    assert 0 < report.logits < 0.2
    assert report.image == [3, 19, 17] and not report.skipped
    lines = report.table().splitlines()
    assert lines[2].startswith("| stem.0 | 9 | 0..2 x 0..2 | 4 | 223 |")
    assert all(line.count("|") == 10 for line in lines[:4])


def test_a_layer_used_twice_is_reported_by_its_larger_difference():
    network = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1))
    network.append(network[0])
    with torch.no_grad():
        network[0].weight.mul_(10)
    x = torch.randn(1, 3, 7, 7)
    converted, report = convert(network, alpha=3.0, example=x)
    assert converted[0] is converted[1] and len(report.layers) == 1
    second = network[0](x).detach()
    expected = (converted[0](second) - network[0](second)).abs().max().item()
    assert report.layers[0].measured == pytest.approx(expected, rel=1e-5)
    bound = certificate(converted[0], [7, 7], second.abs().max().item()).worst
    assert report.layers[0].bound == pytest.approx(bound, rel=1e-5)


@pytest.mark.parametrize(
    "build", [lambda: timm.create_model("test_resnet"), squeezenet1_1], ids=["timm", "torchvision"]
)
def test_networks_of_timm_and_torchvision_of_any_evaluation(build):
    torch.manual_seed(0)
    network = build().eval()
    x = torch.randn(2, 3, 67, 71)
    for alpha, kind, tolerance in ((46.0, HardAttention, 0.0), (20.0, SoftAttention, 1e-4)):
        converted, report = convert(network, alpha=alpha, example=x)
        assert report.logits <= tolerance
        assert {type(layer) for layer in attentions(converted).values()} == {kind}
        assert len(report.layers) == sum(
            isinstance(module, nn.Conv2d) for module in network.modules()
        )


def test_content_terms_start_at_the_same_function():
    network = timm.create_model("test_resnet").eval()
    x = torch.randn(1, 3, 35, 37)
    plain, _ = convert(network, layers="layer4.*", alpha=4.0, example=x)
    content, report = convert(network, layers="layer4.*", alpha=4.0, content=True, example=x)
    assert {type(layer) for layer in attentions(content).values()} == {ContentAttention}
    assert all(name.startswith("layer4.") for name in attentions(content))
    assert torch.allclose(content(x), plain(x), atol=1e-5)
    assert all(row.measured <= row.bound for row in report.layers)


def test_content_terms_of_large_layers_are_announced_before_they_are_evaluated(monkeypatch):
    network = nn.Sequential(
        nn.Conv2d(3, 2, 1, bias=False), nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(True)
    )
    x = torch.randn(1, 3, 37, 31)
    with pytest.warns(
        UserWarning, match=r"up to 13,285,701 scores per image and layer, in 1; choose later"
    ):
        monkeypatch.setattr(ContentAttention, "definition", lambda layer, x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert(network, layers="*", alpha=4.0, content=True, example=x)
    with pytest.raises(ZeroDivisionError):  # without a warning, which would be an error
        convert(network, layers="0", alpha=4.0, content=True, example=x)


def test_positions_are_kept_from_weight_decay():
    network = timm.create_model("test_resnet")
    swap_convolutions(network, "layer4.*", 4.0, True)
    optimiser = create_optimizer_v2(network, "sgd", lr=0.1, weight_decay=0.5)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    undecayed = {
        names[id(parameter)]
        for group in optimiser.param_groups
        if group["weight_decay"] == 0
        for parameter in group["params"]
    }
    for name in names.values():
        if name.endswith(("Delta", "alpha", "gate")):
            assert name in undecayed
        if name.endswith(("W_val.weight", "W_qry", "W_key")):
            assert name not in undecayed
    twin = copy.deepcopy(network)
    twin.own = attention_from_conv(torch.nn.Conv2d(3, 5, 3), 3.0)
    assert twin.no_weight_decay() == {*network.no_weight_decay(), "own.Delta", "own.alpha"}


def test_a_converted_network_reaches_another_process_as_it_is():
    network, x = timm.create_model("mhsa_resnet_tiny_cifar").eval(), torch.randn(2, 3, 32, 32)
    other = pickle.loads(pickle.dumps(network))  # as multiprocessing sends it
    assert (
        torch.equal(other(x), network(x)) and other.no_weight_decay() == network.no_weight_decay()
    )


def test_what_cannot_be_converted_is_said():
    with pytest.raises(
        ValueError, match=r"layers: got 'stem\.1x', expected names of convolutions, such as stem\.0"
    ):
        convert(Tiny(), layers="stem.1x", example=torch.randn(1, 3, 19, 17))
    with pytest.raises(ValueError, match="expected names of convolutions, of which it has none"):
        convert(torch.nn.Linear(3, 5), example=torch.randn(1, 3))
    with pytest.raises(ValueError, match="expected names of convolutions, of which it has none"):
        convert(torch.nn.Conv2d(3, 5, 3), example=torch.randn(1, 3, 7, 7))
    with pytest.raises(ValueError, match="its weight is another layer's too"):
        convert(Tiny(), layers="tied.*", example=torch.randn(1, 3, 19, 17))
