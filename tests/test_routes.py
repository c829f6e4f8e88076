"""choose.py and every route against the definition: values, gradients, types, changes of weights."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

from sa_zoo.convolution.layer_conversion import conv_from_attention
from sa_zoo.fast import portions, recomputed
from sa_zoo.fast.choose import choose, only
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
    monkeypatch.setattr(portions, "DIVIDED_FROM", 0)
    monkeypatch.setattr(portions, "LEAST", 1)


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
def test_changing_weights_before_the_backward_pass_is_an_error(term, path, images):
    block = PostNormBlock(Stage(D, 1, HEADS, 13), (term,), (H, W), D)
    Y = block(torch.randn(images, H, W, D, requires_grad=True))
    with torch.no_grad():
        block.get_submodule(path).weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Y.square().sum().backward()


def ways(terms) -> list[tuple]:
    """Routes that fit these terms, the chosen one among them, and dropout that is the definition's."""
    content = not all(term.positional for term in terms)
    found = [(None, 0.0), ("absorbed", 0.0)] if content else [(None, 0.0), (None, 0.5)]
    if not content:
        found += [("recomputed", 0.0), ("recomputed", 0.5)]
    if all(term.separable for term in terms):
        found.append(("by axes", 0.0))
    return found


@pytest.mark.parametrize("images", [0, 1, B])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize(
    ("terms", "route", "drop"), [(terms, *way) for terms in TERMS for way in ways(terms)]
)
def test_every_route_is_the_definition_with_its_gradients(terms, route, drop, dtype, error, images):
    layer, explicit = layers(terms, dtype, attn_drop=drop)
    X = pixels(dtype)[:images].requires_grad_()

    def evaluated(layer: Attention) -> torch.Tensor:
        torch.manual_seed(2)
        return layer(X)

    with only(route) if route else nullcontext():
        y = evaluated(layer)
        with torch.no_grad():
            without_gradients = evaluated(layer)
    expected = evaluated(explicit)
    for got in (y, without_gradients):
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected, rtol=0, atol=error, check_stride=False)
    direction = torch.randn_like(y)
    found = torch.autograd.grad(y, [X, *layer.parameters()], direction)
    wanted = torch.autograd.grad(expected, [X, *explicit.parameters()], direction)
    for got, want in zip(found, wanted, strict=True):
        largest = max(1.0, float(want.abs().max())) if images else 0.0
        torch.testing.assert_close(got, want, rtol=0, atol=error * largest, check_stride=False)


def test_a_projection_without_bias_takes_a_route_that_knows_it():
    layer, explicit = layers((Quadratic,))
    layer.W_val.bias = explicit.W_val.bias = None
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            assert (layer(pixels()) - explicit(pixels())).abs().max() < 1e-10
    assert torch.allclose(layer.fold()(pixels()), explicit(pixels()), rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="got 'dense', expected one of taps"), only("dense"):
        pass


ROUTE_OF = {  # terms, images, training (None: of one portion) -> route
    "few images": ((Quadratic, Learned), (13, 11), 16, False, "by axes"),
    "many numbers": ((Quadratic, Learned), (13, 11), 211, False, "recomputed"),
    "few pixels": ((Quadratic,), (7, 5), 997, False, "definition"),
    "terms that do not factorize": ((GeneralizedQuadratic,), (13, 11), 211, False, "recomputed"),
    "content": ((Quadratic, Content), (13, 11), 16, False, "absorbed"),
    "content, training": ((Content,), (13, 11), 16, True, "absorbed"),
    "content that starts as a kernel": ((ContentKernel,), (13, 11), 16, False, "absorbed"),
    "training on a large batch": ((Quadratic,), (13, 11), 97, True, "recomputed"),
    "training on a small batch": ((Quadratic,), (11, 7), 5, True, "definition"),
    "training on a small batch of large images": ((Quadratic,), (19, 17), 1, True, "by axes"),
    "more pixels than channels": ((Quadratic,), (16, 15), 239, None, "by axes"),
    "fewer pixels than channels": ((Quadratic,), (16, 15), 241, None, "definition"),
}


@pytest.mark.parametrize("case", ROUTE_OF)
def test_each_kind_of_input_has_its_route(case, monkeypatch):
    terms, grid, channels, trains, expected = ROUTE_OF[case]
    monkeypatch.setattr(portions, "DIVIDED_FROM", 2**17)
    if trains is None:
        monkeypatch.setattr(portions, "PORTION", 10**9)
        trains = True
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
            assert choose(layer, X)[0].name == expected


def test_inference_in_float32_takes_all_heads_of_a_few_images(monkeypatch):
    layer, _ = layers((Quadratic,), torch.float32)
    seen = []
    attended = recomputed.attended
    monkeypatch.setattr(
        recomputed, "attended", lambda *given: seen.append(len(given[2])) or attended(*given)
    )
    with torch.no_grad():
        layer(torch.randn(B, H, W, D))
    assert seen == [1] * B  # HEADS times as many numbers as two images


