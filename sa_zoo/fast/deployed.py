"""The deployed form of attention by position: constants and one linear map.

`timm.utils.reparameterize_model` replaces each layer by it. The constants are computed when a layer is deployed, loaded
or given another image size: the pixels of one-hot heads, or the probabilities P of all heads, or their factors by axis.
W_out and batch normalization are folded into W_val. P is kept in the form that is faster on its device.
"""

from typing import Any

import torch
from torch import Tensor, nn

from sa_zoo.fast.portions import axes_from, heads_fill_caches
from sa_zoo.fast.product import attended, projected
from sa_zoo.fast.recomputed import of_factors
from sa_zoo.fast.situation import Situation
from sa_zoo.fast.taps import convolved, gather, lattice_of, read_places
from sa_zoo.models.attention import Attention
from sa_zoo.models.norm import is_plain
from sa_zoo.models.stages import Grid

# The most numbers in a P that is kept; a larger P is built for each batch.
KEPT = 2**24


class Deployed(Attention):
    """Attention by position with constant P, for inference.

    It takes over the parameters of `layer` and freezes them. Only `load_state_dict` and `set_grid` renew its constants.
    Images of another size than the network's are evaluated by the definition or by axes.
    """

    def __init__(self, layer: Attention) -> None:
        nn.Module.__init__(self)
        layer.fold()
        self.terms = layer.terms
        self.separable = layer.separable  # type: ignore[misc]  # final, and assigned once
        self.grid = layer.grid
        self.num_heads = layer.num_heads
        self.attn_drop = nn.Dropout(0.0)
        self.W_val = layer.W_val
        self.W_out = layer.W_out
        self.requires_grad_(False)
        self.constants = constants_of(self)
        self.register_load_state_dict_post_hook(renew)

    def set_grid(self, grid: Grid) -> None:
        super().set_grid(grid)
        self.constants = constants_of(self)

    def forward(self, X: Tensor) -> Tensor:
        """(B, H, W, D) -> (B, H, W, D)"""
        if not torch.jit.is_scripting():  # noqa: SIM102  TorchScript compiles both sides of `and`
            if self.constants and (torch.jit.is_tracing() or X.shape[1:3] == self.grid):
                return self.constants(X, self.W_val)
        return self.cheaper(X)


def deployed(layer: Attention) -> Attention:
    """The replacement for a layer in timm.utils.reparameterize_model: Deployed, if all terms are positional.

    Other layers, and those of transformers' models, only have W_out folded into W_val.
    Raises ValueError for linear maps with adapters, parametrizations, pruning or hooks.
    """
    if type(layer) is Attention and all(term.positional for term in layer.terms):
        return Deployed(layer)
    return layer.fold()


def renew(layer: Deployed, _: Any) -> None:
    """After load_state_dict."""
    layer.set_grid(layer.grid)


@torch.no_grad()
def constants_of(layer: Attention) -> nn.Module | None:
    """P of a layer on its grid, as a module called with X and W_val; None if P is too large to keep."""
    weight = layer.W_val.weight
    taps = layer.terms[0].taps() if len(layer.terms) == 1 else []
    if taps:
        return ReadPixels(taps, layer.grid).to(weight.device)
    X = weight.new_empty(1, *layer.grid, 1)  # positional terms look at its height and width
    whole = is_kept_whole(layer.num_heads, X.numel(), weight)
    if layer.factorizes() and not whole:
        return Mixed(*layer.axis_probabilities(X)).to(weight.dtype)
    if layer.num_heads * X.numel() ** 2 > KEPT:
        return None
    return Mixed(layer.probabilities(X)).to(weight.dtype)


def is_kept_whole(heads: int, pixels: int, x: Tensor) -> bool:
    """Whether P is kept rather than its factors, on the device of x."""
    return pixels <= axes_from(x) and heads * pixels**2 <= KEPT


class ReadPixels(nn.Module):
    """Each head reads one pixel: a convolution if these are the pixels of a kernel, else a gather and a product."""

    places: Tensor

    def __init__(self, taps: list[list[int]], grid: Grid) -> None:
        super().__init__()
        self.register_buffer("places", read_places(taps, grid), persistent=False)
        self.kernel = lattice_of(taps)

    @torch.jit.unused
    def forward(self, X: Tensor, W_val: nn.Linear) -> Tensor:
        if self.kernel and is_plain(W_val):
            return convolved(W_val.weight, W_val.bias, self.kernel, X)
        return projected(W_val, gather(X, self.places).flatten(3))


class Mixed(nn.Module):
    """P as one factor, for few pixels, or by axis."""

    def __init__(self, *factors: Tensor) -> None:
        super().__init__()
        self.keep(*factors)

    def keep(self, *factors: Tensor) -> None:
        self._buffers.clear()
        for number, P in enumerate(factors):
            # in memory as `attend` reads it: (Q, N_h, N)
            rows = P.transpose(0, 1).contiguous().transpose(0, 1)
            self.register_buffer(f"P_{number}", rows, persistent=False)

    def _apply(self, *args: Any, **kwargs: Any) -> "Mixed":
        """After a move to another device. On a GPU, the factors of few pixels become one."""
        super()._apply(*args, **kwargs)
        factors: list[Any] = list(self._buffers.values())
        if len(factors) == 2:
            down, across = factors
            if is_kept_whole(len(down), down.shape[1] * across.shape[1], down):
                P = torch.einsum("hqk,hrl->hqrkl", down, across)
                self.keep(P.flatten(3).flatten(1, 2))
        return self

    @torch.jit.unused
    def forward(self, X: Tensor, W_val: nn.Linear) -> Tensor:
        factors: list[Any] = list(self._buffers.values())
        now = Situation([], X)
        if heads_fill_caches(X, now) and is_plain(W_val) and now.by_hand:
            return of_factors(W_val, factors, X, now)
        return attended(W_val, factors, X)
