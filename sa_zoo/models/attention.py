"""Multi-head self-attention over pixels whose scores are a sum of terms.

After Cordonnier, Loukas, Jaggi, "On the Relationship between Self-Attention and Convolutional Layers"
(ICLR 2020, https://arxiv.org/abs/1911.03584). Every head sees all D channels, as in the paper's experiments:

    SelfAttention(X)_h = softmax(A_h) X                                              (Eq. 1, W_val of Eq. 3 below)
    MHSA(X) = concat_h[SelfAttention(X)_h] W_val W_out                               (Eq. 3)
    A = X W_qry W_key^T X^T + X W_qry What_key r_delta + u^T W_key X^T + v^T What_key r_delta    (Eq. 8)

and A is whatever the terms of a model (terms.py, content_terms.py) add up to.

Legend, here and in every file of this folder:

    B     images in a batch                 q, k    query and key pixel
    H, W  height and width, in pixels       delta   k - q, displacement (row, column)
    T     H * W, pixels                     Delta   centre of attention of a head, a displacement
    N_h   number of heads                   alpha   sharpness of a head; alpha = spread^2 / 2
    D     channels (D_in = D_out = D)       r_delta relative positional encoding of delta
    D_h   query and key channels of a head  D_p     channels of r_delta

What the terms are decides how a layer is evaluated:

* a sum of one score an axis: the softmax factorises, and T x T probabilities are never built (by_axes.py, fused.py); on
  a CPU, what a few rows of pixels attend to is projected by W_val before the next ones are looked at;
* positions alone: P is built once for all images;
* content: P of each image, by scores that need neither queries nor keys (content_terms.py).
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import threshold

from sa_zoo.kernels.by_axes import BAND_QUERIES, attend_by_axes, attend_by_bands, bands, values_by_axes
from sa_zoo.kernels.fused import can_fuse, fused_values
from sa_zoo.kernels.products import Linear, in_portions, joined, product, rows_at_once

from .positions import wide

# Up to so many pixels one product with T x T probabilities beats two small ones with their factors: 8x8 on a CPU, but
# not 16x16; on an accelerator, by arithmetic, 16x16 too, as between the two much has to be moved.
DENSE_PIXELS = 128
DENSE_PIXELS_OF_ACCELERATORS = 256
# Maps of so many pixels are remembered (N_h T^2 numbers a layer); larger ones are not worth the memory.
MEMORABLE = 256


def probabilities_from(scores: Tensor) -> Tensor:
    """softmax over the last axis (Eq. 1), in at least float32, without what vanishes beside the rounding of the rest.

    Far from Delta a quadratic head gives denormal numbers, which add nothing, and with which a CPU's products take
    several times as long.
    """
    P = torch.softmax(wide(scores), dim=-1)
    return threshold(P, 1e-32 if P.dtype == torch.float64 else 1e-14, 0.0)  # the roundings, squared


def attend(P: Tensor, X: Tensor) -> Tensor:
    """concat_h[P_h X], explicitly: (N_h, T, T) or (B, N_h, T, T), and (B, H, W, D) -> (B, H, W, N_h D)"""
    channels = P.shape[-3] * X.shape[3]
    P = P.to(X.dtype).transpose(-3, -2).flatten(-3, -2)  # (T N_h, T): the product comes out with its heads in place
    return product(P, X.flatten(1, 2)).reshape(X.shape[0], X.shape[1], X.shape[2], channels)


class Memory:
    """The last value of a function of parameters, for as long as they hold the same numbers.

    Numbers, not versions, are compared: a write through `.data` changes no version.
    """

    def __init__(self) -> None:
        self.known: tuple[list[Tensor], Hashable, Any] | None = None

    def recall(self, function: Callable[[Tensor], Any], X: Tensor, parameters: list[Tensor]) -> Any:
        """function(X), which depends on `parameters` and on the height and width of X (B, H, W, D) alone."""
        occasion = (function.__name__, X.shape[1:3])
        if self.known is not None and self.known[1] == occasion and same(self.known[0], parameters):
            return self.known[2]
        value = function(X)
        self.known = ([parameter.detach().clone() for parameter in parameters], occasion, value)
        return value


def same(known: list[Tensor], given: list[Tensor]) -> bool:
    """Whether tensors are equal, in type and place too."""
    return len(known) == len(given) and all(
        a.dtype == b.dtype and a.device == b.device and torch.equal(a, b) for a, b in zip(known, given, strict=True)
    )


def plain(layer: nn.Module) -> bool:
    """Whether a projection is its weight and bias and nothing more: no adapter or quantised layer, without hooks."""
    return type(layer) in (nn.Linear, Linear) and not layer._forward_pre_hooks and not layer._forward_hooks


def stored(X: Tensor) -> bool:
    """Whether X has numbers in memory, which the stand-ins of torch.func's transforms and other types may not have."""
    try:
        X.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return type(X) in (Tensor, nn.Parameter)