def test_a_layer_of_taps_reads_its_centers_once_per_call(monkeypatch):
    layer = Attention(D, HEADS, (Quadratic,), (H, W)).requires_grad_(False)
    seen = []
    monkeypatch.setattr(Quadratic, "taps", lambda term: seen.append(term) or [[0, 1]] * HEADS)
    layer(torch.randn(B, H, W, D))
    assert len(seen) == 1


def test_a_frozen_layer_is_evaluated_as_in_inference(monkeypatch):
    monkeypatch.setattr(portions, "PORTION", 10**9)
    layer = Attention(241, HEADS, (Quadratic,), (16, 15)).requires_grad_(False)
    X = torch.randn(B, 16, 15, 241)
    assert choose(layer, X)[0].name == "recomputed"
    assert choose(layer, X.requires_grad_())[0].name == "definition"


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


@every_term
@pytest.mark.parametrize("grid", [(H, W), (19, 17)])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_hooks_see_the_whole_batch_once_and_what_they_saw_stays(terms, grid, mode):
    block = PostNormBlock(Stage(D, 1, HEADS, 13), terms, grid, D)
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


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # which jvp itself calls
@every_term
@pytest.mark.parametrize(
    ("mode", "dtype", "error"),
    [(torch.enable_grad, torch.float64, 1e-10), (torch.no_grad, torch.float32, 1e-4)],
)
def test_function_transforms_are_those_of_the_definition(terms, mode, dtype, error):
    """vmap, and derivatives forward, of a batch of several portions."""
    layer = Attention(16, HEADS, terms, (13, 11), dtype=dtype).eval()
    X = torch.randn(2, B, 13, 11, 16, dtype=dtype)
    parameters = dict(layer.named_parameters())
    along = {name: torch.randn_like(parameter) for name, parameter in parameters.items()}

    def transformed() -> list[torch.Tensor]:
        def of_parameters(p: dict) -> torch.Tensor:
            return torch.func.functional_call(layer, p, (X[0],))

        moved = torch.func.jvp(of_parameters, (parameters,), (along,))[1]
        slopes = torch.func.grad(lambda p: of_parameters(p).square().mean())(parameters)
        with dual_level():
            dual = unpack_dual(layer(make_dual(X[0], X[1]))).tangent
        return [torch.func.vmap(layer)(X), moved, dual, *slopes.values()]

    with mode():
        found = transformed()
        with only("definition"):
            expected = transformed()
    for got, want in zip(found, expected, strict=True):
        largest = max(1.0, float(want.detach().abs().max()))
        assert (got - want).abs().max() < error * largest


@every_term
@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_traced_layers_take_any_number_of_images(terms):
    layer = layers(terms, torch.float32)[0].eval()
    X = pixels(torch.float32)
    with torch.no_grad():
        traced = torch.jit.trace(layer, X)
        for images in (X[:3], torch.cat([X, X])):
            assert (traced(images) - layer(images)).abs().max() < 1e-6


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


def replaced(layer: torch.nn.Linear) -> torch.nn.Linear:
    forward = layer.forward
    layer.forward = lambda x: 3.0 * forward(x)
    return layer


COMPUTED = {
    "adapter": Adapter,
    "subclass": LoRA,
    "weight norm": weight_norm,
    "pruning": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "hook": hooked,
    "replaced forward": replaced,
}
PROJECTIONS = [(Content, "terms.0.W_qry"), (Content, "terms.0.W_key")]
PROJECTIONS += [(term, path) for term in (Content, Quadratic) for path in ("W_val", "W_out")]
CALLED = [(change, *place) for change in COMPUTED for place in PROJECTIONS]
CALLED += [("hook", term, "terms.0") for (term, *_) in TERMS]


@pytest.mark.parametrize(("change", "term", "path"), CALLED)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_what_computes_its_weights_is_called(change, term, path, mode):
    """Some routes read the weight of W_val instead of calling it."""
    layer = Attention(16, HEADS, (term,), (13, 11)).eval()
    layer.set_submodule(path, COMPUTED[change](layer.get_submodule(path)))
    X = torch.randn(B, 13, 11, 16)
    with mode():
        expected = layer.W_out(layer.definition(X))
        assert (layer(X) - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("path", ["W_val", "W_out"])
@pytest.mark.parametrize("change", COMPUTED.values(), ids=COMPUTED)
def test_what_computes_its_weights_is_not_folded(change, path):
    layer, _ = layers((Quadratic,))
    layer.terms[0].Delta.data.round_()
    layer.terms[0].spread.data.fill_(64.0)
    layer.set_submodule(path, change(layer.get_submodule(path)))
    for fold in (Attention.fuse, conv_from_attention):
        with pytest.raises(ValueError, match=r"expected nn\.Linear with its own weight and bias"):
            fold(layer)
