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

* a sum of one score an axis: the softmax factorises, P[q, k] = P_down[y, y'] P_across[x, x'], and T x T probabilities
  are never built; on a CPU, what a few rows of pixels attend to is projected by W_val before the next ones are looked
  at, and keys beyond the reach of all heads are left out;
* positions alone: P is built once for all images;
* content: P of each image, by scores that need neither queries nor keys (content_terms.py).
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import threshold

from .positions import wide
from .products import ROOM, Linear, images_at_once, in_portions, joined, product, rows_at_once, sum_over_heads

# Up to so many pixels one product with T x T probabilities beats two small ones with their factors: 8x8 on a CPU, but
# not 16x16; on an accelerator, by arithmetic, 16x16 too, as between the two much has to be moved.
DENSE_PIXELS = 128
DENSE_PIXELS_OF_ACCELERATORS = 256
# Numbers in the images whose rows are mixed before their columns are: what lies between stays in a CPU's caches.
MIXED = 2 * 16 * 16 * 400
# Queries along a row that share the keys which they attend to.
BAND_QUERIES = 16
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


def attend_down(P: Tensor, X: Tensor) -> Tensor:
    """P_h X along the first axis: (N_h, Q, H), (B, H, W, D) -> (B, Q, N_h, W, D)"""
    N_h, queries, _ = P.shape
    down = P.to(X.dtype).transpose(0, 1).flatten(0, 1)  # (Q N_h, H): one product for all heads
    return (down @ X.flatten(2)).unflatten(1, [queries, N_h]).unflatten(3, [X.shape[2], -1])


def attend_across(P: Tensor, mixed: Tensor) -> Tensor:
    """P_h along the second axis: (N_h, Q, W), (B, H, N_h, W, D) -> (B, H, Q, N_h, D)"""
    return (P.to(mixed.dtype) @ mixed).transpose(2, 3)


def attend_by_axes(P_down: Tensor, P_across: Tensor, X: Tensor) -> Tensor:
    """concat_h[P_h X] for P_h = P_down (x) P_across: (N_h, H, H), (N_h, W, W), (B, H, W, D) -> (B, H, W, N_h D)

    Exact, O(T (H + W)) where the explicit form costs O(T^2).
    """
    return attend_across(P_across, attend_down(P_down, X)).flatten(3)


Band = tuple[Tensor, slice]  # probabilities of some queries, (N_h, Q, K), and the K keys that they are of


def bands(P: Tensor, queries: int) -> list[Band]:
    """Blocks of so many queries, and the keys to which any head gives a probability in them: (N_h, Q, K)

    Exact for any probabilities: what is left out is zero, and `probabilities_from` gives zeros no gradients. Heads of a
    quadratic encoding are narrow: they reach a few pixels of a row.
    """
    found = []
    for block in P.split(queries, dim=1):
        attended = block.detach().amax(dim=(0, 1)).nonzero()
        keys = slice(int(attended[0]), int(attended[-1]) + 1)
        found.append((block[:, :, keys], keys))
    return found


def attend_by_bands(down: Band, across: list[Band], X: Tensor) -> Tensor:
    """`attend_by_axes` for the queries of one band `down` and all bands `across`: (B, H, W, D) -> (B, Q, W, N_h D)"""
    P_down, rows = down
    images = []
    for some in X[:, rows].split(images_at_once(X, MIXED)):
        mixed = attend_down(P_down, some)
        images.append(joined([attend_across(P, mixed[:, :, :, keys]) for P, keys in across], dim=2))
    return joined(images, dim=0).flatten(3)


def attend_in_place(down: Band, across: list[Band], X: Tensor) -> Tensor:
    """What `attend_by_bands` gives, without gradients, with heads apart: (B, H, W, D) -> (B, N_h, Q, W, D)

    A few images after another, in memory that the next portion uses again.
    """
    P_down, rows = down
    N_h, Q, _ = P_down.shape
    B, _, W, D = X.shape
    images = images_at_once(X, MIXED)
    heads = ROOM.of("heads", X.dtype, B, N_h, Q, W, D)
    for some, places in zip(X[:, rows].split(images), heads.split(images), strict=True):
        mixed = ROOM.of("mixed", X.dtype, len(some), N_h * Q, W * D)
        torch.matmul(P_down.flatten(0, 1), some.flatten(2), out=mixed)
        queries = places.split([P.shape[1] for P, _ in across], dim=3)
        for (P, keys), place in zip(across, queries, strict=True):
            torch.matmul(P[:, None], mixed.view(-1, N_h, Q, W, D)[:, :, :, keys], out=place)
    return heads


class Memory:
    """The last value of a function of parameters, for as long as they hold the same numbers.

    Numbers, not versions, are compared: a write through `.data` changes no version.
    """

    def __init__(self) -> None:
        self.known: tuple[list[Tensor], Hashable, Any] | None = None

    def recall(self, function: Callable[[], Any], parameters: list[Tensor], occasion: Hashable) -> Any:
        """function(), which depends on `parameters` and `occasion` alone."""
        if self.known is not None and self.known[1] == occasion and same(self.known[0], parameters):
            return self.known[2]
        value = function()
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

    def by_axes(self, X: Tensor) -> bool:
        """Whether X is attended with by the factors of P."""
        dropping = self.training and self.attn_drop.p > 0.0
        large = self.large if X.is_cpu else self.large_for_accelerators
        return self.separable and not dropping and large

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
        return self.memory.recall(lambda: self.probabilities(X), list(self.terms.parameters()), X.shape[1:3])

    @torch.jit.unused
    def standing_bands(self, X: Tensor) -> tuple[list[Band], list[Band]]:
        """Bands of the factors of `probabilities`, down and across; remembered where nothing is trained."""

        def built() -> tuple[list[Band], list[Band]]:
            P_down, P_across = self.axis_probabilities(X)
            return bands(P_down.to(X.dtype), rows_at_once(X)), bands(P_across.to(X.dtype), BAND_QUERIES)

        if torch.is_grad_enabled():
            return built()
        return self.memory.recall(built, list(self.terms.parameters()), (X.shape[1:3], X.dtype))

    def forward(self, X: Tensor) -> Tensor:
        """(B, H, W, D) -> (B, H, W, D)"""
        return self.W_out(self.W_val(self.attended(X)) if torch.jit.is_scripting() else self.evaluated(X))

    @torch.jit.unused
    def evaluated(self, X: Tensor) -> Tensor:
        """sum_h P_h X W_val_h + b_val in the way that suits the device: (B, H, W, D) -> (B, H, W, D)"""
        if not self.by_axes(X):
            return self.projected(self.attention_to(X), X)
        if torch.compiler.is_compiling() or not X.is_cpu:
            return self.projected(partial(attend_by_axes, *self.axis_probabilities(X)), X)
        downs, across = self.standing_bands(X)
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or not (plain(self.W_val) and stored(X)):
            return joined([self.projected(partial(attend_by_bands, down, across), X) for down in downs], dim=1)

        def values(down: Band, some: Tensor) -> Tensor:
            heads = attend_in_place(down, across, some)
            summed = sum_over_heads(heads.flatten(2, 3), self.W_val.weight, self.W_val.bias)
            return summed.unflatten(1, heads.shape[2:4])

        # Twice as many images as usual: for each portion oneDNN lays out W_val anew, and places stay in the caches.
        return joined([in_portions(partial(values, down), X, times=2) for down in downs], dim=1)

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