class Attention(nn.Module):
    """MHSA (Eq. 3) with A a sum of `terms`.

    W_val: Linear(N_h D, D), all heads' value matrices side by side; W_out: Linear(D, D), the dense layer that the
    paper's code adds behind them.

    Args:
        terms: classes of score terms, each called as term(dim, num_heads, grid).
        grid: (H, W) of the images expected. Learned encodings fit it alone; other terms take any size, and it only
            decides, once, how the layer is evaluated.
        attn_drop: dropout on probabilities. Position-only probabilities are shared by the batch, and so is
            their dropout, as in the paper's code; it does not factorise by axes.
    """

    separable: Final[bool]
    large: Final[bool]
    large_for_accelerators: Final[bool]

    def __init__(
        self,
        dim: int,
        num_heads: int,
        terms: Sequence[type[nn.Module]],
        grid: tuple[int, int],
        attn_drop: float = 0.0,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        self.terms = nn.ModuleList(term(dim, num_heads, grid, device=device, dtype=dtype) for term in terms)
        self.separable = all(hasattr(term, "axis_scores") for term in self.terms)
        self.large = grid[0] * grid[1] > DENSE_PIXELS
        self.large_for_accelerators = grid[0] * grid[1] > DENSE_PIXELS_OF_ACCELERATORS
        self.attn_drop = nn.Dropout(attn_drop)
        self.memory = Memory()
        self.W_val = Linear(num_heads * dim, dim, device=device, dtype=dtype)
        self.W_out = Linear(dim, dim, device=device, dtype=dtype)

    def probabilities(self, X: Tensor) -> Tensor:
        """Attention maps: (B, H, W, D) -> (N_h, T, T) if no term looks at X, else (B, N_h, T, T); float32 or wider."""
        scores = self.terms[0](X)
        for term in self.terms[1:]:
            scores = scores + term(X)
        return probabilities_from(scores)

    def axis_probabilities(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """The factors of `probabilities`, (N_h, H, H) and (N_h, W, W), for separable terms."""
        down, across = self.terms[0].axis_scores(X.shape[1], X.shape[2])
        for term in self.terms[1:]:
            more_down, more_across = term.axis_scores(X.shape[1], X.shape[2])
            down, across = down + more_down, across + more_across
        return probabilities_from(down), probabilities_from(across)

    def factorises(self) -> bool:
        """Whether P has factors by axes, which dropout on probabilities takes from it."""
        return self.separable and not (self.training and self.attn_drop.p > 0.0)

    def by_axes(self, X: Tensor) -> bool:
        """Whether torch's products attend with the factors of P to X."""
        return self.factorises() and (self.large if X.is_cpu else self.large_for_accelerators)

    def attended(self, X: Tensor) -> Tensor:
        """concat_h[P_h X] of all images at once: (B, H, W, D) -> (B, H, W, N_h D)"""
        if self.separable and self.by_axes(X):  # TorchScript compiles what follows for separable terms alone
            P_down, P_across = self.axis_probabilities(X)
            return attend_by_axes(P_down, P_across, X)
        return attend(self.attn_drop(self.probabilities(X)), X)

    @torch.jit.unused
    def attention_to(self, X: Tensor) -> Callable[[Tensor], Tensor]:
        """concat_h[P_h .] as a function of some of the images, with all that does not depend on them done."""
        looking = [term for term in self.terms if hasattr(term, "matrices")]
        if not looking:
            P = self.attn_drop(self.standing_probabilities(X))
            return lambda some: attend(P, some)
        if not all(plain(layer) for term in looking for layer in term.children()):
            return lambda some: attend(self.attn_drop(self.probabilities(some)), some)
        matrices = [term.matrices() for term in looking]
        positions = [term(X).transpose(0, 1) for term in self.terms if not hasattr(term, "matrices")]

        def attention(some: Tensor) -> Tensor:
            scores = [term.scores(given, some) for term, given in zip(looking, matrices, strict=True)]
            P = self.attn_drop(probabilities_from(sum([*scores[1:], *positions], scores[0])))  # (B, T, N_h, T)
            return attend(P.transpose(1, 2), some)

        return attention

    @torch.jit.unused
    def standing_probabilities(self, X: Tensor) -> Tensor:
        """`probabilities` by position; remembered where nothing is trained and they are small."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or not X.is_cpu:
            return self.probabilities(X)
        if X.shape[1] * X.shape[2] > MEMORABLE:
            return self.probabilities(X)
        return self.memory.recall(self.probabilities, X, list(self.terms.parameters()))

    @torch.jit.unused
    def standing_factors(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """`axis_probabilities`; remembered where nothing is trained."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return self.axis_probabilities(X)
        return self.memory.recall(self.axis_probabilities, X, list(self.terms.parameters()))

    def forward(self, X: Tensor) -> Tensor:
        """(B, H, W, D) -> (B, H, W, D)"""
        plainly = torch.jit.is_scripting() or torch.jit.is_tracing()  # for graphs of any number of images
        return self.W_out(self.W_val(self.attended(X)) if plainly else self.evaluated(X))

    @torch.jit.unused
    def evaluated(self, X: Tensor) -> Tensor:
        """sum_h P_h X W_val_h + b_val in the way that suits the device: (B, H, W, D) -> (B, H, W, D)"""
        bare = self.bare(X)
        if bare and self.factorises() and can_fuse(X, self.W_val.weight):
            return fused_values(X, *self.standing_factors(X), self.W_val.weight, self.W_val.bias)
        if not self.by_axes(X):
            return self.projected(self.attention_to(X), X)
        if torch.compiler.is_compiling() or not X.is_cpu:
            return self.projected(partial(attend_by_axes, *self.axis_probabilities(X)), X)
        P_down, P_across = self.standing_factors(X)
        if bare:
            return values_by_axes(P_down, P_across, X, self.W_val.weight, self.W_val.bias)
        downs, across = bands(P_down, rows_at_once(X)), bands(P_across, BAND_QUERIES)
        return joined([self.projected(partial(attend_by_bands, down, across), X) for down in downs], dim=1)

    @torch.jit.unused
    def bare(self, X: Tensor) -> bool:
        """Whether X and W_val are but numbers: nothing is exported, recorded for gradients or cast on the way."""
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or not plain(self.W_val):
            return False
        if torch.compiler.is_compiling():
            return not torch.compiler.is_exporting()
        return stored(X)

    @torch.jit.unused
    def projected(self, attention: Callable[[Tensor], Tensor], X: Tensor) -> Tensor:
        """attention(X) W_val + b_val, of so many images at a time as suits the device."""
        return in_portions(lambda some: self.W_val(attention(some)), X)

    @torch.jit.ignore
    def reparameterize(self) -> None:
        """Fold W_out into W_val, between which nothing happens; timm.utils.reparameterize_model calls this."""
        if isinstance(self.W_out, nn.Identity):
            return
        inner, outer = self.W_val, self.W_out
        with torch.no_grad():
            weight = wide(outer.weight) @ wide(inner.weight)
            bias = wide(outer.weight) @ wide(inner.bias) + wide(outer.bias)
            inner.weight.copy_(weight)
            inner.bias.copy_(bias)
        self.W_out = nn.Identity()


class ExplicitAttention(Attention):
    """The layer by its definition with torch's own products, as the paper's code has it: the yardstick."""

    def forward(self, X: Tensor) -> Tensor:
        """(B, H, W, D) -> (B, H, W, D)"""
        P = self.attn_drop(self.probabilities(X)).to(X.dtype).transpose(-3, -2).flatten(-3, -2)
        heads = P @ X.flatten(1, 2)
        return self.W_out(self.W_val(heads.reshape(X.shape[0], X.shape[1], X.shape[2], -1)))
