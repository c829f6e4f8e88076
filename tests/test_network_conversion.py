"""network_conversion.py: layers swapped in whole networks, and the report."""

import copy
import pickle

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2
from torch import nn
from torchvision.models import squeezenet1_1

from sa_zoo.convolution.convolutional import ConvolutionalAttention, HardAttention
from sa_zoo.convolution.network_conversion import convert, swap_convolutions
from sa_zoo.convolution.soft_attention import SoftAttention


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
        self.head = nn.Conv2d(5, 2, 3)

    def forward(self, x):
        x = self.again(self.shared(self.stem(x)))
        first, second = (layer(x) for layer in self.tied)
        return {"map": self.head(first - second), "up": (self.up(x), None)}


EXAMPLE = torch.randn(2, 3, 19, 17, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def network():
    torch.manual_seed(0)
    return Tiny()


def attentions(network):
    layers = network.named_modules()
    return {name: each for name, each in layers if isinstance(each, ConvolutionalAttention)}


def test_a_converted_network_is_the_same_function(network):
    before = copy.deepcopy(network.state_dict())
    network.stem.eval()
    converted, report = convert(network, example=EXAMPLE)
    torch.testing.assert_close(network.state_dict(), before, rtol=0, atol=0)
    assert not attentions(network)
    assert list(attentions(converted)) == ["stem.0", "shared", "head"]
    assert converted.again is converted.shared
    for name, module in network.named_modules():
        assert converted.get_submodule(name).training == module.training
    assert not converted.stem[0].W_val.training
    assert torch.equal(converted.eval()(EXAMPLE)["map"], network.eval()(EXAMPLE)["map"])
    assert report.logits == 0.0
    tied = "its weight is another layer's too"
    assert report.skipped.pop("up").startswith("its stride puts queries between keys")
    assert report.skipped == {"tied.0": tied, "tied.1": tied}


def test_the_report_describes_each_layer(network):
    _, report = convert(network, layers="stem.*, head", alpha=4.0, example=EXAMPLE)
    stem, head = report.layers
    assert (stem.name, stem.heads, stem.alpha) == ("stem.0", 9, 4.0)
    assert stem.shifts == [[0, 1, 2], [0, 1, 2]]
    assert stem.parameters == 7 * 3 * 9 + 7 + 9 + 9 * 2
    assert stem.conv_macs == 7 * 3 * 9 * 9 * 8
    assert head.conv_macs == 2 * 5 * 9 * 7 * 6
    assert stem.macs > stem.conv_macs
    assert all(0 < row.measured < row.bound for row in report.layers)
    assert 0 < report.logits < 0.2


def test_a_network_of_torchvision_is_converted():
    torch.manual_seed(0)
    network, x = squeezenet1_1().eval(), torch.randn(2, 3, 67, 71)
    convolutions = sum(isinstance(module, nn.Conv2d) for module in network.modules())
    for alpha, kind, tolerance in ((46.0, HardAttention, 0.0), (20.0, SoftAttention, 1e-4)):
        converted, report = convert(network, alpha=alpha, example=x)
        assert report.logits <= tolerance
        assert {type(layer) for layer in attentions(converted).values()} == {kind}
        assert len(report.layers) == convolutions


def test_positions_are_kept_from_weight_decay():
    network = timm.create_model("test_resnet")
    swap_convolutions(network, "layer4.*", 4.0)
    positions = network.no_weight_decay()
    groups = create_optimizer_v2(network, "sgd", lr=0.1, weight_decay=0.5).param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    for name, parameter in network.named_parameters():
        assert (name in positions) == name.endswith(("Delta", "alpha"))
        assert (id(parameter) in decayed) == (parameter.ndim > 1 and name not in positions)
    other = pickle.loads(pickle.dumps(network))  # as multiprocessing sends it
    assert other.no_weight_decay() == positions != set()


@pytest.mark.parametrize(
    ("build", "layers", "said"),
    [
        (Tiny, "stem.1x", r"layers: got 'stem\.1x', expected names of convolutions"),
        (lambda: nn.Conv2d(3, 5, 3), "*", "there are none"),
        (Tiny, "tied.*", "its weight is another layer's too"),
    ],
)
def test_networks_without_layers_to_convert_are_refused(build, layers, said):
    with pytest.raises(ValueError, match=said):
        convert(build(), layers=layers, example=EXAMPLE)
