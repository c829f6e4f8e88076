"""choose.py and every route against the definition: values, gradients, types, changes of weights."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
from timm.utils import reparameterize_model
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

from sa_zoo.convolution.layer_conversion import conv_from_attention
from sa_zoo.kernels import portions
from sa_zoo.kernels.choose import choose, only
from sa_zoo.kernels.fused import LIBRARY
from sa_zoo.models.attention import Attention
from sa_zoo.models.blocks import PostNormBlock
from sa_zoo.models.content import Absolute, Content, ContentKernel, Relative
from sa_zoo.models.stages import Stage
from sa_zoo.models.terms import GeneralizedQuadratic, Learned, Quadratic

# Images large enough for inference by axes, but not for training.
H, W, D, HEADS, B = 17, 11, 7, 3, 5
TERMS = [
    (Quadratic,),
    (GeneralizedQuadratic,),
    (Learned,),
    (Content,),
    (ContentKernel,),
    (Relative,),
    (Absolute,),
    (Quadratic, Content),
]


class Definition(Attention):
    """The yardstick: Eq. 10 as written, whatever the input."""

    def evaluator(self, X: torch.Tensor) -> torch.Tensor:
        return self.definition(X)


@pytest.fixture(autouse=True)
def several_portions(monkeypatch):
    monkeypatch.setattr(portions, "PORTION", 2 * H * W * D)


every_term = pytest.mark.parametrize(
    "terms", TERMS, ids=lambda terms: "+".join(term.__name__ for term in terms)
)


def layers(terms, dtype=torch.float64, **kwargs) -> tuple[Attention, Definition]:
    torch.manual_seed(0)
    layer = Attention(D, HEADS, terms, (H, W), dtype=dtype, **kwargs)
    explicit = Definition(D, HEADS, terms, (H, W), dtype=dtype, **kwargs)
    explicit.load_state_dict(layer.state_dict())
    return layer, explicit


def pixels(dtype=torch.float64) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(B, H, W, D, dtype=dtype)


@every_term
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_every_evaluation_is_its_definition_with_its_gradients(terms, dtype, error):
    layer, explicit = layers(terms, dtype)
    X = pixels(dtype).requires_grad_()
    y, expected = layer(X), explicit(X)
    assert (y - expected).abs().max() < error
    direction = torch.randn_like(y)
    gradients = torch.autograd.grad(y, [X, *layer.parameters()], direction)
    for got, want in zip(
        gradients,
        torch.autograd.grad(expected, [X, *explicit.parameters()], direction),
        strict=True,
    ):
        assert (got - want).abs().max() < error * max(1.0, float(want.abs().max()))


def test_terms_may_be_float64_in_a_float32_layer():
    layer = Attention(16, HEADS, (Quadratic,), (13, 11))
    layer.terms.double()
    X = torch.randn(B, 13, 11, 16)
    with torch.no_grad():
        assert (layer(X) - layer.W_out(layer.definition(X))).abs().max() < 1e-5


@pytest.mark.parametrize("images", [1, B])
@pytest.mark.parametrize(
    ("term", "path"), [(Quadratic, "attn.W_val"), (Content, "attn.W_val"), (Quadratic, "fc1")]
)
def test_weights_that_change_before_the_backward_pass_are_an_error(term, path, images):
    block = PostNormBlock(Stage(D, 1, HEADS, 13), (term,), (H, W))
    Y = block(torch.randn(images, H, W, D, requires_grad=True))
    with torch.no_grad():
        block.get_submodule(path).weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Y.square().sum().backward()


ROUTE_OF = {  # terms, images, training -> route
    "one compiled pass": ((Quadratic, Learned), (13, 11), 16, False, "fused"),
    "channels that compiled code does not take": ((Quadratic,), (13, 11), 7, False, "recomputed"),
    "few pixels": ((Quadratic,), (7, 5), 7, False, "recomputed"),
    "terms that do not factorize": ((GeneralizedQuadratic,), (13, 11), 16, False, "recomputed"),
    "content": ((Quadratic, Content), (13, 11), 16, False, "absorbed"),
    "content, training": ((Content,), (13, 11), 16, True, "absorbed"),
    "content that starts as a kernel": ((ContentKernel,), (13, 11), 16, False, "absorbed"),
    "training on a large batch": ((Quadratic,), (13, 11), 97, True, "recomputed"),
    "training on a small batch": ((Quadratic,), (11, 7), 5, True, "definition"),
    "training on a small batch of large images": ((Quadratic,), (19, 17), 1, True, "by axes"),
}


@pytest.mark.parametrize("case", ROUTE_OF)
def test_each_kind_of_input_has_its_route(case):
    terms, grid, channels, trains, expected = ROUTE_OF[case]
    if expected == "fused" and LIBRARY is None:
        expected = "recomputed"
    layer = Attention(channels, HEADS, terms, grid)
    X = torch.randn(B, *grid, channels)
    with torch.set_grad_enabled(trains):
        assert choose(layer, X)[0].name == expected
        assert trains or choose(layer, X.to("meta"))[0].name in (
            "absorbed",
            "by axes",
            "definition",
        )
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert choose(layer, X)[0].name == ("recomputed" if expected == "fused" else expected)


@pytest.mark.parametrize(("dim", "route"), [(239, "by axes"), (241, "definition")])
def test_training_on_a_small_batch_goes_by_axes_where_there_are_more_pixels_than_channels(
    dim, route, monkeypatch
):
    X = torch.randn(1, 16, 15, dim)
    monkeypatch.setattr(portions, "PORTION", X.numel())
    assert choose(Attention(dim, 2, (Quadratic,), (16, 15)), X)[0].name == route


@pytest.mark.parametrize("route", ["definition", "by axes", "recomputed"])
def test_a_route_can_be_asked_for(route):
    layer, explicit = layers((Quadratic,))
    X = pixels()
    with torch.no_grad(), only(route):
        assert (layer(X) - explicit(X)).abs().max() < 1e-10
    with (
        pytest.raises(ValueError, match="got 'dense', expected one of taps, as published"),
        only("dense"),
    ):
        pass


@every_term
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_no_images_give_no_images(terms, mode):
    layer, _ = layers(terms)
    with mode():
        assert layer(pixels()[:0]).shape == (0, H, W, D)


@every_term
def test_bfloat16_is_within_its_rounding(terms):
    layer, explicit = layers(terms, torch.float32)
    X = pixels(torch.float32)
    with torch.no_grad():
        expected = explicit(X)
        half = copy.deepcopy(layer).bfloat16()(X.bfloat16()).float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            auto = layer(X).float()
            reference = explicit(X).float()
    scale = expected.abs().max()
    allowed = max(2.0 * (reference - expected).abs().max(), torch.finfo(torch.bfloat16).eps * scale)
    assert (auto - expected).abs().max() < allowed
    assert (half - expected).abs().max() < 4 * torch.finfo(torch.bfloat16).eps * scale


@pytest.mark.parametrize(
    "terms", [(Quadratic,), (GeneralizedQuadratic,)], ids=lambda terms: terms[0].__name__
)
def test_dropout_on_probabilities_is_that_of_the_definition(terms):
    layer, explicit = layers(terms, attn_drop=0.5)
    X = pixels()
    torch.manual_seed(2)
    y = layer(X)
    torch.manual_seed(2)
    assert (y - explicit(X)).abs().max() < 1e-10


def test_gradients_see_the_dropout_of_content_that_the_values_saw():
    layer, _ = layers((Content,), attn_drop=0.5)
    X = pixels().requires_grad_()
    direction = torch.randn_like(X)

    def value(X: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return (layer(X) * direction).sum()

    (gradient,) = torch.autograd.grad(value(X), X)
    along = torch.randn_like(X)
    step = 1e-6
    with torch.no_grad():
        slope = (value(X + step * along) - value(X - step * along)) / (2 * step)
    assert abs(float(slope - (gradient * along).sum())) < 1e-6


PROJECTIONS = [
    (Content, "terms.0.W_qry"),
    (Content, "terms.0.W_key"),
    (Content, "W_val"),
    (Quadratic, "W_val"),
]


@pytest.mark.parametrize(("term", "path"), PROJECTIONS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_hooks_of_a_projection_are_called(term, path, mode):
    layer, explicit = layers((term,))
    for twin in (layer, explicit):
        twin.get_submodule(path).register_forward_hook(lambda module, given, made: 3.0 * made)
    with mode():
        assert (layer(pixels()) - explicit(pixels())).abs().max() < 1e-10


@every_term
@pytest.mark.parametrize("grid", [(H, W), (19, 17)])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_hooks_see_the_whole_batch_once_and_what_they_saw_stays(terms, grid, mode):
    block = PostNormBlock(Stage(D, 1, HEADS, 13), terms, grid)
    X, seen = torch.randn(B, *grid, D), []
    watched = [
        module
        for path, module in block.named_modules()
        if not list(module.children()) and "drop" not in path
    ]
    with mode():
        expected = block(X)
        for module in watched:
            module.register_forward_hook(
                lambda module, given, made: seen.append((module, given, made, made.clone()))
            )
        assert (block(X) - expected).abs().max() < 1e-5
        first = [module for module, *_ in seen]
        block(X + 1.0)
    of_terms = [
        module for module in watched if any(module in term.modules() for term in block.attn.terms)
    ]
    assert [module for module in first if module not in of_terms] == [
        module for module in watched if module not in of_terms
    ]
    for module, given, made, copied in seen:
        assert torch.equal(made, copied)
        assert module in of_terms or len(given[0]) == len(made) == B


def test_a_hook_of_a_term_changes_its_scores():
    for terms in TERMS:
        layer, explicit = layers(terms)
        for twin in (layer, explicit):
            twin.terms[0].register_forward_hook(lambda module, given, scores: 0.0 * scores)
        with torch.no_grad():
            assert (layer(pixels()) - explicit(pixels())).abs().max() < 1e-10


def test_a_forward_that_was_replaced_is_called():
    layer, calls = layers((Content,))[0], []
    projection = layer.terms[0].W_qry
    original = projection.forward
    projection.forward = lambda X: calls.append(X.shape) or original(X)
    with torch.no_grad():
        layer(pixels())
    assert len(calls) == 1


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # which jvp itself calls
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_function_transforms_of_torch_work(mode):
    layer = layers((Quadratic,))[0].eval()
    X = torch.stack([pixels(), 2.0 * pixels()])
    with mode():
        assert (
            torch.func.vmap(layer)(X) - torch.stack([layer(some) for some in X])
        ).abs().max() < 1e-10
        y, slope = torch.func.jvp(layer, (X[0],), (X[1],))
        assert (slope - (layer(X[0] + X[1]) - y)).abs().max() < 1e-10  # the layer is affine


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@every_term
def test_derivatives_forward_need_no_grad_mode(terms):
    layer = Attention(16, HEADS, terms, (13, 11), dtype=torch.float64).eval()
    X, parameters = torch.randn(B, 13, 11, 16, dtype=torch.float64), dict(layer.named_parameters())
    along = {name: torch.randn_like(parameter) for name, parameter in parameters.items()}

    def tangent(mode):
        with mode():
            return torch.func.jvp(
                lambda p: torch.func.functional_call(layer, p, (X,)), (parameters,), (along,)
            )[1]

    expected = tangent(torch.enable_grad)
    for _ in range(3):
        assert (tangent(torch.no_grad) - expected).abs().max() < 1e-10
    layer, X = layer.float(), X.float()  # float32 is what compiled code takes
    with only("definition"), dual_level():
        expected = unpack_dual(layer(make_dual(X, torch.ones_like(X)))).tangent
    with torch.no_grad(), dual_level():
        assert (
            unpack_dual(layer(make_dual(X, torch.ones_like(X)))).tangent - expected
        ).abs().max() < 1e-4


def test_gradients_by_function_transforms_are_those_of_backward():
    """Of a batch of several portions, which they cannot evaluate again."""
    block, X = (
        PostNormBlock(Stage(D, 1, HEADS, 13), (Quadratic,), (H, W), dtype=torch.float64),
        pixels(),
    )
    parameters = dict(block.named_parameters())
    got = torch.func.grad(lambda p: torch.func.functional_call(block, p, (X,)).square().sum())(
        parameters
    )
    expected = torch.autograd.grad(block(X).square().sum(), list(parameters.values()))
    for mine, theirs in zip(got.values(), expected, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-10, atol=1e-10)


@every_term
@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_traced_layers_take_any_number_of_images(terms):
    layer = layers(terms, torch.float32)[0].eval()
    X = pixels(torch.float32)
    with torch.no_grad():
        traced = torch.jit.trace(layer, X)
        for images in (X[:3], torch.cat([X, X])):
            assert (traced(images) - layer(images)).abs().max() < 1e-6


def test_threads_do_not_write_over_each_other():
    layer = layers((Quadratic,))[0].eval()
    images = [pixels() + number for number in range(7)]

    def evaluated(X: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return [layer(X) for _ in range(11)][-1]

    expected = [evaluated(X) for X in images]
    with ThreadPoolExecutor(max_workers=3) as threads:
        assert all(
            torch.equal(got, want)
            for got, want in zip(threads.map(evaluated, images), expected, strict=True)
        )


class Other(GeneralizedQuadratic):
    """A term of another class, with an attribute that its scores depend on."""

    scale = 3.0

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        return self.scale * super().forward(X)


CHANGES = {
    "written in place": lambda layer: layer.terms[0].Delta.add_(0.5),
    "written through .data": lambda layer: layer.terms[0].spread.data.mul_(1.5),
    "loaded": lambda layer: layer.load_state_dict(
        {name: 0.7 * value for name, value in layer.state_dict().items()}
    ),
    "in another type": lambda layer: layer.half().double(),
    "an attribute": lambda layer: setattr(layer.terms[0], "scale", 5.0),
    "a term with equal numbers": lambda layer: setattr(
        layer.terms[0], "__class__", GeneralizedQuadratic
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("grid", [(H, W), (7, 5)])
def test_no_call_gives_what_an_earlier_one_found(change, mode, grid):
    layer = layers((Other,))[0].eval()
    X = torch.randn(B, *grid, D, dtype=torch.float64)
    with mode():
        before = layer(X)
    with torch.no_grad():
        CHANGES[change](layer)
    with mode():
        expected = layer.W_out(layer.definition(X))
        assert (layer(X) - expected).abs().max() < 1e-10
        assert (layer(X) - before).abs().max() > 1e-6


@every_term
def test_folded_layers_are_the_same(terms):
    layer, _ = layers(terms)
    X = pixels()
    expected = layer(X)
    layer.reparameterize()
    layer.reparameterize()
    assert isinstance(layer.W_out, torch.nn.Identity)
    assert (layer(X) - expected).abs().max() < 1e-10


def test_timm_folds_whole_models():
    torch.manual_seed(4)
    model = timm.create_model("sa_quadratic_tiny_cifar").eval()
    folded = reparameterize_model(model)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert (folded(x) - model(x)).abs().max() < 1e-5
    fewer = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in folded.parameters())
    assert fewer == 6 * (96 * 96 + 96)
    assert folded.state_dict().keys() == reparameterize_model(model.to("meta")).state_dict().keys()


class Adapter(torch.nn.Module):
    """What fine-tuning libraries replace a linear layer with."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.layer, self.change = layer, torch.nn.Parameter(torch.randn_like(layer.weight))

    @property
    def weight(self) -> torch.Tensor:
        return self.layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + x @ self.change.T


