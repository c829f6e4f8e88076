"""content_attention.py: the gated content term."""

import numpy as np
import pytest
import torch
from numpy_convolution import padded, probabilities
from torch import nn

from sa_zoo.convolution.layer_conversion import attention_from_conv


def opened(conv, alpha, gate):
    layer = attention_from_conv(conv.double(), alpha, content=True)
    layer.gate.data = gate.double()
    return layer


def test_scores_are_position_plus_gated_content():
    conv = nn.Conv2d(13, 5, (3, 2), stride=(1, 2), padding=(1, 0))  # D_h = 3
    gate = torch.linspace(-1, 1, 6)
    layer = opened(conv, 1.1, gate)
    x = torch.randn(2, 13, 4, 5, dtype=torch.float64)
    P = layer.probabilities(x).detach().numpy()
    images = padded(x.numpy(), [(1, 1), (0, 0)], "zeros")
    W_qry, W_key, Delta, alpha = (
        tensor.detach().numpy() for tensor in (layer.W_qry, layer.W_key, layer.Delta, layer.alpha)
    )
    for image, maps in zip(images, P, strict=True):

        def content(head, q, image=image):
            query, keys = W_qry[head] @ image[:, *q], W_key[head] @ image.reshape(13, -1)
            return gate[head].item() * query @ keys / 3**0.5

        expected = probabilities((6, 5), (4, 2), Delta, alpha, (1, 2), (1, 0), content)
        assert np.abs(maps - expected).max() < 1e-12


def test_queries_off_the_keys_are_refused():
    with pytest.raises(ValueError, match="its padding puts queries beyond all keys"):
        attention_from_conv(nn.Conv2d(3, 5, 3, padding=3), 3.0, content=True)
