"""values.py: adapters of peft around the value matrices of a converted layer."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from sa_zoo.convolution.harden import why_not_taps
from sa_zoo.convolution.layer_conversion import attention_from_conv, conv_from_attention
from sa_zoo.convolution.network_conversion import convert

CONVOLUTIONS = [
    nn.Conv1d(4, 6, 3, padding=1),
    nn.Conv2d(6, 12, (3, 5), stride=(2, 1), padding=(2, 4), dilation=2, groups=3),
    nn.Conv2d(7, 7, 3, padding=1, groups=7),
    nn.Conv3d(2, 5, 3, padding=1),
]


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("alpha", [46.0, 4.0])
@pytest.mark.parametrize("conv", CONVOLUTIONS)
def test_lora_changes_every_form_of_a_layer(conv, alpha, dora):
    """Hard, by axes and the definition, as merging its weights does."""
    torch.manual_seed(0)
    network = nn.Sequential(attention_from_conv(conv, alpha))
    (layer,) = network
    x = torch.randn(2, conv.in_channels, *[13, 11, 7][: conv.weight.ndim - 2])
    before = layer(x)
    adapted = get_peft_model(network, LoraConfig(target_modules=["W_val"], r=3, use_dora=dora))
    trained = {name: each for name, each in adapted.named_parameters() if each.requires_grad}
    for name, parameter in trained.items():
        if "lora_B" in name:  # zero at first
            nn.init.normal_(parameter)
    after = layer(x)
    after.sum().backward()
    assert len(trained) == 2 + dora and all(each.grad.any() for each in trained.values())
    assert not torch.allclose(after, before, atol=0.1)
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(layer.definition(x), after, **close)
    if alpha == 46:
        assert torch.equal(conv_from_attention(layer)(x), after)
    else:
        assert "merge adapters" in why_not_taps(layer)
    with adapted.disable_adapter():
        assert torch.equal(layer(x), before)
    torch.testing.assert_close(adapted.merge_and_unload()(x), after, **close)


def test_value_matrices_are_not_converted_again():
    convolutions = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 2, 3))
    partly, _ = convert(convolutions, "0")
    _, report = convert(partly)
    assert [row.name for row in report.layers] == ["1"] and not report.skipped
