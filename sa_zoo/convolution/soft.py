"""Convolutional attention of finite alpha, all of it trainable: SoftAttention. Symbols: theorem.py.

Far from the border every query sees the same neighborhood, so that sum_h P_h[q, .] W_val_h is one kernel, a little
larger than the convolution's, and the layer is a convolution with it. Near the border the softmax is distributed over
fewer keys. Let U_h be P_h on an unbounded grid, cut off at the border and not normalized again. Both are products of
factors along the axes, so

    prod_a P_h^a = prod_a U_h^a + sum_a (prod_{b < a} U_h^b) (P_h^a - U_h^a) (prod_{b > a} P_h^b)

where P_h^a = U_h^a except for a few queries and the outermost heads: one convolution, and a thin frame per axis.
Where images are small and channels many, evaluating all queries by the factors of P_h costs less than the larger
kernel; multiply-adds decide.
"""

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sa_zoo.convolution.convolutional import ConvolutionalAttention, convolve, project
from sa_zoo.convolution.padding import Keys
from sa_zoo.convolution.theorem import DULLEST, seen_offsets, window
from sa_zoo.kernels.situation import is_ordinary
from sa_zoo.models.attention import attend_by_axes, probabilities_from
from sa_zoo.models.positions import at_least_float32, pixels, quadratic_scores


def equal(known: list[Tensor], given: list[Tensor]) -> bool:
    """Whether the numbers are equal, not their versions: a write through `.data` changes no version."""
    return all(
        a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
        for a, b in zip(known, given, strict=True)
    )


def product(sizes: list[int]) -> int:
    """math.prod, which TorchScript does not know."""
    total = 1
    for size in sizes:
        total *= size
    return total


