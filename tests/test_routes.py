"""Every form of attention, in every mode of torch, against a NumPy loop over pairs of pixels."""

import copy
from contextlib import nullcontext
from functools import cache

import numpy_sanet as oracle
import pytest
import torch
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.nn.utils.parametrizations import weight_norm

from sa_zoo.convolution.layer_conversion import conv_from_attention
from sa_zoo.fast.deployed import Deployed
from sa_zoo.fast.route import form_of, only
from sa_zoo.models.attention import Attention
from sa_zoo.models.content import Absolute, Content, Relative
from sa_zoo.models.terms import GeneralizedQuadratic, Learned, Quadratic

H, W, D, HEADS, B = 13, 11, 7, 3, 3
SCORES = {
    Quadratic: oracle.quadratic,
    GeneralizedQuadratic: oracle.quadratic_gen,
    Learned: oracle.learned,
    Content: oracle.content,
    Relative: oracle.eq8,
    Absolute: oracle.absolute,
}
TAPS = {
    "kernel": [[0, -1], [0, 0], [0, 1]],
    "dilated kernel aside": [[1, -4], [1, -2], [1, 0]],
    "pixels": [[0, 3], [-2, 1], [5, -7]],
    "pixels out of the image": [[-50_000, 0], [0, 0], [40_000, 30_000]],
}
CASES = {"+".join(term.__name__ for term in terms): terms for terms in [*zip(SCORES)]}
CASES |= {"sum": (Quadratic, Content), "separable sum": (Learned, Quadratic)}
CASES |= dict.fromkeys(TAPS, (Quadratic,))
BY_AXES = ("Quadratic", "Learned", "separable sum")
every_case = pytest.mark.parametrize("case", CASES)


def layer_of(case: str, **kwargs) -> Attention:
    torch.manual_seed(0)
    layer = Attention(D, HEADS, CASES[case], (H, W), dtype=torch.float64, **kwargs).eval()
    if case in TAPS:
        layer.terms[0].Delta.data.copy_(torch.tensor(TAPS[case]))
        layer.terms[0].spread.data.fill_(64.0)
        layer.terms.requires_grad_(False)
    return layer


def pixels() -> torch.Tensor:
    return torch.randn(B, H, W, D, generator=torch.Generator().manual_seed(1)).double()


@cache
def expected(case: str) -> torch.Tensor:
    layer, X = layer_of(case), pixels().numpy()
    p = {name: value.numpy() for name, value in layer.state_dict().items()}
    scores = [SCORES[type(t)](oracle.below(p, f"terms.{i}."), X) for i, t in enumerate(layer.terms)]
    return torch.from_numpy(oracle.attention(p, X, lambda *_: sum(scores)))


def compiled(layer: Attention, X: torch.Tensor) -> torch.Tensor:
    torch.compiler.reset()  # torch compiles a function for a few kinds of input only
    return torch.compile(layer, backend="eager", fullgraph=True)(X)


def exported(layer: Attention, X: torch.Tensor) -> torch.Tensor:
    batch = {0: torch.export.Dim("batch")}
    return torch.export.export(layer, (X[:2],), dynamic_shapes=(batch,)).module()(X)


