"""The summands of attention scores (Eqs. 7 to 9); content.py has those of content. Legend: attention.py."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from .layout import Grid
from .positions import (
    at_least_float32,
    generalized_quadratic_scores,
    learned_axis_scores,
    one_hot_displacements,
    outer_sum,
    pixels,
    quadratic_scores,
    resized_table,
)

PEAK = (
    5.8  # score of an axis by which a head prefers its pixel: 96 % of its attention, of 8x8 pixels
)


class Term(nn.Module):
    """A score term, built by term(dim, num_heads, grid, **dd), where dd may hold the parameters' device and dtype.

    Its forward is its definition: X (B, H, W, D) -> scores (N_h, T, T), or (B, N_h, T, T) if they depend on the content
    of X. The rest of its interface is declared here.
    """

    positional = False  # whether scores depend on the height and width of X only
    separable = False  # whether they are also a sum of one score per axis: see Separable
    any_grid = True  # False if it holds learned encodings for one grid of (H, W) pixels: `resized`
    drawn = "stored"  # the explorer's formula for its maps: "quadratic", "generalized", "learned"
    not_decayed: tuple[str, ...] = ()  # its parameters without weight decay
    positional_parameters: tuple[str, ...] = ()  # its parameters that decide where heads look

    def taps(self) -> list[list[int]]:
        """The displacement (row, column) of each head if all read one pixel in images of any size, else none."""
        return []

    def resized(self, name: str, value: Tensor, grid: Grid) -> Tensor:
        """A value of the parameter `name`; encodings are interpolated to a grid of (H, W) pixels."""
        return value

    def set_grid(self, grid: Grid) -> None:
        """Replace learned encodings by those for a grid of (H, W) pixels."""
        for name, old in list(self.named_parameters(recurse=False)):
            new = self.resized(name, old.detach(), grid)
            setattr(self, name, nn.Parameter(new, old.requires_grad))


class Separable(Term):
    """A positional term: a sum of one score per axis, so its softmax factorizes."""

    positional = True
    separable = True

    def axis_scores(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Scores (N_h, H, H) down the rows and (N_h, W, W) across the columns."""
        raise NotImplementedError

    def forward(self, X: Tensor) -> Tensor:
        """(N_h, T, T)"""
        down, across = self.axis_scores(X.shape[1], X.shape[2])
        return outer_sum(down, across)


class Quadratic(Separable):
    """-1/2 s_h^2 |delta - Delta_h|^2: quadratic encoding (Eq. 9, Section 4.2). Delta: (N_h, 2), spread s: (N_h,)."""

    drawn = "quadratic"
    positional_parameters = ("Delta", "spread")
    not_decayed = positional_parameters  # decay pulls heads to the query pixel and makes them blur

    def __init__(self, dim: int, num_heads: int, grid: Grid, **dd: Any) -> None:
        super().__init__()
        self.Delta = nn.Parameter(torch.empty(num_heads, 2, **dd))
        self.spread = nn.Parameter(torch.empty(num_heads, **dd))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # As in the paper's code; its text says N(0, 2 I), a variance of 2.
        nn.init.normal_(self.Delta, std=2.0)
        nn.init.normal_(self.spread, mean=1.0, std=0.01)

    @torch.no_grad()
    def start_as_kernel(self) -> None:
        """Start near a convolution (Theorem 1): heads at the N_h pixels closest to a kernel's center."""
        self.Delta.copy_(kernel_offsets(len(self.Delta)))
        nn.init.constant_(self.spread, 3.0)  # 96 % of a head's attention is on its pixel

    def taps(self) -> list[list[int]]:
        if type(self).axis_scores is not Quadratic.axis_scores:  # a subclass may read other pixels
            return []
        alpha = 0.5 * at_least_float32(self.spread).square()
        return one_hot_displacements(self.Delta, alpha)

    def axis_scores(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        alpha = 0.5 * at_least_float32(self.spread).square()
        y = pixels(height, alpha.device)
        x = pixels(width, alpha.device)
        down = quadratic_scores(self.Delta[:, 0], alpha, y, y)
        across = quadratic_scores(self.Delta[:, 1], alpha, x, x)
        return down, across


class GeneralizedQuadratic(Term):
    """-1/2 (delta - Delta_h)^T S_h S_h^T (delta - Delta_h): any covariance (appendix). spread S: (N_h, 2, 2)."""

    positional = True
    drawn = "generalized"
    positional_parameters = ("Delta", "spread")
    not_decayed = positional_parameters

    def __init__(self, dim: int, num_heads: int, grid: Grid, **dd: Any) -> None:
        super().__init__()
        self.Delta = nn.Parameter(torch.empty(num_heads, 2, **dd))
        self.spread = nn.Parameter(torch.empty(num_heads, 2, 2, **dd))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.Delta, std=2.0)
        nn.init.normal_(self.spread, std=0.01)
        self.spread.data.diagonal(dim1=1, dim2=2).add_(1.0)

    def taps(self) -> list[list[int]]:
        # A sharp Gaussian with tilted axes also reads one pixel, but at the border not that of replicate padding.
        axes = at_least_float32(self.spread).diagonal(dim1=1, dim2=2)
        tilted = (self.spread - axes.diag_embed()).abs().amax(dim=(1, 2)) > 0
        alpha = 0.5 * axes.square().amin(dim=1)
        alpha = alpha.masked_fill(tilted, 0.0)
        return one_hot_displacements(self.Delta, alpha)

    def forward(self, X: Tensor) -> Tensor:
        """(N_h, T, T)"""
        height, width = X.shape[1], X.shape[2]
        return generalized_quadratic_scores(self.Delta, self.spread, height, width)