class SoftAttention(ConvolutionalAttention):
    """The layer at finite alpha. Delta (N_h, n) and alpha (N_h,) are parameters.

    `settle` derives the size of the composed kernel and the outermost heads from Delta and alpha. It runs when they
    are set or loaded, on every train() and eval(), and before any call that finds them changed. Graphs keep the size
    that they were made with.
    """

    # A multiply-add of the evaluation by axes takes about so many times as long as one of a convolution: it comes in
    # small matrix products whose results go through memory (float32, forward and backward, on an EPYC core).
    axes_cost: Final[int] = 3
    outer: list[list[int]]

    @torch.jit.ignore
    def hold(self, Delta: Tensor, alpha: Tensor) -> None:
        self.Delta = nn.Parameter(Delta)
        self.alpha = nn.Parameter(alpha)
        self.settle()

    @torch.jit.ignore
    def settle(self) -> None:
        """Update what forward takes as fixed to the current Delta and alpha. One item per axis each:

        `first`, `step`, `count` of the composed kernel, and `outer`, the heads that look beyond the border. In addition
        `dull`: whether a head sees further than the kernel.
        """
        self.settled = [self.Delta.detach().clone(), self.alpha.detach().clone()]
        if self.Delta.is_meta:
            return
        self.dull = bool((self.alpha < DULLEST).any())
        precision = torch.finfo(at_least_float32(self.alpha).dtype).eps
        seen = [seen_offsets(Delta, self.alpha, precision) for Delta in self.Delta.unbind(dim=1)]
        self.first, self.step, self.count = (
            list(items) for items in zip(*map(window, seen), strict=True)
        )
        self.outer = [
            [
                head
                for head, (first, last) in enumerate(pairs)
                if center + first < 0 or center + last > extent
            ]
            for pairs, center, extent in zip(seen, self.center, self.extent, strict=True)
        ]

    @torch.jit.ignore
    def follow(self) -> None:
        """`settle` if Delta or alpha were changed in place, which only their numbers show."""
        in_graph = torch.compiler.is_compiling() or torch.jit.is_tracing()
        if (
            not in_graph
            and is_ordinary(self.Delta, self.alpha)
            and not equal(self.settled, [self.Delta, self.alpha])
        ):
            self.settle()

    @torch.jit.ignore
    def train(self, mode: bool = True) -> "SoftAttention":
        self.settle()
        nn.Module.train(
            self, mode
        )  # not super(): TorchScript calls this with a module of its own class
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.settle()

    def window_scores(self, axis: int) -> Tensor:
        """Scores within the composed kernel along one axis: (N_h, count)"""
        offsets = pixels(self.count[axis], self.alpha.device) * self.step[axis] + self.first[axis]
        origin = pixels(1, self.alpha.device)
        return quadratic_scores(self.Delta[:, axis], self.alpha, origin, offsets).squeeze(1)

    def factors(self, axis: int, keys: Keys) -> tuple[Tensor, Tensor]:
        """P_h and U_h along one axis, for the stored keys: (N_h, Q, stored) both"""
        scores = self.axis_scores(axis, keys.sizes)
        whole = self.window_scores(axis).logsumexp(dim=-1)[:, None, None]
        P = probabilities_from(scores)
        U = P * torch.exp(scores.logsumexp(dim=-1, keepdim=True) - whole)
        begin, size = keys.before[axis], keys.stored.shape[2 + axis]
        return P.narrow(2, begin, size), U.narrow(2, begin, size)

    def composed_kernel(self) -> Tensor:
        """sum_h U_h[q, .] W_val_h for any query q: (D_out, D_in / groups, *count)"""
        slices = self.W_val()
        U = probabilities_from(self.window_scores(0))
        for axis in range(1, len(self.count)):
            U = (U[:, :, None] * probabilities_from(self.window_scores(axis))[:, None, :]).flatten(
                1
            )
        # slices @ U as a 1x1 convolution with the heads as channels, last in memory: CPU libraries take several times
        # as long for a matrix product with so few columns.
        heads_last = (
            at_least_float32(slices).flatten(2).unsqueeze(1)
        )  # (D_out, 1, D_in / groups, N_h)
        heads_last = heads_last.permute(0, 3, 1, 2)
        kernel = F.conv2d(heads_last, U.T[:, :, None, None])
        return kernel.permute(0, 2, 3, 1).squeeze(1).to(slices.dtype).unflatten(-1, self.count)

    def by_axes(self, keys: Keys) -> Tensor:
        """The layer by the factors of P_h: (B, D_out, *Q)"""
        P = [self.factors(axis, keys)[0] for axis in range(len(keys.sizes))]
        return self.project(attend_by_axes(P, keys.stored.movedim(1, -1)))

    def composed(self, keys: Keys) -> Tensor:
        """The layer as a convolution plus a correction at the borders: (B, D_out, *Q)"""
        counts = self.queries(keys.sizes)
        low, high = (
            [0] * len(counts),
            [0] * len(counts),
        )  # how far windows reach beyond the first and last key
        for axis in range(len(counts)):
            low[axis] = -(self.center[axis] + self.first[axis])
            width = self.step[axis] * (self.count[axis] - 1)
            high[axis] = (
                self.stride[axis] * (counts[axis] - 1) + width - low[axis] - (keys.sizes[axis] - 1)
            )
            # F.pad cannot cut off more than there is, which heads far outside of a small image would ask for.
            stored, before = keys.stored.shape[2 + axis], keys.before[axis]
            if min(before + stored + low[axis], keys.sizes[axis] - before + high[axis]) < 0:
                return self.by_axes(keys)
        out = self.borderless(keys, low, high)
        if max(low) > 0 or max(high) > 0:
            factors = [self.factors(axis, keys) for axis in range(len(counts))]
            P, U = [P for P, _ in factors], [U for _, U in factors]
            for axis in range(len(counts)):
                queries, numbers = self.at_border(keys, axis, low[axis], high[axis])
                if min(queries.shape[0], numbers.shape[0], len(self.outer[axis])) > 0:
                    out.index_add_(
                        2 + axis, queries, self.beyond(keys.stored, P, U, axis, queries, numbers)
                    )
        return out

    def borderless(self, keys: Keys, low: list[int], high: list[int]) -> Tensor:
        """b_out + sum_h U_h X W_val_h, with `low` and `high` additional keys of value zero: (B, D_out, *Q)"""
        x, amounts, even = keys.stored, [0] * 0, True
        padding = [0] * len(low)
        for axis in range(len(low) - 1, -1, -1):
            padding[axis] = keys.before[axis] + low[axis]
            after = keys.sizes[axis] - keys.before[axis] - x.shape[2 + axis] + high[axis]
            even = even and padding[axis] >= 0 and padding[axis] == after
            amounts += [padding[axis], after]
        if not even:
            x, padding = F.pad(x, amounts), self.zeros
        return convolve(
            x, self.composed_kernel(), self.b_out, self.stride, padding, self.step, self.groups
        )

    def at_border(self, keys: Keys, axis: int, low: int, high: int) -> tuple[Tensor, Tensor]:
        """Indices of the queries whose windows reach beyond the border, by `low` or `high`, and of the keys in them.

        Keys are counted from the first stored one; keys that are not stored are left out.
        """
        count, size, stride = self.queries(keys.sizes)[axis], keys.sizes[axis], self.stride[axis]
        first = min(count, max(0, (low + stride - 1) // stride))
        last = max(first, min(count, count - (high + stride - 1) // stride))
        # Where a whole window lies outside, its heads see the keys next to the border, no further than it is wide.
        reach = self.step[axis] * self.count[axis]
        near = (
            max(reach, stride * (first - 1) - low + self.step[axis] * (self.count[axis] - 1) + 1)
            if first > 0
            else 0
        )
        far = min(size - reach, stride * last - low) if last < count else size
        stored = keys.stored.shape[2 + axis]
        near = min(stored, max(0, near - keys.before[axis]))
        far = min(stored, max(near, far - keys.before[axis]))
        queries = torch.arange(count, device=keys.stored.device)
        numbers = torch.arange(stored, device=keys.stored.device)
        return torch.cat([queries[:first], queries[last:]]), torch.cat(
            [numbers[:near], numbers[far:]]
        )

    def beyond(
        self,
        x: Tensor,
        P: list[Tensor],
        U: list[Tensor],
        axis: int,
        queries: Tensor,
        numbers: Tensor,
    ) -> Tensor:
        """Correction for `queries` (C,) along `axis`, which see the keys `numbers` and miss those beyond the border.

        Term a = `axis` of the sum in this file's docstring: (B, D_out, *Q), with C for Q along `axis`.
        """
        heads = torch.tensor(self.outer[axis], device=x.device)
        factors: list[Tensor] = []
        for other in range(len(P)):
            if other == axis:
                added = (P[axis] - U[axis]).index_select(1, queries).index_select(2, numbers)
                factors.append(added.index_select(0, heads))
            else:
                factors.append((P[other] if other > axis else U[other]).index_select(0, heads))
        slices = self.W_val().flatten(2).index_select(2, heads)
        beyond = attend_by_axes(factors, x.index_select(2 + axis, numbers).movedim(1, -1))
        return project(beyond, slices, None, self.groups)

    def by_axes_macs(self, sizes: list[int]) -> int:
        """Multiply-adds of one image with N = `sizes` by axes, one contracted after the other."""
        left, contracted = product(sizes), 0
        for axis, count in enumerate(self.queries(sizes)):
            left = left // sizes[axis] * count
            contracted += left * sizes[axis]
        projected = left * (self.in_channels // self.groups) * self.out_channels
        return self.Delta.shape[0] * (contracted * self.in_channels + projected)

    def composed_macs(self, sizes: list[int]) -> int:
        """Multiply-adds of one image with N = `sizes` by a composed kernel, and of composing it, without borders."""
        weights = product(self.count) * (self.in_channels // self.groups) * self.out_channels
        return (product(self.queries(sizes)) + self.Delta.shape[0]) * weights

    def cheaper_by_axes(self, sizes: list[int]) -> bool:
        return self.axes_cost * self.by_axes_macs(sizes) < self.composed_macs(sizes)

    def forward(self, x: Tensor) -> Tensor:
        """(B, D_in, *image) -> (B, D_out, *Q)"""
        if not torch.jit.is_scripting():
            self.follow()
        keys = self.pad.keys(x)
        if self.dull or self.cheaper_by_axes(keys.sizes):
            return self.by_axes(keys)
        return self.composed(keys)
