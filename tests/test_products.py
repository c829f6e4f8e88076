"""products.py: torch's own products by another library, and work in portions, against torch's own."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sa_zoo.kernels import products

ROWS, K, N, B = 9 * products.IMAGES, 7, 11, 5


def tensors(*shapes: tuple[int, ...], dtype=torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def close(got: torch.Tensor, expected: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    direction = torch.randn_like(expected)
    pairs = zip(
        (got, *torch.autograd.grad(got, inputs, direction)),
        (expected, *torch.autograd.grad(expected, inputs, direction)),
        strict=True,
    )
    for mine, theirs in pairs:
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        assert (mine - theirs).abs().max() < 1e-5 * max(1.0, float(theirs.detach().abs().max()))


@pytest.mark.skipif(not products.ONEDNN, reason="this build of torch has no oneDNN")
@pytest.mark.parametrize("shape", [(ROWS, K), (9, products.IMAGES, K), (2, 3, 5, products.IMAGES, K)])
@pytest.mark.parametrize("biased", [True, False])
def test_a_linear_layer_by_convolution_is_torchs(shape, biased):
    x, weight, bias = tensors(shape, (N, K), (N,))
    assert products.by_convolution(x, weight)
    given = [weight, bias] if biased else [weight]
    close(products.linear(x, *given), F.linear(x, *given), [x, *given])


@pytest.mark.skipif(not products.ONEDNN, reason="this build of torch has no oneDNN")
def test_a_transposed_weight_gives_the_same():
    x, weight = tensors((ROWS, K), (K, N))
    close(products.linear(x, weight.T), x @ weight, [x, weight])


@pytest.mark.parametrize("num_heads", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("biased", [True, False])
def test_a_sum_over_heads_is_a_linear_layer_of_heads_side_by_side(num_heads, dtype, biased):
    heads, weight, bias = tensors((B, num_heads, 13, K), (N, num_heads * K), (N,), dtype=dtype)
    assert products.by_kernel(heads, weight) == (products.ONEDNN and num_heads > 1 and dtype == torch.float32)
    given = [weight, bias] if biased else [weight]
    expected = F.linear(heads.transpose(1, 2).flatten(2), *given)
    close(products.sum_over_heads(heads, *given), expected, [heads, *given])


@pytest.mark.parametrize("images", [products.BFLOAT16_IMAGES - 1, products.BFLOAT16_IMAGES])
def test_a_sum_over_heads_in_bfloat16_is_within_its_rounding(images):
    heads, weight, bias = tensors((images, 3, 13, K), (N, 3 * K), (N,))
    half = [tensor.detach().bfloat16() for tensor in (heads, weight, bias)]
    assert products.by_kernel(*half[:2]) == (products.ONEDNN and images == products.BFLOAT16_IMAGES)
    expected = F.linear(half[0].double().transpose(1, 2).flatten(2), half[1].double(), half[2].double())
    got = products.sum_over_heads(*half)
    assert got.dtype == torch.bfloat16
    assert (got - expected).abs().max() < 2 * torch.finfo(torch.bfloat16).eps * expected.abs().max()


def test_a_place_is_given_again_in_every_mode_and_each_thread_has_its_own():
    room = products.Room()
    with torch.inference_mode():
        first = room.of("heads", torch.float32, 3, 5)
    with torch.no_grad():
        second = room.of("heads", torch.float32, 7).fill_(11.0)
    assert second.data_ptr() == first.data_ptr() and (first.flatten()[:7] == 11.0).all()
    assert room.of("heads", torch.float64, 3).data_ptr() != first.data_ptr()
    assert room.of("mixed", torch.float32, 3).data_ptr() != first.data_ptr()
    assert room.of("heads", torch.float32, 4, 5).shape == (4, 5)
    with ThreadPoolExecutor(max_workers=1) as other:
        assert other.submit(lambda: dict(room.held)).result() == {}


@pytest.mark.parametrize("least", [0, 2**24])
@pytest.mark.parametrize("left", [(ROWS, K), (B, ROWS, K), (B, ROWS + 1, K)])
def test_products_image_by_image_are_torchs(left, least, monkeypatch):
    monkeypatch.setattr(products, "CALL", least)
    a, b = tensors(left, (B, K, N))
    close(products.product(a, b), a @ b, [a, b])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_and_odd_numbers_of_rows_keep_torchs_own_product(dtype):
    x, weight = tensors((ROWS, K), (N, K), dtype=dtype)
    assert not products.by_convolution(x, weight)
    assert torch.equal(products.linear(x, weight), F.linear(x, weight))
    x, weight = tensors((ROWS + 1, K), (N, K))
    assert torch.equal(products.linear(x, weight), F.linear(x, weight))
    (x,) = tensors((products.ROWS - products.IMAGES, K))
    assert not products.by_convolution(x, weight)
    assert products.linear(x[:0], weight).shape == (0, N)


def test_autocast_rules_the_product():
    layer = products.Linear(K, N)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.randn(ROWS, K)).dtype == torch.bfloat16


@pytest.mark.parametrize("portions", [2, 3])
def test_many_portions_give_the_whole_and_its_gradients_and_keep_nothing_between(portions, monkeypatch):
    monkeypatch.setattr(products, "PORTION", 2 * 3 * K)
    monkeypatch.setattr(products, "KEPT", portions)
    X, weight = tensors((5, 3, K), (N, K), dtype=torch.float64)
    seen = []
    kept = []

    def function(some: torch.Tensor) -> torch.Tensor:
        seen.append(len(some))
        return (some @ weight.T).exp().square()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape[-1])
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        got = products.in_portions(function, X)
    assert seen == [2, 2, 1]
    assert (N in kept) == (portions == 3)
    close(got, function(X), [X, weight])


@pytest.mark.parametrize("images", [0, 1, 2, 5])
def test_portions_without_gradients_give_the_whole(images, monkeypatch):
    monkeypatch.setattr(products, "PORTION", 2 * 3 * K)
    X, Y = torch.randn(images, 3, K), torch.randn(images, 11)

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.sum(dim=1)[:, :, None] * y[:, None]).double()

    with torch.no_grad():
        assert torch.equal(products.in_portions(function, X, Y), function(X, Y))


def test_portions_draw_the_same_dropout_again_for_their_gradients(monkeypatch):
    monkeypatch.setattr(products, "PORTION", 2 * 3 * K)
    monkeypatch.setattr(products, "KEPT", 1)
    (X,) = tensors((5, 3, K))
    drop = nn.Dropout(0.5)
    y = products.in_portions(lambda some: drop(some) * some, X)
    (gradient,) = torch.autograd.grad(y.sum(), X)
    dropped = y == 0
    assert dropped.any() and not dropped.all()
    assert torch.equal(gradient == 0, dropped)


@pytest.mark.parametrize("half", ["type", "autocast", ""])
def test_half_precision_keeps_what_lies_between(half, monkeypatch):
    monkeypatch.setattr(products, "PORTION", 2 * 3 * K)
    monkeypatch.setattr(products, "KEPT", 1)
    X, seen = torch.randn(5, 3, K, dtype=torch.bfloat16 if half == "type" else torch.float32, requires_grad=True), []

    def function(some: torch.Tensor) -> torch.Tensor:
        seen.append(len(some))
        return some.exp()

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half == "autocast"):
        y = products.in_portions(function, X)
    assert seen == [2, 2, 1]
    y.float().sum().backward()
    assert sorted(seen) == ([1, 2, 2] if half else [1, 1, 2, 2, 2, 2])