def under_autocast(layer: Attention, X: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return layer.float()(X.float())


MODES = {
    "plain": lambda layer, X: layer(X),
    "image by image": lambda layer, X: torch.cat([layer(X[:0]), *map(layer, X.split(1))]),
    "float32": lambda layer, X: layer.float()(X.float()),
    "bfloat16": lambda layer, X: layer.bfloat16()(X.bfloat16()),
    "autocast": under_autocast,
    "compiled": compiled,
    "exported": exported,
    "traced": lambda layer, X: torch.jit.trace(layer, X[:2])(X),
    "scripted": lambda layer, X: torch.jit.script(layer)(X),
    "vmapped": lambda layer, X: torch.func.vmap(layer)(X[None])[0],
}
# of the largest number
ERRORS = {"traced": 1e-7, "float32": 1e-5, "bfloat16": 0.03, "autocast": 0.03}


@pytest.mark.filterwarnings("ignore")  # of torch, for which tracing and scripting are legacy
@pytest.mark.parametrize("deployed", [False, True])
@pytest.mark.parametrize("mode", MODES)
@every_case
def test_every_mode_computes_what_the_loop_does(case, mode, deployed):
    layer = layer_of(case)
    if deployed:
        layer = layer.fuse()
        positional = all(term.positional for term in layer.terms)
        assert isinstance(layer, Deployed) == positional
    with torch.no_grad():
        Y = MODES[mode](layer, pixels()).double()
    error = ERRORS.get(mode, 1e-11) * expected(case).abs().max()
    torch.testing.assert_close(Y, expected(case), rtol=0, atol=float(error), check_stride=False)


@every_case
def test_every_form_has_the_gradients_of_the_definition(case):
    layer, X = layer_of(case), pixels().requires_grad_()
    best = form_of(layer, X)
    assert (best == "taps") == (case in TAPS) and (best == "by axes") == (case in BY_AXES)
    learned = [X, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
    found = []
    for form in ("definition", best):
        with only(form):
            Y = layer(X)
        assert (Y - expected(case)).abs().max() < 1e-11
        found.append(torch.autograd.grad(Y, learned, expected(case)))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10, check_stride=False)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")  # which jvp itself calls
@every_case
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_function_transforms_are_those_of_the_definition(case, mode):
    layer, X = layer_of(case), pixels()
    parameters = dict(layer.named_parameters())
    along = {name: torch.full_like(value, 0.5) for name, value in parameters.items()}

    def of_parameters(p: dict) -> torch.Tensor:
        return torch.func.functional_call(layer, p, (X,))

    found = []
    for context in (nullcontext(), only("definition")):
        with mode(), context:
            with dual_level():
                tangent = unpack_dual(layer(make_dual(X, X.flip(0)))).tangent
            moved = torch.func.jvp(of_parameters, (parameters,), (along,))[1]
            slopes = torch.func.grad(lambda p: of_parameters(p).square().mean())(parameters)
        found.append([tangent, moved, *slopes.values()])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9, check_stride=False)


CHOICES = [  # few pixels, more than channels, fewer than channels
    ((Quadratic,), (11, 7), 5, "definition"),
    ((Quadratic, Learned), (16, 15), 239, "by axes"),
    ((Quadratic,), (16, 15), 241, "definition"),
]


@pytest.mark.parametrize(("terms", "grid", "channels", "form"), CHOICES)
def test_each_kind_of_input_has_its_form(terms, grid, channels, form):
    layer, X = Attention(channels, HEADS, terms, grid), torch.randn(2, *grid, channels)
    assert form_of(layer, X) == form
    layer.attn_drop.p = 0.5
    assert form_of(layer, X) == "definition"
    assert form_of(layer.eval(), X) == form
    layer.attn_drop.register_forward_hook(lambda *_: None)  # reads maps
    assert form_of(layer, X) == "definition"


def hooked(layer: torch.nn.Module) -> torch.nn.Module:
    layer.register_forward_hook(lambda module, given, made: 3.0 * made)
    return layer


def replaced(layer: torch.nn.Module) -> torch.nn.Module:
    forward = layer.forward
    layer.forward = lambda x: 3.0 * forward(x)
    return layer


class Adapter(torch.nn.Linear):
    """What fine-tuning libraries replace a linear layer with."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, dtype=layer.weight.dtype)
        self.load_state_dict(layer.state_dict())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x.sum()


CHANGES = [(change, path) for change in (Adapter, weight_norm) for path in ("W_val", "W_out")]
CHANGES += [(each, path) for each in (hooked, replaced) for path in ("W_val", "W_out", "terms.0")]


@pytest.mark.parametrize("case", ["Quadratic", "kernel", "pixels"])
@pytest.mark.parametrize(("change", "path"), CHANGES)
def test_a_changed_module_is_called_and_never_folded(change, path, case):
    """In the layer, and in its deployed form if it can be deployed or W_val changes later."""
    layer = layer_of(case)
    evaluated = [layer]
    if path == "W_val":
        evaluated.append(copy.deepcopy(layer).fuse())
    for each in evaluated:
        each.set_submodule(path, change(each.get_submodule(path)))
    with torch.no_grad():
        for each in evaluated:
            wanted = each.W_out(each.definition(pixels()))
            torch.testing.assert_close(each(pixels()), wanted, rtol=1e-9, atol=1e-9)
    if path != "terms.0":
        folds = [Attention.fuse, conv_from_attention][: 1 + (case in TAPS)]
        for fold in folds:
            with pytest.raises(ValueError, match="merge adapters"):
                fold(layer)
