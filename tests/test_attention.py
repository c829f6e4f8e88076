"""Attention, its terms and the network against a float64 NumPy loop, conv and torch's own attention."""

import copy
import importlib.util
import sys
from pathlib import Path

import numpy as np
import numpy_sanet as oracle
import pytest
import torch

import sa_zoo
from sa_zoo.models import positions
from sa_zoo.models.attention import Attention, attend, attend_by_axes, probabilities_from
from sa_zoo.models.blocks import PostNormBlock
from sa_zoo.models.content import Absolute, Content, Relative
from sa_zoo.models.network import SANet
from sa_zoo.models.stages import Stage
from sa_zoo.models.terms import GeneralizedQuadratic, Learned, Quadratic

PATCH, W, H, D, HEADS, HIDDEN, CLASSES, B, CHANNELS = 2, 3, 5, 7, 11, 13, 17, 19, 23
TERMS = [
    (Quadratic, oracle.quadratic),
    (GeneralizedQuadratic, oracle.generalized),
    (Learned, oracle.learned),
    (Content, oracle.content),
    (Relative, oracle.eq8),
    (Absolute, oracle.absolute),
]
every_term = pytest.mark.parametrize(
    ("term", "reference"), TERMS, ids=lambda value: getattr(value, "__name__", "")
)


def arrays(module: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in module.state_dict().items()}


def attention(*terms, dtype=torch.float64) -> Attention:
    torch.manual_seed(0)
    return Attention(D, HEADS, terms, (H, W), dtype=dtype)


def pixels(dtype=torch.float64) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(B, H, W, D, dtype=dtype)


@every_term
def test_probabilities_are_those_of_the_numpy_loop(term, reference):
    layer, X = attention(term), pixels()
    expected = oracle.softmax(reference(arrays(layer.terms[0]), X.numpy()))
    P = layer.probabilities(X).detach().numpy()
    assert P.shape == expected.shape
    assert np.abs(P - expected).max() < 1e-10


@every_term
def test_a_block_is_that_of_the_numpy_loop(term, reference):
    torch.manual_seed(2)
    block = PostNormBlock(Stage(D, 1, HEADS, HIDDEN), (term,), (H, W), dtype=torch.float64)
    for parameter in block.parameters():  # away from the ones and zeros of the norms
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    X = pixels()
    assert (
        np.abs(block(X).detach().numpy() - oracle.block(arrays(block), X.numpy(), reference)).max()
        < 1e-10
    )


@every_term
def test_the_network_is_that_of_the_numpy_loop(term, reference):
    torch.manual_seed(3)
    sizes = {
        "img_size": (PATCH * H, PATCH * W),
        "in_chans": CHANNELS,
        "num_classes": CLASSES,
        "patch_size": PATCH,
    }
    model = SANet(
        ((term,),),
        **sizes,
        embed_dim=D,
        depth=2,
        num_heads=HEADS,
        hidden_dim=HIDDEN,
        dtype=torch.float64,
    )
    images = torch.randn(B, CHANNELS, PATCH * H, PATCH * W, dtype=torch.float64)
    expected = oracle.network(arrays(model), images.numpy(), reference, PATCH, depth=2)
    assert np.abs(model(images).detach().numpy() - expected).max() < 1e-10


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("terms", [(Quadratic,), (Learned,), (Quadratic, Learned)])
def test_factors_by_axes_give_the_explicit_product_and_its_gradients(terms, dtype, error):
    layer, X = attention(*terms, dtype=dtype), pixels(dtype).requires_grad_()
    explicit = attend(layer.probabilities(X), X.flatten(1, 2)).unflatten(1, X.shape[1:3])
    by_axes = attend_by_axes(layer.axis_probabilities(X), X)
    assert (explicit - by_axes).abs().max() < error
    weight = torch.randn_like(explicit)
    inputs = [X, *layer.terms.parameters()]
    for expected, got in zip(
        torch.autograd.grad((explicit * weight).sum(), inputs),
        torch.autograd.grad((by_axes * weight).sum(), inputs),
        strict=True,
    ):
        assert (expected - got).abs().max() < error * max(1.0, float(expected.abs().max()))


