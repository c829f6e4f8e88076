"""How a layer of attention is evaluated: `form_of` decides.

models/ alone evaluates by the definition or by axes. `install` adds heads that read one pixel each, which need no
products with probabilities, and the deployed form of timm.utils.reparameterize_model. All give the same numbers up to
rounding.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from sa_zoo.fast.deployed import deployed
from sa_zoo.fast.taps import read_taps, taps_of
from sa_zoo.models.attention import Attention
from sa_zoo.models.linear import is_watched

FORMS: dict[str, Callable[[Attention, Tensor], Tensor]] = {
    "taps": lambda layer, X: read_taps(layer.W_val, taps_of(layer, X), X),
    "by axes": Attention.by_axes,
    "definition": Attention.definition,
}
# Pixels above which the factors of P by axis are faster than P on an H100: 24x24 in training, 40x40 in inference.
AXES_FROM_ON_GPU = 576
AXES_FROM_ON_GPU_IN_INFERENCE = 1600


def form_of(layer: Attention, X: Tensor) -> str:
    """The form, of FORMS, in which a layer is evaluated for X (B, H, W, D)."""
    # Only the definition calls these modules, so that hooks on them run.
    if is_watched(layer.terms) or is_watched(layer.attn_drop):
        return "definition"
    if taps_of(layer, X):
        return "taps"
    least = layer.axes_from
    if not X.is_cpu:
        training = torch.is_grad_enabled()
        least = AXES_FROM_ON_GPU if training else AXES_FROM_ON_GPU_IN_INFERENCE
    in_graph = torch.jit.is_tracing() or torch.compiler.is_compiling()
    # A graph may leave the size of X open.
    height, width = layer.grid if in_graph else X.shape[1:3]
    return "by axes" if layer.factorizes() and height * width > least else "definition"


# `self` has no type: TorchScript would compile its class instead of the module.
def evaluate(self, X: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    """Eq. 10 in the form that `form_of` chooses: (B, H, W, D) -> (B, H, W, D)"""
    if not torch.jit.is_scripting():
        return FORMS[form_of(self, X)](self, X)
    return self.cheaper(X)


@contextmanager
def only(form: str) -> Iterator[None]:
    """Evaluate every layer in this form, of FORMS. Raises KeyError for an unknown one."""
    installed, chosen = Attention.evaluate, FORMS[form]
    Attention.evaluate = lambda self, X: chosen(self, X)
    try:
        yield
    finally:
        Attention.evaluate = installed


def install() -> None:
    """Evaluate the networks of models/ by `form_of`, and deploy them by constants."""
    Attention.evaluate = evaluate
    Attention.fuse = deployed  # type: ignore[assignment]  # mypy expects the type of self
