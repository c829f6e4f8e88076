"""Convolutional attention of finite alpha, all of it trainable: SoftAttention. Symbols: theorem.py.

P_h is a product of one factor per axis, so every query can be evaluated by axes. Far from the border there is a shorter
way: each query attends to the same neighborhood, so sum_h P_h[q, .] W_val_h is one kernel, a little larger than the
convolution's, and the layer is a convolution with it. The queries whose neighborhoods reach beyond the border form a
frame around the others; each side of the frame is evaluated by axes.

Delta and alpha decide the size of the neighborhood. Every call reads their values; nothing is cached or out of date.
Where values cannot be read (transforms of torch.func, graphs, the meta device), all queries are evaluated by axes.
"""

import math
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from sa_zoo.convolution.convolutional import ConvolutionalAttention
from sa_zoo.convolution.padding import Keys
from sa_zoo.convolution.theorem import neighborhoods
from sa_zoo.fast.taps import is_ordinary
from sa_zoo.models.attention import attend_by_axes, probabilities_from
from sa_zoo.models.positions import at_least_float32


class SoftAttention(ConvolutionalAttention):
    """The layer at finite alpha. Delta (N_h, n) and alpha (N_h,) are parameters."""

    # Time of a multiply-add by axes, relative to one of a convolution: it is part of small matrix products whose
    # results go through memory (float32, forward and backward, on a Xeon core).
    axes_cost: Final[int] = 2

    def forward(self, x: Tensor) -> Tensor:
        """(B, D_in, *image) -> (B, D_out, *Q)"""
        keys = self.pad.keys(x)
        if torch.jit.is_scripting():
            return self.by_axes(keys)
        return self.evaluate(keys)

    def factor(self, axis: int, keys: Keys) -> Tensor:
        """The factor of P_h along one axis, for the stored keys: (N_h, Q, stored)"""
        P = probabilities_from(self.axis_scores(axis, keys.sizes))
        return P.narrow(2, keys.before[axis], keys.stored.shape[2 + axis])

    def by_axes(self, keys: Keys) -> Tensor:
        """The layer by the factors of P_h: (B, D_out, *Q)"""
        factors = [self.factor(axis, keys) for axis in range(len(keys.sizes))]
        return self.project(attend_by_axes(factors, keys.stored.movedim(1, -1)))

    @torch.jit.ignore
    def evaluate(self, keys: Keys) -> Tensor:
        """The layer in the cheaper way: (B, D_out, *Q)"""
        neighborhoods = self.neighborhoods()
        inside = [
            self.inside(axis, keys, neighborhood) for axis, neighborhood in enumerate(neighborhoods)
        ]
        if neighborhoods and self.is_cheaper_composed(keys.sizes, neighborhoods, inside):
            return self.framed(keys, inside, self.composed(keys, neighborhoods, inside))
        return self.by_axes(keys)

    def neighborhoods(self) -> list[range]:
        """One neighborhood per axis; empty if a head has unbounded support, or if values cannot be read."""
        in_graph = torch.compiler.is_compiling() or torch.jit.is_tracing()
        if in_graph or self.Delta.is_meta or not is_ordinary(self.Delta, self.alpha):
            return []
        return neighborhoods(
            self.Delta, self.alpha, torch.finfo(at_least_float32(self.alpha).dtype).eps
        )

    def inside(self, axis: int, keys: Keys, neighborhood: range) -> range:
        """The queries along one axis whose neighborhoods lie within the keys."""
        stride = self.stride[axis]
        count = self.queries(keys.sizes)[axis]
        room = keys.sizes[axis] - 1 - self.center[axis] - neighborhood[-1]
        begin = max(0, -((self.center[axis] + neighborhood[0]) // stride))
        return range(begin, min(room // stride + 1, count))

    def is_cheaper_composed(
        self, sizes: list[int], neighborhoods: list[range], inside: list[range]
    ) -> bool:
        """Whether composing a kernel and a convolution with it cost less than the same queries of one image by axes."""
        heads = len(self.alpha)
        queries = math.prod(map(len, inside))
        weights = self.in_channels // self.groups * self.out_channels
        composed = (queries + heads) * math.prod(map(len, neighborhoods)) * weights
        by_axes = queries * heads * (self.in_channels * sum(sizes) + weights)
        return composed <= self.axes_cost * by_axes

    def composed(self, keys: Keys, neighborhoods: list[range], inside: list[range]) -> Tensor:
        """The outputs of the queries `inside`, as one convolution: (B, D_out, *inside)"""
        x = keys.stored
        padding = [0] * len(neighborhoods)
        amounts: list[int] = []
        even = True
        for axis in reversed(range(len(neighborhoods))):
            stride = self.stride[axis]
            # Keys are counted from the first stored one.
            center = self.center[axis] - keys.before[axis]
            before = -(center + stride * inside[axis][0] + neighborhoods[axis][0])
            last = center + stride * inside[axis][-1] + neighborhoods[axis][-1]
            after = last + 1 - x.shape[2 + axis]
            padding[axis] = before
            amounts += [before, after]
            # The convolution ignores up to stride - 1 keys after the last neighborhood.
            even = even and before >= max(after, 0) and before - after < stride
        if not even:
            x = F.pad(x, [max(amount, 0) for amount in amounts])
            x = F.pad(x, [min(amount, 0) for amount in amounts])
            padding = self.zeros
        kernel = self.composed_kernel(neighborhoods)
        return self.convolve(x, kernel, self.b_out, self.stride, padding, 1, self.groups)

    def framed(self, keys: Keys, inside: list[range], out: Tensor) -> Tensor:
        """All outputs, given `out` of the queries `inside`: (B, D_out, *inside) -> (B, D_out, *Q)"""
        wanted: list[Any] = [slice(queries.start, queries.stop) for queries in inside]
        for axis, queries in enumerate(inside):
            outside = [*range(queries.start), *range(queries.stop, self.queries(keys.sizes)[axis])]
            if outside:
                wanted[axis] = outside
                P = [self.factor(other, keys)[:, wanted[other]] for other in range(len(wanted))]
                # The frame's own axis comes first: it leaves least work for the others.
                P.insert(0, P.pop(axis))
                heads = attend_by_axes(P, keys.stored.movedim([2 + axis, 1], [1, -1]))
                frame = self.project(heads.movedim(1, 1 + axis))
                before, after = frame.tensor_split([queries.start], dim=2 + axis)
                out = torch.cat([before, out, after], dim=2 + axis)
            wanted[axis] = slice(None)
        return out
