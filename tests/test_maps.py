"""Attention maps: of every kind of layer, against its definition."""

import pytest
import timm
import torch
from torch.nn.functional import scaled_dot_product_attention

import sa_zoo  # registers the names
from sa_zoo.analysis.maps import attention_layers
from sa_zoo.convolution.gated import ContentAttention
from sa_zoo.models.network import SANet
from sa_zoo.models.variants import TERMS


def images(count=2, height=10, width=14):
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("variant", TERMS)
def test_maps_of_our_networks_are_their_probabilities(variant):
    torch.manual_seed(0)
    sizes = {"img_size": (10, 14), "embed_dim": 11, "depth": 3, "num_heads": 2, "hidden_dim": 13}
    model = SANet(TERMS[variant], **sizes).eval()
    layers = attention_layers(model, images())
    assert [layer.name for layer in layers] == [f"blocks.{index}.attn" for index in range(3)]
    for layer, P in zip(layers, model.attention_maps(images()), strict=True):
        assert (layer.grid, layer.keys, layer.heads) == ((5, 7), (5, 7), 2)
        assert layer.positional == (P.ndim == 3)
        assert torch.allclose(layer.maps, P, atol=1e-6)
        assert torch.allclose(layer.at((3, 5)).flatten(-2), P[..., 3 * 7 + 5, :], atol=1e-6)
        assert layer.standing((3, 5)) == (3, 5)
        assert not layer.module._forward_pre_hooks


@pytest.mark.parametrize("content", [False, True])
def test_maps_of_a_converted_network_are_those_of_its_layers(content):
    torch.manual_seed(0)
    cnn = torch.nn.Sequential(
        torch.nn.Conv2d(3, 5, 3, stride=2, padding=1), torch.nn.Conv2d(5, 7, (2, 5), padding=1)
    )
    network, _ = sa_zoo.convert(cnn, alpha=1.7, content=content, example=images())
    for module in network.modules():
        if isinstance(module, ContentAttention):
            module.gate.data.fill_(2.0)
    inputs = [images(), network[0](images())]
    for layer, x in zip(attention_layers(network, images()), inputs, strict=True):
        assert layer.positional != content
        assert torch.allclose(layer.maps, layer.module.probabilities(x), atol=1e-6)
        query, heads = (2, 3), layer.at((2, 3))
        assert heads.shape[-2:] == layer.module.pad(x).shape[-2:]
        assert torch.allclose(
            heads.flatten(-2), layer.maps[..., 2 * layer.grid[1] + 3, :], atol=1e-6
        )
    assert attention_layers(network, images())[0].standing(query) == (5, 7)


@pytest.mark.parametrize("name", ["test_vit", "test_vit3"])
def test_maps_of_a_vision_transformer_are_those_that_its_attention_uses(name, monkeypatch):
    """timm's fused attention calls scaled_dot_product_attention, from whose arguments P is computed again."""
    torch.manual_seed(0)
    model, seen = timm.create_model(name, img_size=96).eval(), []

    def record(query, key, value, **arguments):
        seen.append((query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5).softmax(dim=-1))
        return scaled_dot_product_attention(query, key, value, **arguments)

    x = images(2, 96, 96)
    layers = attention_layers(model, x)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    with torch.no_grad():
        model(x)
    assert len(layers) == len(model.blocks), (
        "without the attention of one query that pools the pixels of test_vit3"
    )
    for layer, P in zip(layers, seen, strict=False):
        assert layer.grid == (6, 6)
        kept = P[:, :, 1:, 1:]
        assert torch.allclose(layer.maps, kept / kept.sum(dim=-1, keepdim=True), atol=1e-5)
        assert torch.allclose(layer.dropped, P[:, :, 1:, 0], atol=1e-5)


@pytest.mark.parametrize("name", ["test_resnet", "swin_tiny_patch4_window7_224"])
def test_networks_without_such_attention_are_refused(name):
    small = (
        {"embed_dim": 24, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 3)}
        if name.startswith("swin")
        else {}
    )
    with pytest.raises(ValueError, match="expected one"):
        attention_layers(timm.create_model(name, **small), images(1, 224, 224))
