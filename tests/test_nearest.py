"""The convolution nearest to an attention layer: against convolutions, NumPy loops, and its own bound."""

import numpy as np
import pytest
import torch
from numpy_convolution import nearest_convolution

from sa_zoo.convolution.nearest import (
    NearestConvolution,
    coefficients,
    distance,
)
from sa_zoo.models.attention import Attention
from sa_zoo.models.terms import Quadratic

H, W, K = 5, 7, 3


def random_maps(heads=2):
    random = np.random.default_rng(0)
    scores = np.exp(3 * random.normal(size=(heads, H * W, H * W)))
    return scores / scores.sum(-1, keepdims=True)


def test_taps_and_distance_are_those_of_plain_loops():
    P = random_maps()
    c, C = nearest_convolution(P, (H, W), K)
    assert coefficients(torch.from_numpy(P), (H, W), K).numpy() == pytest.approx(c)
    assert distance(torch.from_numpy(P), (H, W), K).numpy() == pytest.approx(np.abs(P - C).sum(-1))


@pytest.mark.parametrize("folded", [False, True])
def test_no_difference_of_outputs_exceeds_the_bound(folded):
    torch.manual_seed(0)
    attention = Attention(11, 3, (Quadratic,), (H, W)).double()
    if folded:
        attention.folded()
    P = attention.probabilities(torch.zeros(1, H, W, 11)).detach()
    nearest = NearestConvolution(attention, P, (H, W), K).double()
    # the sign of each weight's share in the difference makes one output as large as it can be
    rows = np.abs(P.numpy() - nearest_convolution(P.numpy(), (H, W), K)[1]).sum(-1)
    outer = np.eye(11) if folded else attention.W_out.weight.detach().numpy()
    slices = attention.W_val.weight.detach().numpy().reshape(11, 3, 11)
    norms = np.abs(np.einsum("po,ohd->phd", outer, slices)).sum(-1)
    assert nearest.bound == pytest.approx((norms @ rows).max())
    X = 2 * torch.rand(101, H, W, 11, dtype=torch.float64) - 1
    with torch.no_grad():
        worst = (attention(X.sign()) - nearest(X.sign())).abs().max()
    assert 0.05 * nearest.bound < worst <= nearest.bound


@pytest.mark.parametrize("size", [0, 2, 7])
def test_a_window_without_a_middle_or_beyond_the_image_is_refused(size):
    with pytest.raises(ValueError, match=f"window: got {size}, expected an odd number up to 5"):
        coefficients(torch.from_numpy(random_maps()), (H, W), size)
