"""The definition of attention and its terms; test_routes.py compares both with loops over pixels."""

import numpy as np
import pytest
import torch

from sa_zoo.models import positions
from sa_zoo.models.attention import probabilities_from
from sa_zoo.models.content import Relative
from sa_zoo.models.terms import Quadratic

W, H, D = 3, 5, 7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [2, 37, 257])
def test_half_precision_scores_never_overflow_at_any_alpha(dtype, size):
    """Up to the largest alpha of the type and infinity, for heads that look inside the image or far outside of it."""
    alphas = torch.tensor(
        [1e-4, 1.0, 46.0, 104.0, 65504.0, torch.finfo(dtype).max, torch.inf], dtype=dtype
    )
    for Delta in (0.0, -1.0, 2.0 * size):
        places = positions.pixels(size, alphas.device)
        scores = positions.quadratic_scores(torch.full_like(alphas, Delta), alphas, places, places)
        assert scores.dtype == torch.float32 and scores.isfinite().all()
        assert (2 * scores).isfinite().all(), "two axes"
        P = probabilities_from(scores)
        assert P.isfinite().all() and torch.allclose(P.sum(-1), torch.ones(()), atol=1e-5)
        target = (places + Delta).clamp(0, size - 1).long()
        assert torch.equal(P[1:].argmax(-1), target.expand(len(alphas) - 1, -1)), Delta


@pytest.mark.parametrize("size", [4, 6, 9])
def test_tables_interpolate_linearly_and_keep_their_ends(size):
    table = torch.randn(2 * 5 - 1, D, dtype=torch.float64)
    resized = positions.resized_table(table, size).numpy()
    old = np.linspace(0, 1, 2 * 5 - 1)
    new = np.linspace(0, 1, 2 * size - 1)
    expected = np.stack([np.interp(new, old, column) for column in table.T.numpy()], axis=1)
    assert resized.shape == (2 * size - 1, D)
    assert np.abs(resized - expected).max() < 1e-12


def test_lemma_2_equation_8_as_a_term_can_be_quadratic():
    """With r_delta split by axis, D_p = 4: (dx^2, dx) and (dy^2, dy)."""
    torch.manual_seed(0)
    D_p, heads = 4, 3
    quadratic = Quadratic(D_p, heads, (H, W), dtype=torch.float64)
    eq8 = Relative(D_p, heads, (H, W), dtype=torch.float64)
    alpha, Delta = quadratic.spread.detach().square() / 2, quadratic.Delta.detach()
    with torch.no_grad():
        for projection in (eq8.W_qry, eq8.W_key):
            projection.weight.zero_()
        eq8.W_key_pos.weight.copy_(torch.eye(D_p).repeat(heads, 1))
        for table, size in ((eq8.row, W), (eq8.col, H)):
            displacement = torch.arange(1 - size, size).double()
            table.copy_(torch.stack([displacement.square(), displacement], dim=1))
        one = torch.ones(heads)
        v = torch.stack([one, -2 * Delta[:, 1], one, -2 * Delta[:, 0]], dim=1)
        eq8.v.copy_(-alpha[:, None] * v * D_p**0.5)  # scores are divided by sqrt(D_h)
    X = torch.randn(1, H, W, D_p, dtype=torch.float64)
    assert (probabilities_from(eq8(X))[0] - probabilities_from(quadratic(X))).abs().max() < 1e-10