@pytest.fixture
def published():
    """models/ as a package of its own, like the copy in a Hub repository: kernels/ does not reach it."""
    folder = Path(sa_zoo.__file__).parent / "models"
    spec = importlib.util.spec_from_file_location(
        "published", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    sys.modules["published"] = importlib.util.module_from_spec(spec)
    yield importlib.import_module("published.attention")
    for name in [name for name in sys.modules if name.partition(".")[0] == "published"]:
        del sys.modules[name]


def recorded(calls: list[str], name: str, function):
    """`function`, which notes in `calls` that it is called."""
    return lambda X: calls.append(name) or function(X)


def test_a_published_copy_evaluates_large_images_by_axes_and_is_the_definition(
    published, monkeypatch
):
    X, large = torch.randn(B, 13, 11, D, dtype=torch.float64), (13, 11)
    for terms, route in (((Quadratic, Learned), "by_axes"), ((Quadratic, Content), "definition")):
        layer = published.Attention(
            D, HEADS, terms, large, attn_drop=0.5, dtype=torch.float64
        ).eval()
        taken = []
        for name in ("by_axes", "definition"):
            monkeypatch.setattr(layer, name, recorded(taken, name, getattr(layer, name)))
        y = layer(X)
        assert taken == [route]
        assert (y - layer.W_out(layer.definition(X))).abs().max() < 1e-10
        taken.clear()
        layer.train()(X)  # with dropout on probabilities
        assert taken == ["definition"]
    small = published.Attention(D, HEADS, (Quadratic,), (H, W))
    assert not small.axes_pay(small.pixels)


@pytest.mark.parametrize("term", [Quadratic, GeneralizedQuadratic, Learned])
def test_gradients_of_positional_parameters_are_the_numerical_ones(term):
    layer, X = attention(term), pixels()[:1]
    names = [name for name, _ in layer.terms[0].named_parameters()]

    def probabilities(*values):
        state = dict(zip(names, values, strict=True))
        return probabilities_from(torch.func.functional_call(layer.terms[0], state, (X,)))

    assert torch.autograd.gradcheck(probabilities, tuple(layer.terms[0].parameters()))


@pytest.mark.parametrize("term", [Quadratic, GeneralizedQuadratic, Learned])
def test_autocast_leaves_positional_probabilities_in_float32(term):
    layer, X = attention(term, dtype=torch.float32), pixels(torch.float32)
    expected = layer.probabilities(X)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        P = layer.probabilities(X)
        assert layer(X).dtype == torch.bfloat16
    assert P.dtype == torch.float32
    assert torch.equal(P, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters_still_make_float32_probabilities(dtype):
    layer = attention(Quadratic, dtype=torch.float32)
    half = copy.deepcopy(layer).to(dtype)
    P = half.probabilities(pixels(dtype))
    rounded = layer.terms[0].to(dtype).to(torch.float32)
    assert P.dtype == torch.float32
    assert torch.equal(P, probabilities_from(rounded(pixels(torch.float32))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [2, 37, 257])
def test_half_precision_scores_never_overflow_at_any_alpha_and_size(dtype, size):
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("term", [Quadratic, GeneralizedQuadratic, Learned])
def test_half_precision_layers_stay_finite_at_the_largest_parameters(term, dtype):
    """Every positional parameter at +- the largest number of float16, with autocast and without."""
    layer = attention(term, dtype=torch.float32)
    for parameter in layer.terms.parameters():
        parameter.data.copy_(65504.0 * torch.randn_like(parameter).sign())
    half, X = copy.deepcopy(layer).to(dtype), pixels(torch.float32)
    for network, images in ((half, X.to(dtype)), (layer, X)):
        with torch.no_grad(), torch.autocast("cpu", dtype=dtype, enabled=network is layer):
            assert network.probabilities(images).isfinite().all()
            assert network(images).isfinite().all()


@pytest.mark.parametrize("term", [Learned, Content, Relative])
@pytest.mark.parametrize("grid", [(H, W - 1), (H + 1, W), (H - 1, W + 1)])
def test_tables_of_another_grid_are_refused(term, grid):
    layer, X = attention(term), torch.randn(B, *grid, D, dtype=torch.float64)
    for evaluate in (layer, layer.definition):
        with pytest.raises(
            RuntimeError, match=f"multiply up to the size of dim . .({2 * H - 1}|{2 * W - 1})."
        ):
            evaluate(X)


def test_delta_points_from_the_query_to_the_key_row_first():
    layer = attention(Quadratic)
    layer.terms[0].Delta.data[:] = torch.tensor([2.0, -1.0])  # two down, one left
    layer.terms[0].spread.data[:] = 10.0
    P = layer.probabilities(pixels())[0]
    query, key = 1 * W + 2, 3 * W + 1
    assert P[query].argmax() == key


def test_probability_dropout_is_shared_by_the_batch_for_positions_and_not_for_content():
    for term, shared in ((Quadratic, True), (Content, False)):
        layer = Attention(D, HEADS, (term,), (H, W), attn_drop=0.5).train()
        X = pixels(torch.float32)[:1].expand(2, -1, -1, -1)
        torch.manual_seed(4)
        y = layer(X)
        assert torch.allclose(y[0], y[1], atol=1e-6) == shared


@pytest.mark.parametrize("size", [4, 6, 9])
def test_tables_interpolate_linearly_and_keep_their_ends(size):
    table = torch.randn(2 * 5 - 1, D, dtype=torch.float64)
    resized = positions.resized_table(table, size).numpy()
    old = np.linspace(0, 1, 2 * 5 - 1)
    new = np.linspace(0, 1, 2 * size - 1)
    expected = np.stack([np.interp(new, old, column) for column in table.T.numpy()], axis=1)
    assert resized.shape == (2 * size - 1, D)
    assert np.abs(resized - expected).max() < 1e-12
