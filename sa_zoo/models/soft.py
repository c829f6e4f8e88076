"""Convolutional attention of finite alpha, all of it trainable: SoftAttention. Symbols: convolution.py.

Far from the border every query sees the same neighbourhood, so that sum_h P_h[q, .] W_val_h is one kernel, a little
wider than the convolution's, and the layer is a convolution with it. Near the border the softmax shares itself out to
fewer keys. With U_h for the P_h that knows no border (cut off at it, and not normalised again), each a product of
factors along the axes,

    prod_a P_h^a = prod_a U_h^a + sum_a (prod_{b < a} U_h^b) (P_h^a - U_h^a) (prod_{b > a} P_h^b)

where P_h^a = U_h^a but for a few queries and the outermost heads: one convolution, and two thin strips an axis.
Where images are small and channels many, evaluating all queries by the factors of P_h costs less than the wider
kernel; that is decided by counting multiply-adds.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .convolution import DULLEST, SHARPEST, ConvolutionalAttention, attend_by_axes, axis_scores, mix_heads
from .positions import wide

# A multiply-add of the evaluation by axes takes about this many times that of a convolution: it comes in small
# matrix products whose results go through memory (float32 forward and backward on a Xeon core).
AXES_COST = 2
# Probabilities below this part of the rounding error count as zero: else their products are denormal numbers, with
# which processors are a hundred times slower.
NEGLIGIBLE = 1e-4


def rounding(x: Tensor) -> float:
    """Largest relative error of rounding to the type that `x` is summed in."""
    return torch.finfo(wide(x).dtype).eps / 2


def seen_offsets(Delta: Tensor, alpha: Tensor, precision: float) -> list[tuple[int, int]]:
    """First and last key that each head sees along one axis, as displacements from the query: N_h pairs.

    A head sees a key if its probability, relative to that of the key nearest to Delta_h, is above `precision`.

    Args:
        Delta: (N_h,), alpha: (N_h,).
    """
    Delta, alpha = Delta.detach().cpu().double(), alpha.detach().cpu().double().clamp(DULLEST, SHARPEST)
    radius = ((Delta - Delta.round()).square() - math.log(precision) / alpha).sqrt()
    first, last = (Delta - radius).ceil().int().tolist(), (Delta + radius).floor().int().tolist()
    return list(zip(first, last, strict=True))


def window(seen: list[tuple[int, int]]) -> tuple[int, int, int]:
    """(first, step, count) of the smallest lattice of displacements that holds all that is seen."""
    offsets = {offset for first, last in seen for offset in range(first, last + 1)}
    first, last = min(offsets), max(offsets)
    step = math.gcd(*(offset - first for offset in offsets)) or 1
    return first, step, (last - first) // step + 1


class SoftAttention(ConvolutionalAttention):
    """The layer at finite alpha. Delta (N_h, n) and alpha (N_h,) are parameters.

    `settle` finds the composed kernel's size and the outermost heads from Delta and alpha; it runs when they are set
    or loaded and on every train() and eval(), so that a kernel follows its heads at the latest an epoch later.
    """

    @torch.jit.ignore
    def hold(self, Delta: Tensor, alpha: Tensor) -> None:
        self.Delta = nn.Parameter(Delta)
        self.alpha = nn.Parameter(alpha)
        self.settle()

    @torch.jit.ignore
    def settle(self) -> None:
        """Fit to the present Delta and alpha what forward takes as fixed, a list each with an item an axis:

        `first`, `step`, `count` of the composed kernel, and `outer`, the heads that look beyond the border.
        """
        if self.Delta.is_meta:
            return
        self.negligible = NEGLIGIBLE * rounding(self.W_val())
        seen = [seen_offsets(Delta, self.alpha, rounding(self.W_val())) for Delta in self.Delta.unbind(dim=1)]
        self.first, self.step, self.count = (list(items) for items in zip(*map(window, seen), strict=True))
        self.outer = [
            [head for head, (first, last) in enumerate(pairs) if centre + first < 0 or centre + last > extent]
            for pairs, centre, extent in zip(seen, self.centre, self.extent, strict=True)
        ]

    @torch.jit.ignore
    def train(self, mode: bool = True) -> "SoftAttention":
        self.settle()
        return super().train(mode)

    def _load_from_state_dict(self, *args) -> None:
        super()._load_from_state_dict(*args)
        self.settle()

    def window_scores(self, axis: int) -> Tensor:
        """Scores within the composed kernel along one axis: (N_h, count)"""
        dtype = wide(self.alpha).dtype
        offsets = torch.arange(self.count[axis], device=self.alpha.device) * self.step[axis] + self.first[axis]
        origin = torch.zeros(1, device=self.alpha.device, dtype=dtype)
        return axis_scores(self.Delta[:, axis], self.alpha, origin, offsets.to(dtype)).squeeze(1)

    def share(self, scores: Tensor) -> Tensor:
        """softmax over the last axis, but for what is negligible."""
        return F.threshold(torch.softmax(scores, dim=-1), self.negligible, 0.0)

    def composed_kernel(self) -> Tensor:
        """sum_h U_h[q, .] W_val_h for any query q: (D_out, D_in / groups, *count)"""
        slices = self.W_val()
        U = self.share(self.window_scores(0))
        for axis in range(1, len(self.count)):
            U = (U[:, :, None] * self.share(self.window_scores(axis))[:, None, :]).flatten(1)
        kernel = wide(slices).flatten(2).flatten(0, 1) @ U  # (D_out D_in / groups, prod count)
        return kernel.to(slices.dtype).unflatten(0, slices.shape[:2]).unflatten(-1, self.count)

    def stored(self, x: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """Keys (B, D_in, *stored) of images, the number of the first one stored, and N, both an axis: others are 0."""
        amounts = self.pad.amounts(list(x.shape[2:]))
        before, sizes = [0] * (x.ndim - 2), [0] * (x.ndim - 2)
        for axis in range(x.ndim - 2):
            before[axis] = amounts[-2 * axis - 2]
            sizes[axis] = before[axis] + x.shape[2 + axis] + amounts[-2 * axis - 1]
        if self.pad.mode == "constant":
            return x, before, sizes
        return self.pad(x), [0] * len(sizes), sizes

    def by_axes(self, x: Tensor) -> Tensor:
        """The layer by the factors of P_h: (B, D_in, *image) -> (B, D_out, *Q)"""
        keys, before, sizes = self.stored(x)
        P: list[Tensor] = []
        for axis, count in enumerate(self.queries(sizes)):
            queries, numbers = torch.arange(count, device=x.device), torch.arange(sizes[axis], device=x.device)
            factor = self.share(self.axis_scores(axis, queries, numbers))
            P.append(factor.narrow(2, before[axis], keys.shape[2 + axis]))
        return self.mix(attend_by_axes(P, keys, 0))

    def composed(self, x: Tensor) -> Tensor:
        """The layer as a convolution and what borders add to it: (B, D_in, *image) -> (B, D_out, *Q)"""
        keys, before, sizes = self.stored(x)
        counts = self.queries(sizes)
        low, high = [0] * len(sizes), [0] * len(sizes)  # how far beyond the first and the last key windows reach
        for axis in range(len(sizes)):
            start = self.centre[axis] + self.first[axis]
            end = start + self.step[axis] * (self.count[axis] - 1) + self.stride[axis] * (counts[axis] - 1)
            low[axis], high[axis] = -start, end - (sizes[axis] - 1)
        out = self.convolve(keys, before, sizes, low, high)
        for axis in range(len(sizes)):
            queries, numbers = self.at_border(axis, counts[axis], sizes[axis], low[axis], high[axis], x.device)
            if queries.shape[0] > 0 and len(self.outer[axis]) > 0:
                out.index_add_(2 + axis, queries, self.beyond(keys, before, sizes, axis, queries, numbers))
        return out

    def convolve(self, keys: Tensor, before: list[int], sizes: list[int], low: list[int], high: list[int]) -> Tensor:
        """sum_h U_h X W_val_h + b_out, with `low` and `high` keys of value 0 beyond all N: (B, D_out, *Q)"""
        padding, amounts, even = [0] * len(sizes), [0] * 0, True
        for axis in range(len(sizes) - 1, -1, -1):
            padding[axis] = before[axis] + low[axis]
            after = sizes[axis] - before[axis] - keys.shape[2 + axis] + high[axis]
            even = even and padding[axis] >= 0 and padding[axis] == after
            amounts += [padding[axis], after]
        if not even:
            keys, padding = F.pad(keys, amounts), self.zeros
        kernel = self.composed_kernel()
        return torch.convolution(
            keys, kernel, self.b_out, self.stride, padding, self.step, False, self.zeros, self.groups
        )

    def at_border(
        self, axis: int, count: int, size: int, low: int, high: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Numbers of the queries whose windows reach beyond the border, by `low` or `high`, and of the keys they see."""
        stride, width = self.stride[axis], self.step[axis] * (self.count[axis] - 1)
        first = min(count, max(0, (low + stride - 1) // stride))
        last = max(first, min(count, count - (high + stride - 1) // stride))
        queries = torch.arange(count, device=device)
        near = min(size, max(0, stride * (first - 1) - low + width + 1) if first > 0 else 0)
        far = max(near, min(size, stride * last - low) if last < count else size)
        keys = torch.arange(size, device=device)
        return torch.cat([queries[:first], queries[last:]]), torch.cat([keys[:near], keys[far:]])

    def beyond(
        self, keys: Tensor, before: list[int], sizes: list[int], axis: int, queries: Tensor, numbers: Tensor
    ) -> Tensor:
        """What missing keys beyond the border add to `queries` (C,) along `axis`, which see the keys `numbers` (S,).

        Term a = `axis` of the sum in this file's docstring: (B, D_out, *Q), with C for Q along `axis`.
        """
        heads = torch.tensor(self.outer[axis], device=keys.device)
        factors: list[Tensor] = []
        for other, count in enumerate(self.queries(sizes)):
            total = self.window_scores(other)[heads].logsumexp(dim=-1)[:, None, None]
            if other == axis:
                scores = self.axis_scores(axis, queries, numbers)[heads]
                factor = self.share(scores) - F.threshold(torch.exp(scores - total), self.negligible, 0.0)
                inside = numbers - before[axis]
                kept = (inside >= 0) & (inside < keys.shape[2 + axis])
                factors.append(factor * kept)
                keys = keys.index_select(2 + axis, inside.clamp(0, keys.shape[2 + axis] - 1))
            else:
                everyone, all_keys = torch.arange(count, device=keys.device), torch.arange(sizes[other], device=keys.device)
                scores = self.axis_scores(other, everyone, all_keys)[heads]
                factor = self.share(scores) if other > axis else F.threshold(torch.exp(scores - total), self.negligible, 0.0)
                factors.append(factor.narrow(2, before[other], keys.shape[2 + other]))
        slices = self.W_val().flatten(2)[:, :, heads]
        return mix_heads(attend_by_axes(factors, keys, axis), slices, None, self.groups)

    def by_axes_macs(self, sizes: list[int]) -> int:
        """Multiply-adds of one image with N = `sizes` by axes."""
        left, contracted, pixels = 1, 0, 1
        for size in sizes:
            left *= size
        for axis, count in enumerate(self.queries(sizes)):
            left = left // sizes[axis] * count
            contracted += left * sizes[axis]
            pixels *= count
        inner = self.in_channels // self.groups
        return self.Delta.shape[0] * (contracted * self.in_channels + pixels * inner * self.out_channels)

    def composed_macs(self, sizes: list[int]) -> int:
        """Multiply-adds of one image with N = `sizes` by a composed kernel, and of composing it; borders left out."""
        pixels, seen = 1, 1
        for axis, count in enumerate(self.queries(sizes)):
            pixels *= count
            seen *= self.count[axis]
        return (pixels + self.Delta.shape[0]) * seen * (self.in_channels // self.groups) * self.out_channels

    def cheaper_by_axes(self, sizes: list[int]) -> bool:
        return AXES_COST * self.by_axes_macs(sizes) < self.composed_macs(sizes)

    def forward(self, x: Tensor) -> Tensor:
        """(B, D_in, *image) -> (B, D_out, *Q)"""
        if self.cheaper_by_axes(self.stored(x)[2]):
            return self.by_axes(x)
        return self.composed(x)

    @torch.jit.ignore
    def macs(self, image: list[int]) -> int:
        sizes = self.key_sizes(image)
        return self.by_axes_macs(sizes) if self.cheaper_by_axes(sizes) else self.composed_macs(sizes)