class RelativeTables(Term):
    """Learned encodings of the displacements along each axis. row: (2 W - 1, D_row), col: (2 H - 1, D_col).

    Every layer and axis has its own table, as in the paper's code; in the paper's text layers share one r_delta.
    Smaller images use the rows of their displacements.
    """

    any_grid = False
    positional_parameters: tuple[str, ...] = ("row", "col")

    def __init__(self, dim_row: int, dim_col: int, grid: Grid, **dd: Any) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.empty(2 * grid[1] - 1, dim_row, **dd))
        self.col = nn.Parameter(torch.empty(2 * grid[0] - 1, dim_col, **dd))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.row)
        nn.init.normal_(self.col)

    def write_peaks(self, x: Tensor, y: Tensor, peak: float) -> None:
        """Make row[dx] . x_h and col[dy] . y_h larger by `peak` at the pixels of a kernel, one per head: (N_h, D_p)

        The first columns become one-hot, one per row or column of the kernel. All others stay.
        """
        centers = kernel_offsets(len(x)).T
        for table, weight, center in zip((self.col, self.row), (y, x), centers, strict=True):
            kernel = center.unique()
            delta = torch.arange(len(table)) - len(table) // 2
            table[:, : len(kernel)] = peak**0.5 * (delta[:, None] == kernel)
            weight[:, : len(kernel)] = peak**0.5 * (center[:, None] == kernel)

    def resized(self, name: str, value: Tensor, grid: Grid) -> Tensor:
        sizes = {"row": grid[1], "col": grid[0]}
        return resized_table(value, sizes[name]) if name in sizes else value


class Learned(Separable, RelativeTables):
    """row[dx] . w_h + col[dy] . v_h (Section 4.3), Eq. 8's last term by axis. D_row = D_col = D; w and v: (N_h, D)."""

    drawn = "learned"
    positional_parameters = ("row", "col", "w", "v")

    def __init__(self, dim: int, num_heads: int, grid: Grid, **dd: Any) -> None:
        super().__init__(dim, dim, grid, **dd)
        self.w = nn.Parameter(torch.empty(num_heads, dim, **dd))
        self.v = nn.Parameter(torch.empty(num_heads, dim, **dd))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        bound = self.w.shape[1] ** -0.5  # as nn.Linear(D, N_h, bias=False)
        nn.init.uniform_(self.w, -bound, bound)
        nn.init.uniform_(self.v, -bound, bound)

    @torch.no_grad()
    def start_as_kernel(self) -> None:
        self.write_peaks(self.w, self.v, PEAK)

    def axis_scores(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        down = learned_axis_scores(self.col, self.v, height)
        across = learned_axis_scores(self.row, self.w, width)
        return down, across


Terms = tuple[type[Term], ...]  # whose scores are added up


def has_fixed_size(terms: Terms) -> bool:
    """Whether a term has learned encodings: no image may be larger."""
    return not all(term.any_grid for term in terms)


def declared(network: nn.Module, attribute: str) -> dict[str, nn.Parameter]:
    """The parameters listed in modules' `positional_parameters` or `not_decayed`, by path."""
    found = {}
    for path, module in network.named_modules():
        names = getattr(module, attribute, ())
        for name, parameter in module.named_parameters(recurse=False):
            if name in names:
                found[f"{path}.{name}".lstrip(".")] = parameter
    return found


def kernel_offsets(heads: int) -> Tensor:
    """The N_h pixels closest to a kernel's center, row by row: integer displacements (N_h, 2)."""
    half = (math.isqrt(heads - 1) + 1) // 2  # of the smallest centered kernel with N_h pixels
    side = torch.arange(-half, half + 1)
    offsets = torch.cartesian_prod(side, side)
    nearest = offsets.square().sum(1).argsort(stable=True)[:heads].sort().values
    return offsets[nearest]
