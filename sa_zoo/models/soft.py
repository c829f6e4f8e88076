"""Convolutional attention of finite alpha, all of it trainable: SoftAttention. Symbols: convolution.py.

Far from the border every query sees the same neighbourhood, so that sum_h P_h[q, k] W_val_h is one kernel, a little
wider than the convolution's, and the layer a convolution with it. Near the border the softmax has fewer keys to share
itself out to; those queries are evaluated by axes, P_h = prod_axes P_h^axis. Where images are small and channels many,
evaluating every query by axes costs less than the wider kernel, which is decided by counting multiply-adds.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .convolution import DULLEST, SHARPEST, ConvolutionalAttention, attend_by_axes, axis_scores
from .positions import wide

# A multiply-add of the evaluation by axes takes about this many times that of a convolution: it comes in small
# matrix products whose results go through memory (float32 forward and backward on a Xeon core).
AXES_COST = 2


def seen_offsets(Delta: Tensor, alpha: Tensor, precision: float) -> tuple[int, int, int]:
    """Keys that some head sees along one axis, as displacements first, first + step, ..., `count` of them.

    A head sees a key if that key's probability, relative to the nearest key's, is above `precision`.

    Args:
        Delta: (N_h,), alpha: (N_h,).

    Returns:
        (first, step, count), the smallest such lattice.
    """
    Delta, alpha = Delta.detach().cpu().double(), alpha.detach().cpu().double().clamp(DULLEST, SHARPEST)
    nearest = Delta.round()
    radius = ((Delta - nearest).square() - math.log(precision) / alpha).sqrt()
    seen: set[int] = set()
    for low, high in zip((Delta - radius).ceil().tolist(), (Delta + radius).floor().tolist(), strict=True):
        seen.update(range(int(low), int(high) + 1))
    first = min(seen)
    step = math.gcd(*(offset - first for offset in seen)) or 1
    return first, step, (max(seen) - first) // step + 1


class SoftAttention(ConvolutionalAttention):
    """The layer at finite alpha. Delta (N_h, n) and alpha (N_h,) are parameters.

    `settle` finds the composed kernel's size from Delta and alpha; it runs when they are set, loaded, and on every
    train() and eval(), so that a kernel follows its heads at the latest an epoch later.
    """

    @torch.jit.ignore
    def hold(self, Delta: Tensor, alpha: Tensor) -> None:
        self.Delta = nn.Parameter(Delta)
        self.alpha = nn.Parameter(alpha)
        self.settle()

    @torch.jit.ignore
    def settle(self) -> None:
        """Fit the composed kernel to the present Delta and alpha: `first`, `step` and `count`, one an axis."""
        if not self.Delta.is_meta:
            precision = torch.finfo(wide(self.W_val().detach()).dtype).eps / 2
            windows = [seen_offsets(Delta, self.alpha, precision) for Delta in self.Delta.unbind(dim=1)]
            self.first, self.step, self.count = (list(values) for values in zip(*windows, strict=True))

    @torch.jit.ignore
    def train(self, mode: bool = True) -> "SoftAttention":
        self.settle()
        return super().train(mode)

    def _load_from_state_dict(self, *args) -> None:
        super()._load_from_state_dict(*args)
        self.settle()

    def composed_kernel(self) -> Tensor:
        """sum_h P_h[q, q + .] W_val_h for a query q far from the border: (D_out, D_in / groups, *count)"""
        P = torch.ones(1, 1, device=self.Delta.device)
        for axis, (first, step, count) in enumerate(zip(self.first, self.step, self.count)):
            offsets = (torch.arange(count, device=P.device) * step + first).to(wide(self.alpha).dtype)
            origin = torch.zeros(1, device=P.device, dtype=offsets.dtype)
            factor = torch.softmax(axis_scores(self.Delta[:, axis], self.alpha, origin, offsets), dim=-1)
            P = (P[:, :, None] * factor).flatten(1)  # (N_h, 1, count) broadcast: heads by window, row-major
        slices = self.W_val()
        return (wide(slices).flatten(2) @ P).to(slices.dtype).unflatten(-1, self.count)

    def by_axes(self, keys: Tensor, axis: int, chosen: Tensor) -> Tensor:
        """The queries whose number along `axis` is in `chosen` (C,): (B, D_in, *N) -> (B, D_out, *Q), C for that Q."""
        P: list[Tensor] = []
        sizes = list(keys.shape[2:])
        for other, count in enumerate(self.queries(sizes)):
            numbers = chosen if other == axis else torch.arange(count, device=keys.device)
            P.append(torch.softmax(self.axis_scores(other, numbers, sizes[other]), dim=-1))
        return self.mix(attend_by_axes(P, keys, axis))

    def composed(self, keys: Tensor) -> Tensor:
        """All queries, those that miss keys beyond the border by axes: (B, D_in, *N) -> (B, D_out, *Q)"""
        sizes = list(keys.shape[2:])
        counts = self.queries(sizes)
        amounts: list[int] = []  # what the outermost queries see beyond the border, negative if less than all keys
        for axis in range(len(sizes) - 1, -1, -1):
            start = self.centre[axis] + self.first[axis]
            end = start + self.step[axis] * (self.count[axis] - 1) + self.stride[axis] * (counts[axis] - 1)
            amounts += [-start, end - (sizes[axis] - 1)]
        out = torch.convolution(
            F.pad(keys, amounts),
            self.composed_kernel(),
            self.b_out,
            self.stride,
            self.zeros,
            self.step,
            False,
            self.zeros,
            self.groups,
        )
        for axis, count in enumerate(counts):
            start = self.centre[axis] + self.first[axis]
            room = sizes[axis] - 1 - start - self.step[axis] * (self.count[axis] - 1)
            low = min(count, max(0, (self.stride[axis] - 1 - start) // self.stride[axis]))
            high = max(low, min(count, room // self.stride[axis] + 1))
            if low + count - high > 0:
                device = keys.device
                border = torch.cat([torch.arange(low, device=device), torch.arange(high, count, device=device)])
                out = out.index_copy(2 + axis, border, self.by_axes(keys, axis, border))
        return out

    def cheaper_by_axes(self, sizes: list[int]) -> bool:
        """Whether multiply-adds by axes, of one image and one output channel, are the fewer ones."""
        inner = self.in_channels // self.groups
        heads = self.Delta.shape[0]
        counts = self.queries(sizes)
        pixels, window, contracted = 1, 1, 0
        for count, seen in zip(counts, self.count):
            pixels *= count
            window *= seen
        left = sizes[0]
        for size in sizes[1:]:
            left *= size
        for size, count in zip(sizes, counts):
            left = left // size * count
            contracted += left * size
        by_axes = heads * (contracted * self.in_channels / self.out_channels + pixels * inner)
        return AXES_COST * by_axes < (pixels + heads) * window * inner

    def forward(self, x: Tensor) -> Tensor:
        """(B, D_in, *image) -> (B, D_out, *Q)"""
        keys = self.pad(x)
        sizes = list(keys.shape[2:])
        if self.cheaper_by_axes(sizes):
            return self.by_axes(keys, 0, torch.arange(self.queries(sizes)[0], device=keys.device))
        return self.composed(keys)
