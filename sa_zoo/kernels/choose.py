"""Which evaluation of attention is used when, and why.

Importing models/ gives the definition; `install` puts the routes of this folder behind its hook. All of them compute
the same numbers up to rounding. docs/benchmarks.md has what each gains.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sa_zoo.kernels.absorbed import absorbed, can_absorb, is_positional
from sa_zoo.kernels.fused import can_fuse, fused
from sa_zoo.kernels.portions import in_portions, is_ordinary, is_recomputed, portions
from sa_zoo.kernels.remembered import remembered
from sa_zoo.models.attention import Attention
from sa_zoo.models.network import Block

ROUTES: dict[str, Callable[[Attention, Tensor], Tensor]] = {
    "definition": Attention.definition,
    "by axes": Attention.by_axes,
    "fused": fused,
    "absorbed": absorbed,
    "portions": portions,
    "remembered": remembered,
}
# Up to 16x16 pixels, training on a CPU by P itself is no slower than by its factors and takes less memory. On GPUs
# this is an estimate, not measured yet. P is also small enough to be remembered.
SMALL = 256

_only: list[str] = []


def choose(attention: Attention, X: Tensor) -> str:
    """Name of the route for X (B, H, W, D)."""
    factorizes, large = (
        attention.separable and not attention.drops(),
        X.shape[1] * X.shape[2] > SMALL,
    )
    trains = torch.is_grad_enabled()
    if _only:
        return _only[-1]
    # in torch 2.11, is_exporting() holds in every graph being compiled; in later ones it is this flag
    if torch.jit.is_tracing() or torch.compiler._is_exporting_flag:
        return (
            "by axes" if attention.large and factorizes else "definition"
        )  # a graph has to take any batch
    if is_watched(attention.children()):
        return "definition"  # it calls every module, once and with the whole batch
    axes_or_definition = "by axes" if large and factorizes else "definition"
    if not (torch.compiler.is_compiling() or is_ordinary(X, *attention.parameters())):
        return axes_or_definition  # nothing is remembered, or computed in memory of ours
    if not all(is_positional(term) for term in attention.terms):
        return (
            "absorbed" if can_absorb(attention) else "definition"
        )  # adapters expect queries and keys
    plain = type(attention.W_val) is nn.Linear and not torch.is_autocast_enabled("cpu")
    if factorizes and not trains and plain and can_fuse(X, attention.W_val.weight):
        return "fused"  # the tensor of all heads is never built
    if torch.compiler.is_compiling() or not X.is_cpu:
        return axes_or_definition  # compilers and accelerators schedule by themselves
    if trains and is_recomputed(X):
        return "portions"  # saves most of the memory and costs some time
    if trains:
        return axes_or_definition
    if not large and not (attention.large and factorizes) and not attention.drops():
        return "remembered"  # building P is a good part of the work for one image
    return "portions"


def is_watched(modules: Iterable[nn.Module]) -> bool:
    """Whether somebody expects modules, or modules in them, to be called: by hooks, or by replacing `forward`."""
    return any(
        m._forward_pre_hooks
        or m._forward_hooks
        or m._backward_pre_hooks
        or m._backward_hooks
        or "forward" in vars(m)
        for module in modules
        for m in module.modules()
    )


# `self` has no type in these two: TorchScript would compile its class instead of the module.
def evaluate(self, X: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    """`Attention.evaluate` by the chosen route: (B, H, W, D) -> (B, H, W, D)"""
    if torch.jit.is_scripting():
        if self.separable and self.large and not self.drops():
            return self.by_axes(X)
        return self.definition(X)
    return _routed(self, X)


@torch.jit.ignore
def _routed(attention: Attention, X: Tensor) -> Tensor:
    return ROUTES[choose(attention, X)](attention, X)


def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    """`Block.after_attention`, for as many images at a time as its attention: (B, H, W, D), twice -> (B, H, W, D)"""
    if torch.jit.is_scripting():
        return self.rest(x, attended)
    return _rest(self, x, attended)


@torch.jit.ignore
def _rest(block: Block, x: Tensor, attended: Tensor) -> Tensor:
    whole = (
        torch.jit.is_tracing()
        or bool(_only)
        or is_watched(m for m in block.children() if m is not block.attn)
    )
    if whole or not (torch.compiler.is_compiling() or is_ordinary(x, attended)):
        return block.rest(x, attended)
    return in_portions(block.rest, x, attended)


@contextmanager
def only(route: str) -> Iterator[None]:
    """Evaluate every layer by this route, for tests and benchmarks. Raises ValueError for a name not in ROUTES."""
    if route not in ROUTES:
        raise ValueError(f"route: got {route!r}, expected one of {', '.join(ROUTES)}")
    _only.append(route)
    try:
        yield
    finally:
        _only.pop()


def install() -> None:
    """Let the networks of models/ be evaluated by `choose`."""
    Attention.evaluate, Attention.route = evaluate, torch.jit.ignore(choose)  # type: ignore[method-assign]
    Block.after_attention = after_attention  # type: ignore[method-assign]
