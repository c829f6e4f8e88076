"""gated.py: the gated content term."""

import numpy as np
import pytest
import torch
from torch import nn

from sa_zoo.convolution.gated import ContentAttention
from sa_zoo.convolution.layer_conversion import attention_from_conv


def opened(conv, alpha, gate):
    layer = attention_from_conv(conv, alpha, content=True)
    with torch.no_grad():
        layer.gate.copy_(gate)
    return layer


def test_with_its_gate_shut_the_layer_is_the_positional_one():
    grouped, circular = (
        nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2),
        nn.Conv1d(2, 3, 5, padding_mode="circular"),
    )
    for conv in (grouped, circular):
        layer = attention_from_conv(conv.double(), 2.3, content=True)
        x = torch.randn(2, conv.in_channels, *[7] * (conv.weight.ndim - 2), dtype=torch.float64)
        assert isinstance(layer, ContentAttention)
        assert torch.allclose(layer(x), attention_from_conv(conv, 2.3)(x), atol=1e-12)


def test_the_gate_opens_by_its_gradient_and_content_follows():
    layer = attention_from_conv(nn.Conv2d(3, 5, 3, padding=1), 2.0, content=True)
    x = torch.randn(2, 3, 5, 7)
    layer(x).square().sum().backward()
    assert layer.gate.grad.abs().min() > 0 and not layer.W_qry.grad.any()
    layer.zero_grad()
    with torch.no_grad():
        layer.gate += 0.1
    layer(x).square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in layer.parameters())


def test_scores_are_position_plus_gated_content():
    conv = nn.Conv2d(3, 5, (3, 2), stride=(1, 2), padding=(1, 0)).double()
    gate = torch.linspace(-1, 1, 6)
    layer = opened(conv, 1.1, gate)
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    P = layer.probabilities(x).detach().numpy()
    keys = np.pad(x.numpy(), [(0, 0), (0, 0), (1, 1), (0, 0)])
    W_qry, W_key, Delta = (
        tensor.detach().numpy() for tensor in (layer.W_qry, layer.W_key, layer.Delta)
    )
    assert P.shape == (2, 6, 4 * 2, 6 * 5)
    for batch in range(2):
        for head in range(6):
            for number, (i, j) in enumerate(np.ndindex(4, 2)):
                query = W_qry[head] @ keys[batch, :, i + 1, 2 * j]
                scores = np.zeros((6, 5))
                for k in np.ndindex(6, 5):
                    away = np.array(k) - (i + 1, 2 * j) - Delta[head]
                    content = query @ (W_key[head] @ keys[batch, :, *k])
                    scores[k] = -1.1 * away @ away + gate[head].item() * content / np.sqrt(
                        len(query)
                    )
                weights = np.exp(scores - scores.max()).ravel()
                assert np.abs(P[batch, head, number] - weights / weights.sum()).max() < 1e-12


@pytest.mark.parametrize("gate", [0.0, 1.0, 1e4])
def test_many_images_with_gates_of_any_size_follow_the_definition(gate):
    """More images than are evaluated at once, on a wide image; the largest gate reaches keys all over it."""
    conv = nn.Conv2d(2, 3, 3, padding=1).double()
    layer = opened(conv, 4.0, torch.full((9,), gate, dtype=torch.float64))
    x = torch.randn(37, 2, 7, 19, dtype=torch.float64)
    keys = layer.pad(x)
    query, key = layer.content(keys)
    P = torch.softmax(layer.positional_scores([9, 21]) + query @ key, dim=-1)
    expected = (
        torch.einsum("bhqk,bik,oih->boq", P, keys.flatten(2), layer.W_val().flatten(2))
        + layer.b_out[:, None]
    )
    assert (layer(x).flatten(2) - expected).abs().max() < 1e-12


def test_the_batch_is_free_in_an_exported_layer():
    layer = attention_from_conv(nn.Conv2d(2, 3, 3, padding=1), 4.0, content=True)
    few, many = torch.randn(2, 2, 5, 7), torch.randn(37, 2, 5, 7)
    exported = torch.export.export(
        layer, (few,), dynamic_shapes=({0: torch.export.Dim("batch")},)
    ).module()
    assert torch.allclose(exported(many), layer(many), atol=1e-6)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_the_batch_is_free_in_a_traced_layer():
    layer = attention_from_conv(nn.Conv2d(2, 3, 3, padding=1), 4.0, content=True)
    traced, many = torch.jit.trace(layer, (torch.randn(2, 2, 5, 7),)), torch.randn(37, 2, 5, 7)
    assert torch.allclose(traced(many), layer(many), atol=1e-6)


def test_no_images_give_no_images():
    layer = attention_from_conv(nn.Conv2d(2, 3, 3, stride=2), 4.0, content=True)
    assert layer(torch.randn(0, 2, 11, 7)).shape == (0, 3, 5, 3)


def test_one_hot_heads_and_queries_off_the_keys_are_refused():
    with pytest.raises(ValueError, match="alpha: got inf with content=True"):
        attention_from_conv(nn.Conv2d(3, 5, 3), float("inf"), content=True)
    with pytest.raises(ValueError, match="its padding puts queries beyond all keys"):
        attention_from_conv(nn.Conv2d(3, 5, 3, padding=3), 3.0, content=True)
