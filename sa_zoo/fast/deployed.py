"""The deployed form of attention by position: constants and one linear map.

`timm.utils.reparameterize_model` replaces each layer by it. The constants are the pixels of one-hot heads, or P or its
factors by axis. W_out, or batch normalization in its place, is folded into W_val.
"""

from typing import Final

import torch
from torch import Tensor, nn

from sa_zoo.fast.taps import read_taps
from sa_zoo.models.attention import Attention, attend_by_axes
from sa_zoo.models.layout import Grid

# The most numbers in a P that is kept; a larger P is built for each batch.
KEPT = 2**24


class Deployed(Attention):
    """Attention by position with constant P, for inference.

    It takes over the parameters of `layer` and freezes them. Only `load_state_dict` and `set_grid` renew its constants.
    Images of another size than the network's are evaluated as in other layers.
    """

    # again: TorchScript reads the annotations of one class
    separable: Final[bool]  # type: ignore[misc]
    P: Tensor | None  # none for one-hot heads, and if it is too large
    P_across: Tensor | None  # if there is one, P is the factor down the rows

    def __init__(self, layer: Attention) -> None:
        nn.Module.__init__(self)
        layer.fold()
        self.terms = layer.terms
        self.separable = layer.separable
        self.grid = layer.grid
        self.num_heads = layer.num_heads
        self.axes_from = layer.axes_from
        self.attn_drop = nn.Dropout(0.0)
        self.W_val = layer.W_val
        self.W_out = layer.W_out
        self.requires_grad_(False)
        self.keep_constants()
        self.register_load_state_dict_post_hook(keep_new_constants)

    @torch.no_grad()
    def keep_constants(self) -> None:
        """Compute the constants from the parameters."""
        X = self.W_val.weight.new_empty(1, *self.grid, 1)  # terms look at its height and width
        self.offsets = self.terms[0].taps() if len(self.terms) == 1 else []
        factors: list[Tensor] = []
        if not self.offsets and self.axes_pay():
            factors = self.axis_probabilities(X)
        elif not self.offsets and self.num_heads * X.numel() ** 2 <= KEPT:
            factors = [self.probabilities(X)]
        for name, P in zip(("P", "P_across"), [*factors, None, None], strict=False):
            # in memory as `attend` reads it: (Q, N_h, N)
            rows = P if P is None else P.to(X.dtype).transpose(0, 1).contiguous().transpose(0, 1)
            self.register_buffer(name, rows, persistent=False)

    def set_grid(self, grid: Grid) -> None:
        super().set_grid(grid)
        self.keep_constants()

    def forward(self, X: Tensor) -> Tensor:
        """(B, H, W, D) -> (B, H, W, D)"""
        if not torch.jit.is_scripting():  # noqa: SIM102  TorchScript compiles both sides of `and`
            if self.offsets or (self.P is not None and X.shape[1:3] == self.grid):
                return self.by_constants(X)
        return self.evaluate(X)

    @torch.jit.unused
    def by_constants(self, X: Tensor) -> Tensor:
        """As `forward`, for images of the network's size, or of any size for one-hot heads."""
        if self.offsets:
            return read_taps(self.W_val, self.offsets, X)
        # Graphs made by torch.jit.trace refuse other sizes here.
        X = X.unflatten(2, [self.grid[1]]).unflatten(1, [self.grid[0]])
        factors = [P for P in (self.P, self.P_across) if P is not None]
        if len(factors) == 1:
            return self.values(factors[0], X)
        return self.W_val(attend_by_axes(factors, X))


def keep_new_constants(layer: Deployed, _: object) -> None:
    """After loading other parameters; a function of the module can be pickled."""
    layer.keep_constants()


def deployed(layer: Attention) -> Attention:
    """The replacement for a layer in timm.utils.reparameterize_model: Deployed, if all terms are positional.

    Other layers, and those of transformers' models, only have W_out folded into W_val.
    Raises ValueError for linear maps with adapters, parametrizations, pruning or hooks.
    """
    if type(layer) is Attention and all(term.positional for term in layer.terms):
        return Deployed(layer)
    return layer.fold()
