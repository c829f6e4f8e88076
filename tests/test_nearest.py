"""The convolution nearest to an attention layer: against convolutions, NumPy loops, and its own bound."""

import numpy as np
import pytest
import torch
from numpy_convolution import nearest_convolution
from torch import nn

from sa_zoo.convolution.nearest import (
    NearestConvolution,
    coefficients,
    distance,
    value_matrices,
)
from sa_zoo.models.attention import Attention
from sa_zoo.models.norm import BatchNorm
from sa_zoo.models.terms import Quadratic

H, W, K = 5, 7, 3


P = torch.randn(2, H * W, H * W, dtype=torch.float64).mul(3).softmax(-1)


def test_coefficients_and_distance_are_those_of_plain_loops():
    c, C = nearest_convolution(P.numpy(), (H, W), K)
    assert coefficients(P, (H, W), K).numpy() == pytest.approx(c)
    assert distance(P, (H, W), K).numpy() == pytest.approx(np.abs(P.numpy() - C).sum(-1))


@pytest.mark.parametrize("W_out", [nn.Linear, BatchNorm])
def test_no_difference_of_outputs_exceeds_the_bound(W_out):
    torch.manual_seed(0)
    attention = Attention(11, 3, (Quadratic,), (H, W), W_out=W_out).double().eval()
    if W_out is BatchNorm:
        nn.init.uniform_(attention.W_out.bn.running_var, 0.5, 2.0)
    P = attention.probabilities(torch.zeros(1, H, W, 11)).detach()
    nearest = NearestConvolution(attention.requires_grad_(False), P, (H, W), K).double()
    unit = torch.eye(11, dtype=torch.float64)[None, None]
    outer = (attention.W_out(unit) - attention.W_out(0 * unit))[0, 0].T
    values = torch.einsum("po,ohd->phd", outer, attention.W_val.weight.unflatten(1, [3, 11]))
    assert torch.allclose(value_matrices(attention), values)
    rows = (P - torch.from_numpy(nearest_convolution(P.numpy(), (H, W), K)[1])).abs().sum(-1)
    assert nearest.bound == pytest.approx(float((values.abs().sum(-1) @ rows).max()))
    X = 2 * torch.rand(101, H, W, 11, dtype=torch.float64) - 1
    worst = (attention(X.sign()) - nearest(X.sign())).abs().max()
    assert 0.05 * nearest.bound < worst <= nearest.bound


@pytest.mark.parametrize("size", [0, 2, 7])
def test_even_windows_and_larger_than_the_image_are_refused(size):
    with pytest.raises(ValueError, match=f"window: got {size}, expected an odd number up to 5"):
        coefficients(P, (H, W), size)