@pytest.mark.parametrize(("term", "path"), [*PROJECTIONS, (Content, "W_out"), (Quadratic, "W_out")])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_an_adapter_of_a_projection_is_used(term, path, mode):
    layer, explicit = layers((term,))
    adapter = Adapter(layer.get_submodule(path))
    layer.set_submodule(path, adapter)
    explicit.set_submodule(path, adapter)
    with mode():
        assert (layer(pixels()) - explicit(pixels())).abs().max() < 1e-10


def hooked(layer: torch.nn.Linear) -> torch.nn.Linear:
    layer.register_forward_hook(lambda module, given, made: 3.0 * made)
    return layer


class LoRA(torch.nn.Linear):
    """An adapter that is itself a linear layer."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, dtype=layer.weight.dtype)
        self.load_state_dict(layer.state_dict())
        self.change = torch.nn.Parameter(torch.randn_like(layer.weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x @ self.change.T


COMPUTED = {
    "adapter": Adapter,
    "subclass": LoRA,
    "weight norm": weight_norm,
    "pruning": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "hook": hooked,
}


@pytest.mark.parametrize("path", ["W_val", "W_out"])
@pytest.mark.parametrize("change", COMPUTED.values(), ids=COMPUTED)
def test_what_computes_its_weights_is_not_folded(change, path):
    layer, _ = layers((Quadratic,))
    layer.terms[0].Delta.data.round_()
    layer.terms[0].spread.data.fill_(64.0)
    layer.set_submodule(path, change(layer.get_submodule(path)))
    for fold in (Attention.reparameterize, conv_from_attention):
        with pytest.raises(ValueError, match=r"expected nn\.Linear with its own weight and bias"):
            fold(layer)


@pytest.mark.parametrize("path", ["W_val", "terms.0.W_qry"])
def test_a_subclass_of_a_linear_layer_is_called(path):
    """In float32 and with channels that compiled code takes, which reads W_val's weight and does not call it."""
    terms = (Content,) if "terms" in path else (Quadratic,)
    layer = Attention(16, HEADS, terms, (13, 11)).eval()
    X = torch.randn(B, 13, 11, 16)
    layer.set_submodule(path, LoRA(layer.get_submodule(path)))
    with torch.no_grad():
        expected = layer.W_out(layer.definition(X))
        assert (layer(X) - expected).abs().max() < 1e-4 * expected.abs().max()
