"""portions.py: a few images at a time, against all of them at once."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from sa_zoo.kernels import portions
from sa_zoo.kernels.choose import only
from sa_zoo.kernels.situation import situation
from sa_zoo.models.attention import Attention, attend_by_axes, probabilities_from
from sa_zoo.models.terms import Quadratic

K, N = 7, 11


@pytest.fixture(autouse=True)
def two_images_per_portion(monkeypatch):
    monkeypatch.setattr(portions, "PORTION", 2 * 3 * K)
    monkeypatch.setattr(portions, "KEPT", 1)


def in_portions(function, *tensors: torch.Tensor) -> torch.Tensor:
    return portions.in_portions(function, situation([], *tensors), *tensors)


def test_the_workspace_is_reused_in_every_mode_and_separate_for_each_thread():
    workspace = portions.Workspace()
    with torch.inference_mode():
        first = workspace.empty("heads", torch.float32, 3, 5)
    with torch.no_grad():
        second = workspace.empty("heads", torch.float32, 7).fill_(11.0)
    assert second.data_ptr() == first.data_ptr() and (first.flatten()[:7] == 11.0).all()
    assert workspace.empty("heads", torch.float64, 3).data_ptr() != first.data_ptr()
    assert workspace.empty("mixed", torch.float32, 3).data_ptr() != first.data_ptr()
    assert workspace.empty("heads", torch.float32, 4, 5).shape == (4, 5)
    with ThreadPoolExecutor(max_workers=1) as other:
        assert other.submit(lambda: dict(workspace.held)).result() == {}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_attention_in_the_workspace_is_attention_by_axes(dtype):
    torch.manual_seed(0)
    P_down, P_across = (
        probabilities_from(torch.randn(3, side, side, dtype=dtype)) for side in (5, 13)
    )
    X = torch.randn(2, 5, 13, K, dtype=dtype)
    expected = attend_by_axes([P_down, P_across], X)
    assert (portions.attend_in_workspace(P_down, P_across, X) - expected).abs().max() < 1e-6
    assert (portions.attend_in_workspace(P_down, P_across, X[:1]) - expected[:1]).abs().max() < 1e-6


def test_portions_give_the_whole_and_its_gradients_and_keep_nothing_between():
    torch.manual_seed(0)
    X = torch.randn(5, 3, K, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(N, K, dtype=torch.float64, requires_grad=True)
    seen, kept = [], []

    def function(some: torch.Tensor) -> torch.Tensor:
        seen.append(len(some))
        return (some @ weight.T).exp().square()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape[-1])
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        got = in_portions(function, X)
    assert seen == [2, 2, 1] and N not in kept
    expected = function(X)
    direction = torch.randn_like(expected)
    pairs = zip(
        (got, *torch.autograd.grad(got, [X, weight], direction)),
        (expected, *torch.autograd.grad(expected, [X, weight], direction)),
        strict=True,
    )
    assert all(torch.allclose(mine, theirs, rtol=1e-12) for mine, theirs in pairs)


@pytest.mark.parametrize("images", [0, 1, 2, 5])
def test_portions_without_gradients_give_the_whole(images):
    X, Y = torch.randn(images, 3, K), torch.randn(images, 11)

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.sum(dim=1)[:, :, None] * y[:, None]).double()

    with torch.no_grad():
        assert torch.equal(in_portions(function, X, Y), function(X, Y))


def test_portions_draw_the_same_dropout_again_for_their_gradients():
    X = torch.randn(5, 3, K, requires_grad=True)
    drop = nn.Dropout(0.5)
    y = in_portions(lambda some: drop(some) * some, X)
    (gradient,) = torch.autograd.grad(y.sum(), X)
    dropped = y == 0
    assert dropped.any() and not dropped.all()
    assert torch.equal(gradient == 0, dropped)


def test_only_large_batches_in_float32_are_recomputed():
    large = torch.empty(2 * 3 * K + 1)

    def divided(X: torch.Tensor) -> bool:
        return portions.is_divided(X, situation([], X))

    assert divided(large) and not divided(large[1:])
    assert not divided(large.bfloat16()) and not divided(large.half())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not divided(large)
    with torch.no_grad():
        assert divided(large[1:].half())


def test_a_result_is_not_overwritten_by_the_next_call_where_values_are_not_projected():
    torch.manual_seed(0)
    layer = Attention(5, 3, (Quadratic,), (17, 19))
    layer.W_val = layer.W_out = nn.Identity()
    first, second = torch.randn(2, 1, 17, 19, 5)
    with torch.no_grad(), only("portions"):
        y = layer(first)
        before = y.clone()
        layer(second)
    assert torch.equal(y, before)
