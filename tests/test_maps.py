"""Attention maps of every kind of layer, against its definition."""

from itertools import product

import pytest
import timm
import torch
from small_networks import pictures, small_network
from torch.nn.functional import scaled_dot_product_attention

import sa_zoo
from sa_zoo.analysis.maps import attention_layers
from sa_zoo.models.variants import TYPES


def maps(layer):
    """P by `at`: (N_h, T_queries, T_keys) or (B, N_h, T_queries, T_keys)"""
    queries = product(*map(range, layer.grid))
    return torch.stack([layer.at(query).flatten(-2) for query in queries], dim=-2)


@pytest.mark.parametrize("variant", [name for name in TYPES if name != "plain"])
def test_maps_of_our_networks_are_their_probabilities(variant):
    model = small_network(variant)
    layers = attention_layers(model, pictures())
    assert [layer.name for layer in layers] == [f"blocks.{block}.attn" for block in range(3)]
    for layer, P in zip(layers, model.attention_maps(pictures()), strict=True):
        assert (layer.grid, layer.keys, layer.heads) == ((7, 5), (7, 5), 5)
        assert layer.positional == (P.ndim == 3)
        assert torch.allclose(maps(layer), P, atol=1e-6)
        assert not layer.module._forward_pre_hooks


def test_maps_of_a_converted_network_are_those_of_its_layers():
    first = torch.nn.Conv2d(3, 5, 3, stride=2, padding=1)
    cnn = torch.nn.Sequential(first, torch.nn.Conv2d(5, 7, (2, 5), padding=1))
    network, _ = sa_zoo.convert(cnn, alpha=1.7, example=pictures())
    layers = attention_layers(network, pictures())
    for layer, x in zip(layers, [pictures(), network[0](pictures())], strict=True):
        assert layer.positional
        assert torch.allclose(maps(layer), layer.module.probabilities(x), atol=1e-6)
        assert layer.keys == list(layer.module.pad(x).shape[-2:])
    assert layers[0].origin((2, 3)) == (5, 7)


@pytest.mark.parametrize("name", ["test_vit", "test_vit3"])
def test_maps_of_a_vision_transformer_are_those_it_uses(name, monkeypatch):
    """timm's fused attention calls scaled_dot_product_attention, whose arguments give P again."""
    torch.manual_seed(0)
    model, recorded = timm.create_model(name, img_size=96).eval(), []

    def record(query, key, value, **arguments):
        recorded.append((query @ key.mT * query.shape[-1] ** -0.5).softmax(dim=-1))
        return scaled_dot_product_attention(query, key, value, **arguments)

    x = pictures(size=(96, 96))
    layers = attention_layers(model, x)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    model(x)
    # without the attention of one query that pools the pixels of test_vit3
    assert len(layers) == len(model.blocks)
    for layer, P in zip(layers, recorded, strict=False):
        assert layer.grid == (6, 6)
        pixels = P[:, :, 1:, 1:]
        assert torch.allclose(maps(layer), pixels / pixels.sum(dim=-1, keepdim=True), atol=1e-5)
        assert torch.allclose(layer.token_share, P[:, :, 1:, 0], atol=1e-5)
